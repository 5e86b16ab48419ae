"""Files that somebody has edited who knows the format and makes every digest right: each field is checked.

The edits run in a process of their own, a few at a time in a forked child, so that a crash in C is seen.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_hostile import MEMORY, Small, forget_peak, peak, size_of
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader
from transformers import TrainerState

import meshwright as mw
from harness.programs import run_program
from meshwright.checkpoint.files.reading import Lineage
from meshwright.checkpoint.format.object_states import check_state_of
from meshwright.checkpoint.one_device.optimizer_manifest import decode, encode
from meshwright.checkpoint.one_device.safetensors_file import SafetensorsWriter
from meshwright.checkpoint.sealed import check_seal, sealed_folder
from meshwright.data.loader import DistributedLoader
from meshwright.data.peers import LoaderMesh
from meshwright.mesh.axes import Axis
from meshwright_hf.trainer.folders import check_trainer_state
from support import edits
from support.hostile import to_format_1
from support.optimizer_files import to_whole_tensors
from support.tiers import crossing

BATCH = 10  # edits in one child
FREE = {  # what a program may have written as it likes, and what decides nothing
    "checkpoint.json": {
        "extra",
        "plan",
        "versions",
        "written",
        "step",
        "scheduler",
        "number",
        "run",
        "model_config",
        "mesh",
    },
    "optimizer.json": set(),
    "meshwright_seal.json": {"number", "run", "written", "launches", "open"},
}


class Run:
    """All that a checkpoint holds, and the next step, which must go as it should after each load that succeeds."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Small(3, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5)
        self.scaler = torch.amp.GradScaler("cpu")
        generator = torch.Generator().manual_seed(3)
        loader: Any = DataLoader(list(range(40)), batch_size=4, shuffle=True, generator=generator)
        self.loader = DistributedLoader(loader, LoaderMesh(dp=Axis("dp")))
        self.step()

    def step(self) -> None:
        next(iter(self.loader))
        self.model.weight.grad = torch.ones(3, 2)
        self.optimizer.step()
        self.scheduler.step()
        draws = torch.rand(700).sum() + np.random.rand(700).sum() + sum(random.random() for _ in range(700))
        assert torch.isfinite(draws) and self.model.weight.isfinite().all()

    def others(self) -> dict[str, Any]:
        return {"loader": self.loader, "scheduler": self.scheduler, "scaler": self.scaler}

    def save_checkpoint(self, folder: Path) -> None:
        mw.save_checkpoint(folder, self.model, self.optimizer, step=3, extra={"a": [1]}, **self.others())

    def save_format_1(self, folder: Path) -> None:
        self.save_checkpoint(folder)
        to_format_1(folder)

    def load_format_1(self, folder: Path) -> None:
        self.load_checkpoint(folder)

    def load_checkpoint(self, folder: Path) -> None:
        mw.load_checkpoint(folder, self.model, self.optimizer, **self.others())

    def save_weights(self, folder: Path) -> None:
        folder.mkdir()
        with SafetensorsWriter(folder / "model.safetensors", {"weight": (torch.float32, (3, 2))}) as writer:
            writer.write(torch.ones(3, 2))

    def load_weights(self, folder: Path) -> None:
        mw.load_weights(self.model, folder)

    def save_optimizer(self, folder: Path) -> None:
        mw.save_optimizer(self.model, self.optimizer, folder)
        to_whole_tensors(folder)  # the other form has the manifest of a checkpoint

    def load_optimizer(self, folder: Path) -> None:
        mw.load_optimizer(self.model, self.optimizer, folder)

    def save_seal(self, folder: Path) -> None:
        with sealed_folder(folder, lineage=Lineage()) as hidden:
            (hidden / "inner").mkdir()
            (hidden / "a.json").write_text("{}")
            (hidden / "inner" / "b.json").write_text("{}")

    def load_seal(self, folder: Path) -> None:
        check_seal(folder)


Edit = Callable[[Path, random.Random], tuple[str, edits.Path_, str]]
# What is saved and loaded, and how it is edited.
KINDS: dict[str, tuple[str, Edit]] = {
    "manifest": ("checkpoint", edits.edit_manifest),
    "manifest of format 1": ("format_1", edits.edit_manifest),
    "index": ("checkpoint", edits.edit_index),
    "index of format 1": ("format_1", edits.edit_index),
    "part": ("checkpoint", edits.edit_part),
    "optimizer": ("optimizer", edits.edit_optimizer),
    "optimizer's tensors": ("optimizer", edits.edit_header("optimizer-*.safetensors")),
    "weights": ("weights", edits.edit_header("model.safetensors")),
    "seal": ("seal", edits.edit_seal),
}


def what_is_wrong(kind: str, seed: int, folder: Path) -> str | None:
    """Edit a folder and load it; return what should not have happened."""
    of, edit = KINDS[kind]
    draw = random.Random(f"{kind} {seed}")
    name, path, what = edit(folder, draw)
    run = Run()
    forget_peak()
    before, start = peak(), time.process_time()
    text = None
    try:
        getattr(run, f"load_{of}")(folder)
    except mw.CheckpointError as error:
        text = str(error)
        text.encode()
    except BaseException:
        return f"{name}, {path}, {what}: " + traceback.format_exc(limit=-3)
    seconds, grown, size = time.process_time() - start, peak() - before, size_of(folder)
    if seconds > 2 * max(1, size / 2**20) or grown > size + MEMORY:
        return f"{name}, {path}, {what}: {seconds:.1f} s of the CPU, {grown:,} bytes for files of {size:,}"
    if text is None:
        try:
            run.step()
        except BaseException:
            return f"{name}, {path}, {what} was accepted, and then: " + traceback.format_exc(limit=-3)
        if "odd" in what and path[0] not in FREE.get(name, ()):
            print("ACCEPTED " + json.dumps([name, str(path), what]), flush=True)
    elif not (name in text or str(folder) in text):
        return f"{name}, {path}, {what}: the file is not named: {text}"
    elif (  # the header of a part is only compared with its digest, and what is gone has no name
        name != edits.TENSORS
        and what.startswith(("odd", "near"))
        and not any(key in text for key in path if isinstance(key, str))
    ):
        return f"{name}, {path}, {what}: the field is not named: {text}"
    return None


def program(place: str, kinds: list[str], count: int) -> None:
    for number, kind in enumerate(kinds):
        edit_and_load(Path(place, str(number)), kind, count)


def edit_and_load(parent: Path, kind: str, count: int) -> None:
    parent.mkdir()
    whole = parent / "whole"
    getattr(Run(), f"save_{KINDS[kind][0]}")(whole)
    getattr(Run(), f"load_{KINDS[kind][0]}")(whole)
    for first in range(0, count, BATCH):
        child = os.fork()
        if child == 0:
            for seed in range(first, min(first + BATCH, count)):
                print(f"SEED {seed}", flush=True)
                folder = parent / "case"
                shutil.rmtree(folder, ignore_errors=True)
                shutil.copytree(whole, folder)
                if (wrong := what_is_wrong(kind, seed, folder)) is not None:
                    print("WRONG " + json.dumps(f"{kind} {seed}: {wrong}"), flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            print("WRONG " + json.dumps(f"{kind}: a child ended with {status}"), flush=True)


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is measured in /proc")
@pytest.mark.parametrize(
    ("kinds", "count"),
    [(list(KINDS), 22), *(crossing([kind], 100) for kind in KINDS)],
    ids=["some", *(f"many-{k}" for k in KINDS)],
)
def test_each_edit_is_named_or_harmless(kinds: list[str], count: int, tmp_path: Path) -> None:
    (outcome,) = run_program(program, 1, str(tmp_path), kinds, count, timeout=300)
    count *= len(kinds)
    wrong = [json.loads(line[6:]) for line in outcome.output.splitlines() if line.startswith("WRONG ")]
    assert not wrong, "\n".join(wrong[:20])
    assert outcome.output.count("SEED ") == count, outcome.output[-2000:]
    # An odd value can be a right one: None for what may be None, 0 for a count.
    accepted = outcome.output.count("ACCEPTED ")
    print(f"{accepted} of {count} accepted")
    assert accepted <= 0.15 * count, outcome.output[-3000:]


STATES: dict[str, tuple[Callable[[Any], Any], list[tuple[str, Any]]]] = {
    "StepLR": (
        lambda optimizer: lr_scheduler.StepLR(optimizer, 5),
        [("gamma", math.nan), ("gamma", math.inf), ("step_size", 0), ("step_size", -3), ("optimizer", 1), ("step", 1)],
    ),
    "CosineAnnealingLR": (
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 9),
        [("T_max", 0), ("eta_min", -1)],
    ),
    "OneCycleLR": (
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, 90),
        [("total_steps", 0), ("_schedule_phases", {"list": [{"dict": {"end_step": math.nan}}]})],
    ),
    "ReduceLROnPlateau": (
        lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer),
        [("best", math.nan), ("threshold", math.inf), ("patience", 0.5), ("min_lrs", {"list": [math.nan]})],
    ),
    "scaler": (lambda _: torch.amp.GradScaler("cpu"), [("scale", 0), ("growth_interval", 0), ("backoff_factor", 2)]),
}


@pytest.mark.parametrize("kind", STATES)
def test_states_that_would_spoil_the_next_steps_are_refused(kind: str, tmp_path: Path) -> None:
    make, wrong = STATES[kind]
    name = "scaler" if kind == "scaler" else "scheduler"
    # A rate may be a tensor.
    optimizer = torch.optim.SGD(Small(2).parameters(), lr=torch.tensor(0.1) if kind == "StepLR" else 0.1)
    own = make(optimizer)
    saved = encode(own.state_dict(), "the state")
    check_state_of(name, decode(saved), make(optimizer), "FILE")
    for key, value in wrong:
        with pytest.raises(mw.CheckpointError, match=f"FILE.*{key}"):
            check_state_of(name, decode({"dict": {**saved["dict"], key: value}}), make(optimizer), "FILE")


def test_the_states_in_a_state_are_checked() -> None:
    optimizer = torch.optim.SGD(Small(2).parameters(), lr=0.1)
    inner = [lr_scheduler.LinearLR(optimizer), lr_scheduler.StepLR(optimizer, 5)]
    sequence = lr_scheduler.SequentialLR(optimizer, inner, [2])
    check_state_of("scheduler", sequence.state_dict(), sequence, "FILE")
    state = sequence.state_dict()
    state["_schedulers"][1]["step_size"] = 0
    with pytest.raises(mw.CheckpointError, match=r"_schedulers'\[1\], 'step_size'"):
        check_state_of("scheduler", state, sequence, "FILE")


@pytest.mark.parametrize(
    ("field", "value"),
    [("global_step", "x"), ("global_step", -1), ("epoch", math.nan), ("max_steps", 1e300), ("__class__", 1), ("a", 1)],
)
def test_the_trainers_own_state_is_checked(field: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "trainer_state.json"
    TrainerState(log_history=[{"loss": 0.1}], best_metric=math.inf, num_train_epochs=sys.maxsize).save_to_json(path)
    check_trainer_state(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(mw.CheckpointError, match=f"trainer_state.json.*{field}"):
        check_trainer_state(path)


@pytest.mark.parametrize(
    ("key", "value", "is_right"),
    [("step", 3, True), ("step", True, False), ("step", {"tuple": []}, False), ("exp_avg", "x", False)],
)
def test_the_state_of_an_optimizer_has_its_kind(key: str, value: Any, is_right: bool, tmp_path: Path) -> None:
    run = Run()
    run.save_optimizer(tmp_path / "a")
    path = tmp_path / "a" / "optimizer.json"
    fields = json.loads(path.read_text())
    fields["values"]["weight"][key] = value
    path.write_text(json.dumps(fields))
    if is_right:  # as older versions of torch counted
        run.load_optimizer(tmp_path / "a")
        run.step()
        return
    with pytest.raises(mw.CheckpointError, match=f"values.*weight.*{key}"):
        run.load_optimizer(tmp_path / "a")
