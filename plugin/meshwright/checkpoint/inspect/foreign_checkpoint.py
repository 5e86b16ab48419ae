"""Look into checkpoints of the Trainer and of accelerate, with a seal of Meshwright or without one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from meshwright.checkpoint.files.reading import first_of, json_object
from meshwright.checkpoint.inspect.inspect_checkpoint import Damage
from meshwright.checkpoint.sealed.seal import NAME as SEAL
from meshwright.checkpoint.sealed.seal import Seal, in_order, sizes_in
from meshwright.checkpoint.sealed.sealed_folder import damaged_chunks
from meshwright.errors import CheckpointError
from meshwright.plan.text import format_plan

_STATE, _TRAINERS, _ACCELERATES = "trainer_state.json", "meshwright_progress.json", "meshwright.json"
_NUMBERED = re.compile(r"checkpoint[-_](\d+)")
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors", "pytorch_model.bin")
_SHOWN = 20  # the most files or damages that the text lists


@dataclass(frozen=True, kw_only=True)
class ForeignInspection:
    """The content of a checkpoint of the Trainer or of accelerate.

    Args:
        folder: its folder.
        program: "Trainer" or "accelerate".
        step: its step; None if the program has not written it.
        plan: the fields of the plan under which it was saved; None without one.
        written: when it was sealed; None without a seal.
        files: the size in bytes of each file, by its path in the folder.
        damages: all that is wrong.
        is_compared: whether all bytes were compared with the digests of the seal.
    """

    folder: Path
    program: str
    step: int | None
    plan: Mapping[str, Any] | None
    written: str | None
    files: Mapping[str, int]
    damages: list[Damage]
    is_compared: bool

    @property
    def has_model(self) -> bool:
        """Whether ``from_pretrained`` reads the folder: it has weights and the config of their model."""
        configs = ("config.json", "adapter_config.json")
        return any(name in self.files for name in _WEIGHTS) and any(name in self.files for name in configs)


def program_of(folder: Path) -> str | None:
    """Return which program has saved a checkpoint to a folder: "Trainer" or "accelerate"; None if neither has."""
    if any((folder / name).is_file() for name in (_STATE, _TRAINERS)) and _has_weights(folder):
        return "Trainer"
    has_states = any(folder.glob("random_states_*.pkl"))
    return "accelerate" if has_states or (folder / _ACCELERATES).is_file() else None


def find_foreign(folder: Path) -> list[Path]:
    """Return the checkpoints of the Trainer or of accelerate in a folder, in the order of their saves.

    This is the folder itself, or the numbered ones in it and in ``checkpoints``, which accelerate makes.
    """
    if program_of(folder) is not None and _NUMBERED.fullmatch(folder.resolve().name):
        return [folder]
    parents = [path for path in (folder, folder / "checkpoints") if path.is_dir()]
    inside = [path for parent in parents for path in parent.iterdir() if _NUMBERED.fullmatch(path.name)]
    found = [path for path in inside if program_of(path) is not None]
    if not found and program_of(folder) is not None:
        return [folder]
    return in_order(found)


def inspect_foreign(folder: Path, *, reads_tensors: bool = True) -> ForeignInspection:
    """Look into a checkpoint of the Trainer or of accelerate.

    Args:
        folder: its folder.
        reads_tensors: whether to compare all bytes with the digests of the seal, instead of the sizes only.
    """
    program = program_of(folder) or "Trainer"
    progress = json_object(folder / (_TRAINERS if program == "Trainer" else _ACCELERATES))
    step = (
        json_object(folder / _STATE).get("global_step") if program == "Trainer" else first_of(progress, "shown_steps")
    )
    plan = progress.get("plan")
    damages: list[Damage] = []
    written, is_compared = None, False
    if (folder / SEAL).exists():
        try:
            seal = Seal.read(folder)
            written = datetime.fromtimestamp(seal.written / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S")
            problems = seal.problems(folder)
            if not problems and reads_tensors:
                problems, is_compared = damaged_chunks(folder, seal), True
        except (CheckpointError, OSError) as error:
            problems = [str(error)]
        damages = [Damage(file=SEAL, problem=problem.replace(f"{folder}/", "")) for problem in problems]
    elif progress:
        damages = [Damage(file=SEAL, problem=f"{SEAL} is missing: the save did not end, or an older version saved it")]
    try:
        files = dict(sorted(sizes_in(folder).items()))
    except CheckpointError:  # a link, which is reported above if there is a seal
        files = {path.name: path.lstat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    return ForeignInspection(
        folder=folder, program=program, step=step, plan=plan if isinstance(plan, dict) else None, written=written,
        files=files, damages=damages, is_compared=is_compared,
    )  # fmt: skip


def foreign_dict(found: ForeignInspection, others: list[Path] | None = None) -> dict[str, object]:
    """Return an inspection as JSON, with the names of the checkpoints beside it if there are any."""
    names: dict[str, object] = {} if not others else {"checkpoints": [path.name for path in others]}
    report = asdict(found) | {"folder": str(found.folder), "is_sealed": found.written is not None}
    return {**names, **report, "is_whole": not found.damages and (True if found.is_compared else None)}


def foreign_text(found: ForeignInspection, others: list[Path] | None = None) -> str:
    """Return an inspection as text."""
    lines = [] if not others else [f"{len(others)} checkpoints: {', '.join(path.name for path in others)}", ""]
    whose = f"of {'the Trainer' if found.program == 'Trainer' else 'accelerate'}"
    lines += [str(found.folder), "", f"{'checkpoint':<15} {whose}, {'sealed' if found.written else 'not sealed'}"]
    plan = "not distributed, or not known" if found.plan is None else format_plan(found.plan)
    rows = {"step": found.step, "written": found.written, "plan": plan}
    lines += [f"{name:<15} {'-' if value is None else value}" for name, value in rows.items()]
    lines += ["", f"{'file':<42} {'bytes':>17}"]
    lines += [f"{name:<42} {size:>17,}" for name, size in list(found.files.items())[:_SHOWN]]
    lines += [f"... and {len(found.files) - _SHOWN} more"] if len(found.files) > _SHOWN else []
    return "\n".join([*lines, "", *_verdict(found)])


def _verdict(found: ForeignInspection) -> list[str]:
    if found.damages:
        shown = [f"  {damage.problem}" for damage in found.damages[:_SHOWN]]
        return [f"DAMAGED: {len(found.damages)} thing(s) are wrong. Resume from another checkpoint.", *shown]
    reads = f"from_pretrained({str(found.folder)!r}) reads its weights as they are." if found.has_model else ""
    if found.is_compared:
        verdict = f"WHOLE: all {sum(found.files.values()):,} bytes are what was saved."
    elif found.written is not None:
        verdict = "Nothing is wrong with the names and sizes of the files. Their bytes were not read (--no-check)."
    else:
        verdict = "Not sealed by Meshwright, so there are no digests to compare the files with."
    return [verdict, *filter(None, [reads])]


def _has_weights(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (*_WEIGHTS, SEAL))
