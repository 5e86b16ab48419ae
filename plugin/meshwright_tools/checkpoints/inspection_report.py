"""What ``meshwright inspect`` prints about a checkpoint, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import torch

from meshwright.checkpoint.files.place import Place
from meshwright.checkpoint.files.storage import storage_of
from meshwright.checkpoint.format.checkpoint_folders import Manifest, absent_files, checkpoint_folders, foreign_files
from meshwright.checkpoint.format.part_files import file_names, tag_of
from meshwright.checkpoint.one_device.safetensors_file import Form, num_bytes
from meshwright.errors import CheckpointError
from meshwright.plan.text import format_plan
from meshwright_tools.checkpoints.inspect_checkpoint import Damage, Inspection

Report = dict[str, Any]  # what JSON can hold, by name
_SHOWN = 20  # the most files or damages that the text lists


def as_dict(found: Inspection, others: list[dict[str, object]] | None = None) -> dict[str, object]:
    """Return an inspection as JSON, with the rows of :func:`listing` if the folder holds several checkpoints."""
    report: dict[str, object] = {} if others is None else {"checkpoints": others}
    report["folder"] = str(found.folder)
    if found.manifest is not None:
        report |= _contents(found.manifest, found.random) | _sizes(found.manifest, found.files)
    report["files"] = found.files
    report["bytes_read"] = found.bytes_read
    report["is_whole"] = not found.damages and (None if found.bytes_read is None else True)
    report["damages"] = [asdict(damage) for damage in found.damages]
    return report


def listing(parent: Place) -> list[dict[str, object]]:
    """Return a row for each checkpoint in a folder, in the order of the saves."""
    rows = []  # pairs of an order and a row
    for folder in checkpoint_folders(parent):
        row: dict[str, object] = {"name": folder.name, "step": None, "written": None}
        row["bytes"] = sum(entry.size for entry in storage_of(folder).entries(folder).values())
        order = (0, 0)
        try:
            manifest = Manifest.read(folder)
            order = manifest.order
            row |= {"step": manifest.step, "written": _date(manifest)}
            absent, foreign = absent_files(folder, manifest), foreign_files(folder)
            row["problem"] = (
                f"{absent[0]} is missing or has another size" if absent
                else f"{foreign[0]} is not a file of a checkpoint" if foreign else None
            )  # fmt: skip
        except CheckpointError as error:
            row["problem"] = str(error).replace(f"{folder}/", "")
        rows.append((order, row))
    return [row for _, row in sorted(rows, key=lambda item: item[0])]


def as_text(found: Inspection, others: list[dict[str, object]] | None = None) -> str:
    """Return an inspection as text."""
    lines = [] if others is None else [*listing_lines(others), "", "The newest whole one:"]
    lines += [str(found.folder), ""]
    if found.manifest is not None:
        lines += [*_content_lines(as_dict(found)), "", *_file_lines(found), ""]
    return "\n".join(lines + _verdict(found))


def listing_lines(rows: list[Report]) -> list[str]:
    """Return the lines of the table of several checkpoints."""
    width = max(len("checkpoint"), *(len(row["name"]) for row in rows))
    lines = [f"{'checkpoint':<{width}} {'step':>9}  {'written':<20} {'size':>9}  at first sight"]
    lines += [
        f"{row['name']:<{width}} {_or_dash(row['step']):>9}  {_or_dash(row['written']):<20} "
        f"{_size(row['bytes']):>9}  {row['problem'] or 'whole'}"
        for row in rows
    ]
    return lines


def _contents(manifest: Manifest, random: list[str]) -> Report:
    groups: dict[str, Report] = {"weights": {}, "state": {}, "master": {}}
    for key, form in manifest.tensors.items():
        groups.setdefault(key.partition("/")[0], {})[key] = form
    components: Report = {
        "weights": _tensors(groups["weights"]) | {"other_names": len(manifest.ties)},
        "optimizer": None,
        "scheduler": _keys(manifest.scheduler),
        "scaler": _keys(manifest.scaler),
        "loader": None if manifest.loader is None else sorted(manifest.loader),
        "random": random,
        "dropout_streams": None if manifest.streams is None else sorted(manifest.streams),
        "extra": manifest.extra,
        "model_config": sorted(manifest.model_config or ()),
    }
    if manifest.optimizer is not None:
        tables = [manifest.optimizer.get(name) for name in ("tensors", "values")]
        keys = {key for table in tables if isinstance(table, dict) for state in table.values() for key in state}
        components["optimizer"] = {
            "class": manifest.optimizer.get("optimizer"),
            "state": sorted(keys),
            "tensors": _tensors(groups["state"]),
            "master_weights": _tensors(groups["master"]),
        }
    return {
        "step": manifest.step,
        "number": manifest.number,
        "run": manifest.run,
        "written": _date(manifest),
        "versions": manifest.versions,
        "plan": manifest.plan,
        "mesh": manifest.mesh,
        "components": components,
    }


def _tensors(forms: Mapping[str, Form]) -> dict[str, object]:
    return {
        "tensors": len(forms),
        "elements": sum(torch.Size(shape).numel() for _, shape in forms.values()),
        "dtypes": sorted({str(dtype).removeprefix("torch.") for dtype, _ in forms.values()}),
        "bytes": _bytes(forms),
    }


def _bytes(forms: Mapping[str, Form]) -> int:
    return sum(map(num_bytes, forms.values()))


def _keys(encoded: object) -> list[str] | None:
    """The keys of an encoded state."""
    if encoded is None:
        return None
    table = encoded.get("dict") if isinstance(encoded, dict) else None
    return sorted(table) if isinstance(table, dict) else []


def _sizes(manifest: Manifest, files: Mapping[str, int]) -> Report:
    tag = tag_of(manifest.files)
    ranks = [sum(files.get(name, 0) for name in file_names(place, tag)) for place in range(manifest.ranks)]
    return {
        "ranks": {"saved": manifest.ranks, "largest": max(ranks), "mean": sum(ranks) / len(ranks)},
        "bytes_on_disk": sum(files.values()),
        "unique_bytes": _bytes(manifest.tensors),
    }


def _content_lines(report: Report) -> list[str]:
    mesh, parts, optimizer = report["mesh"], report["components"], report["components"]["optimizer"]
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1)
    ranks = f"{report['ranks']['saved']} rank(s)" + (f": {axes}" if axes else "")
    names = parts["weights"]["other_names"]
    rows = {
        "step": _or_dash(report["step"]),
        "written": report["written"],
        "versions": ", ".join(f"{name} {version}" for name, version in report["versions"].items()),
        "plan": f"{_plan(report['plan'])}, {ranks}",
        "weights": _counted(parts["weights"], "parameters") + (f", {names} tied name(s)" if names else ""),
        "optimizer": "-",
        "scheduler": _or_dash(parts["scheduler"]),
        "scaler": _or_dash(parts["scaler"]),
        "loader": _or_dash(parts["loader"]),
        "random": f"{_or_dash(parts['random'])}, of each rank",
        "dropout": _or_dash(parts["dropout_streams"]),
        "model": _or_dash(parts["model_config"] or None),
        "extra": _shortened(json.dumps(parts["extra"])) if parts["extra"] is not None else "-",
    }
    if optimizer is not None:
        rows["optimizer"] = f"{optimizer['class']} ({', '.join(optimizer['state'])}): {_counted(optimizer['tensors'])}"
        if optimizer["master_weights"]["tensors"]:
            rows["master weights"] = _counted(optimizer["master_weights"])
    order = [name for name in rows if name != "master weights"]
    order.insert(order.index("scheduler"), "master weights")
    return [f"{name:<15} {rows[name]}" for name in order if name in rows]


def _plan(plan: dict[str, object] | None) -> str:
    if plan is None:
        return "not distributed"
    try:
        return format_plan(plan)
    except (ValueError, KeyError, TypeError):  # a plan of another version
        return _shortened(json.dumps(plan))


def _file_lines(found: Inspection) -> list[str]:
    assert found.manifest is not None
    sizes = _sizes(found.manifest, found.files)
    lines = [f"{'file':<27} {'bytes':>17}"]
    lines += [f"{name:<27} {size:>17,}" for name, size in list(found.files.items())[:_SHOWN]]
    lines += [f"... and {len(found.files) - _SHOWN} more"] if len(found.files) > _SHOWN else []
    largest, mean, unique = sizes["ranks"]["largest"], sizes["ranks"]["mean"], sizes["unique_bytes"]
    lines.append(f"{'largest / mean rank':<27} {_size(largest)} / {_size(mean)} = {largest / max(mean, 1):.3f}")
    on_disk = sizes["bytes_on_disk"]
    lines.append(f"{'on disk / unique':<27} {_size(on_disk)} / {_size(unique)} = {on_disk / max(unique, 1):.3f}")
    return lines


def _verdict(found: Inspection) -> list[str]:
    if found.damages:
        lines = [f"DAMAGED: {len(found.damages)} thing(s) are wrong. Load another checkpoint."]
        lines += [f"  {_damage(damage)}" for damage in found.damages[:_SHOWN]]
        more = len(found.damages) - _SHOWN
        return lines + ([f"  ... and {more} more; --json lists them all"] if more > 0 else [])
    if found.bytes_read is None:
        return ["Nothing is wrong with the manifest, indexes and headers. The tensors were not read (--no-check)."]
    return [f"WHOLE: all {found.bytes_read:,} bytes of tensors are what was saved, and each element is there once."]


def _damage(damage: Damage) -> str:
    place = "" if damage.byte is None else f" (byte {damage.byte}" + (")" if not damage.bytes else "")
    if damage.bytes:
        place += f" to {(damage.byte or 0) + damage.bytes - 1})"
    return f"{damage.file}: {damage.problem}{place}"


def _counted(tensors: Report, noun: str = "elements") -> str:
    dtypes = ", ".join(tensors["dtypes"]) or "none"
    return f"{tensors['tensors']} tensors, {tensors['elements']:,} {noun}, {dtypes}, {_size(tensors['bytes'])}"


def _or_dash(value: object) -> str:
    return "-" if value is None else ", ".join(value) if isinstance(value, list) else str(value)


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


def _date(manifest: Manifest) -> str:
    try:
        return datetime.fromtimestamp(manifest.written / 1e9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, ValueError, OSError):
        return f"{manifest.written} ns since 1970"


def _size(count: float) -> str:
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"
