"""Damage of any file of a checkpoint is an error that names the file, and the tensor if it is in one."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.checkpoint.files.reading import FIELDS, digest
from meshwright.checkpoint.format.checkpoint_folders import NAME, Manifest
from support.exact import Float64
from support.models import build
from support.tiers import crossings

TP2 = {"tp": 2, "sequence_parallel": True}


def objects(plan: dict[str, Any], seed: int = 0) -> tuple[Any, Any, Any]:
    model = build("llama", seed=seed, num_hidden_layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    if plan:
        config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan))
        model, optimizer, _ = mw.to_distributed(model, optimizer, config=config)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer, scheduler


def save(plan: dict[str, Any], folder: Path) -> None:
    with Float64():
        model, optimizer, scheduler = objects(plan)
        mw.save_checkpoint(folder, model, optimizer, scheduler=scheduler, step=1, extra={"epoch": 3})


def load(folder: Path) -> None:
    with Float64():
        model, optimizer, scheduler = objects({}, seed=1)
        mw.load_checkpoint(folder, model, optimizer, scheduler=scheduler)


@pytest.fixture(scope="module")
def whole(pool2: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "a"
    pool2.run(save, TP2, folder)
    load(folder)
    return folder


def copy_of(folder: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(folder, to)
    return to


def damage(folder: Path, draw: random.Random) -> tuple[str, str]:
    """Damage a file; return its name and what was done."""
    path = draw.choice(sorted(folder.iterdir()))
    # Most of the bytes are tensors: half of the flips are in the other files.
    kind = draw.choice(["flip"] * 7 + ["truncate", "delete", "rename"])
    size = path.stat().st_size
    if kind == "flip":
        place, bit = draw.randrange(size), draw.randrange(8)
        with path.open("r+b") as file:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1 << bit]))
        return path.name, f"bit {bit} of byte {place}"
    if kind == "truncate":
        os.truncate(path, draw.randrange(size))
    elif kind == "delete":
        path.unlink()
    else:
        path.rename(path.with_name(draw.choice(["part-00009.json", "other.json", "part-00000.safetensors"])))
    return path.name, kind


@pytest.mark.parametrize("seed", crossings(range(25), but=[0]))
def test_damage_is_an_error_that_names_the_file(seed: int, whole: Path, tmp_path: Path) -> None:
    draw = random.Random(seed)
    for _ in range(40):
        folder = copy_of(whole, tmp_path / "a")
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        name, what = damage(folder, draw)
        if {path.name: path.read_bytes() for path in folder.iterdir()} == before:
            continue
        with pytest.raises(mw.CheckpointError) as error:
            load(folder)
        assert name in str(error.value), (name, what, str(error.value))
        is_in_header = "byte" in what and int(what.split()[-1]) < 8 + int.from_bytes(before[name][:8], "little")
        if name.endswith(".safetensors") and "byte" in what and not is_in_header:
            assert "/" in str(error.value) and ("weights/" in str(error.value) or "state/" in str(error.value))


def rewritten(folder: Path, change: Any) -> None:
    """Change the manifest as a hostile hand would: with the right digest."""
    body = json.loads((folder / NAME).read_bytes())["manifest"]
    change(body)
    text = json.dumps(body).encode() + b"}\n"
    (folder / NAME).write_bytes(b'{"digest":"' + digest(text).encode() + b'","manifest":' + text)


def without(name: str) -> Any:
    return lambda manifest: manifest.pop(name)


def having(name: str, value: Any) -> Any:
    return lambda manifest: manifest.update({name: value})


def in_tensors(value: Any) -> Any:
    return lambda manifest: manifest["tensors"].update({"weights/lm_head.weight": value})


def in_options(value: Any) -> Any:
    return lambda manifest: manifest["optimizer"]["groups"][0]["options"].update(value)


MANIFESTS: dict[str, tuple[Any, str]] = {
    **{
        f"without {name}": (without(name), f"lacks {name}")
        for name in Manifest.__dataclass_fields__
        if name not in FIELDS  # which older versions did not write
    },
    "an unknown field": (having("what", 1), "unknown fields: what"),
    "another format": (having("format", "meshwright-checkpoint-9"), "'format'"),
    "a text as step": (having("step", "1"), "'step'"),
    "a negative time": (having("written", -1), "'written'"),
    "no ranks": (having("ranks", 0), "'ranks'"),
    "too many ranks": (having("ranks", 10**9), "'ranks'"),
    "more ranks than files": (having("ranks", 4), "files"),
    "an axis without ranks": (having("mesh", {"dp": 0}), "'mesh'"),
    "a file outside": (lambda m: m["files"].update({"../a.json": m["files"].pop("part-00000.json")}), "files"),
    "an unknown dtype": (in_tensors(["F4", [97, 32]]), "'tensors'"),
    "a huge shape": (in_tensors(["F32", [10**30, 32]]), "'tensors'"),
    "a negative shape": (in_tensors(["F32", [-1, 32]]), "'tensors'"),
    "another shape": (in_tensors(["F32", [32, 97]]), "lm_head"),
    "a shape of texts": (in_tensors(["F32", ["97", 32]]), "'tensors'"),
    "a tie to nothing": (having("ties", {"weights/a": "weights/b"}), "weights/b"),
    "another optimizer": (lambda m: m["optimizer"].update(optimizer="SGD"), "SGD"),
    "no optimizer": (having("optimizer", None), "optimizer"),
    "an optimizer without groups": (lambda m: m["optimizer"].pop("groups"), "groups"),
    "options of an unknown form": (in_options({"betas": {"tuple": {"a": 1}}}), "groups"),
    "no lr": (lambda m: m["optimizer"]["groups"][0]["options"].pop("lr"), "lr"),
    "lr as a text": (in_options({"lr": "evil"}), "lr"),
    "lr that is not a number": (in_options({"lr": float("nan")}), "lr"),
    "state of an unknown form": (having("scheduler", {"what": {"a": 1}}), "scheduler"),
    "no scheduler": (having("scheduler", None), "scheduler"),
    "a list as loader": (having("loader", [1]), "'loader'"),
    "no fields": (lambda m: m.clear(), "'format'"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_foreign_manifest_is_an_error_by_name(name: str, whole: Path, tmp_path: Path) -> None:
    folder = copy_of(whole, tmp_path / "a")
    change, message = MANIFESTS[name]
    rewritten(folder, change)
    with pytest.raises(mw.CheckpointError, match=message):
        load(folder)


def special(folder: Path, make: Any) -> None:
    path = folder / "part-00000.json"
    path.unlink()
    make(path)


FILES: dict[str, Any] = {
    "a link to another file": lambda path: path.symlink_to("/etc/passwd"),
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
    "deep JSON": lambda path: path.write_text("[" * 100_000),
    "nothing": lambda path: path.write_text(""),
    "a long number": lambda path: path.write_text("9" * 10_000),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("with_digest", [False, True])
def test_a_hostile_file_is_an_error(name: str, with_digest: bool, whole: Path, tmp_path: Path) -> None:
    folder = copy_of(whole, tmp_path / "a")
    special(folder, FILES[name])
    path = folder / "part-00000.json"
    if with_digest and path.is_file() and not path.is_symlink():
        record = {"bytes": path.stat().st_size, "digest": digest(path.read_bytes())}
        rewritten(folder, lambda manifest: manifest["files"].update({path.name: record}))
    with pytest.raises(mw.CheckpointError, match="part-00000"):
        load(folder)


def test_a_run_with_damaged_checkpoints_only_does_not_start_anew(whole: Path, tmp_path: Path) -> None:
    model, optimizer, scheduler = objects({})
    assert mw.load_checkpoint(tmp_path, model, optimizer, scheduler=scheduler, missing_ok=True) is None
    copy_of(whole, tmp_path / "a")
    (tmp_path / "a" / NAME).unlink()
    for folder in (tmp_path, tmp_path / "a"):
        with pytest.raises(mw.CheckpointError, match=r"no checkpoint in .* is whole: a|cannot read .*checkpoint\.json"):
            mw.load_checkpoint(folder, model, optimizer, scheduler=scheduler, missing_ok=True)
