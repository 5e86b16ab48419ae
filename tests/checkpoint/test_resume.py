"""A run that stops after any step and is loaded goes on to the bit; under another plan with the same samples."""

from __future__ import annotations

import os
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import meshwright as mw
from support.models import build, labels_for, tokens
from support.tiers import crossings

# `make resumes` trains more steps, under more plans.
STEPS = int(os.environ.get("MESHWRIGHT_RESUME_STEPS", "6"))
PLANS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2},
    "tp2+sp": {"tp": 2, "sequence_parallel": True},
    "dp2+zero2, accumulation": {"dp": 2, "zero_stage": 2},
    "dp2xtp2+zero1": {"dp": 2, "tp": 2, "zero_stage": 1},
    "dp2xtp2+sp+zero3, bf16": {"dp": 2, "tp": 2, "sequence_parallel": True, "zero_stage": 3},
    "dp2+zero3, recompute, workers": {"dp": 2, "zero_stage": 3, "recompute": "full"},
}
if STEPS > 6:
    PLANS |= {
        "dp4": {"dp": 4},
        "tp2": {"tp": 2},
        "dp2+zero1, bf16": {"dp": 2, "zero_stage": 1},
        "dp2xtp2+sp+zero2, accumulation": {"dp": 2, "tp": 2, "sequence_parallel": True, "zero_stage": 2},
    }


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows whose tokens the workers draw: whoever forgets a random state gets others."""

    ids = tokens(20, 10)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": labels_for(self.ids[index : index + 1])[0]}


class Program:
    """A stock program with dropout, shuffling, workers and a scheduler, and draws of its own."""

    def __init__(self, name: str, plan: dict[str, Any], seed: int = 0):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        dtype = torch.bfloat16 if "bf16" in name else torch.float32
        self.model: Any = build("llama", attention_dropout=0.2).to(dtype)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 40)
        self.accumulation = 2 if "accumulation" in name else 1
        self.loader: Any = DataLoader(Rows(), batch_size=4, shuffle=True, num_workers=int("workers" in name))
        config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan))
        self.model, self.optimizer, self.loader = mw.to_distributed(
            self.model, self.optimizer, self.loader, config=config
        )
        self.done = 0

    def train(self, stop: int, folder: Path | None = None) -> list[float]:
        """Train to a number of batches, with a checkpoint after each, also inside an accumulation window's steps."""
        losses = []
        while self.done < stop:
            for batch in self.loader:
                loss = self.model(**batch).loss * (1 + 0.1 * random.random() + 0.1 * np.random.rand())
                loss.backward()
                self.done += 1
                if self.done % self.accumulation == 0:
                    mw.clip_grad_norm_(self.model, 1.0)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                    if folder is not None:
                        self.save(folder / str(self.done))
                losses.append(loss.item())
                if self.done == stop:
                    break
        return losses

    def save(self, folder: Path, **options: Any) -> None:
        mw.save_checkpoint(
            folder, self.model, self.optimizer, loader=self.loader, scheduler=self.scheduler, step=self.done, **options
        )

    def load(self, folder: Path, **options: Any) -> None:
        loaded = mw.load_checkpoint(
            folder, self.model, self.optimizer, loader=self.loader, scheduler=self.scheduler, **options
        )
        assert loaded is not None and loaded.step is not None
        self.done = loaded.step


def resumed_at_each_step(name: str, folder: Path) -> list[int]:
    """The steps after which a resumed run had other losses or weights than one that never stopped."""
    whole = Program(name, PLANS[name])
    losses = whole.train(STEPS, folder)
    weights = mw.full_state_dict(whole.model)
    wrong = []
    # Workers take seconds to start and to end, so that a few steps stand for all.
    steps = range(3, STEPS, 6) if "workers" in name else range(whole.accumulation, STEPS, whole.accumulation)
    for step in steps:
        again = Program(name, PLANS[name], seed=step)
        again.load(folder / str(step))
        is_same = again.train(STEPS) == losses[step:]
        found = mw.full_state_dict(again.model)
        if not is_same or any(not torch.equal(found[key], value) for key, value in weights.items()):
            wrong.append(step)
    return wrong


def size(plan: dict[str, Any]) -> int:
    return plan.get("dp", 1) * plan.get("tp", 1)


@pytest.fixture(scope="module")
def pools(pool2: Any, pool4: Any) -> dict[int, Any]:
    return {2: pool2, 4: pool4}


@pytest.mark.timeout(300 if STEPS == 6 else 1200)
@pytest.mark.parametrize(
    "name",
    crossings(PLANS, only=["tp2+sp", "dp2xtp2+zero1", "dp2+zero3, recompute, workers"], quick=["dp2"]),
)
def test_a_resumed_run_is_equal_to_the_bit(name: str, pools: dict[int, Any], tmp_path: Path) -> None:
    pool = pools[size(PLANS[name])]
    wrong = pool.run(resumed_at_each_step, name, tmp_path, timeout=200 if STEPS == 6 else 900)
    assert wrong == [[]] * size(PLANS[name])


def without(component: str, folder: Path) -> list[bool]:
    """Whether a run that leaves a component out still has the losses of one that never stopped."""
    losses = Program("dp2", PLANS["dp2"]).train(STEPS, folder)[3:]
    found = []
    for ignore in ([], [component]):
        again = Program("dp2", PLANS["dp2"], seed=1)
        again.load(folder / "3", ignore=ignore)
        found.append(again.train(STEPS) == losses)
    return found


@pytest.mark.quick
@pytest.mark.parametrize("component", ["optimizer", "loader", "scheduler", "random"])
def test_each_component_matters(component: str, pool2: Any, tmp_path: Path) -> None:
    assert pool2.run(without, component, tmp_path)[0] == [True, False]


def mistakes(folder: Path) -> list[str]:
    run = Program("dp2", PLANS["dp2"])
    run.train(1)
    run.save(folder / "a")
    mw.save_checkpoint(folder / "bare", run.model, None)
    model, optimizer, loader, scheduler = run.model, run.optimizer, run.loader, run.scheduler
    model.save_pretrained(folder / "weights")
    (folder / "trainers").mkdir(exist_ok=True)
    (folder / "trainers/trainer_state.json").touch()
    calls: list[Any] = [
        lambda: mw.load_checkpoint(folder / "a", model, optimizer, loader=loader),
        lambda: mw.load_checkpoint(folder / "a", model, None, loader=loader, scheduler=scheduler),
        lambda: mw.load_checkpoint(folder / "bare", model, optimizer),
        lambda: mw.load_checkpoint(folder / "nothing", model, optimizer),
        lambda: mw.load_checkpoint(folder / "weights", model, optimizer),
        lambda: mw.load_checkpoint(folder / "trainers", model, optimizer),
        lambda: mw.load_checkpoint(folder / "a", model, optimizer, ignore="loader"),
        lambda: mw.load_checkpoint(folder / "a", model, optimizer, ignore=["weights"]),
        lambda: mw.save_checkpoint(folder / "b", model, optimizer, step="3"),
        lambda: mw.save_checkpoint(folder / "b", model, optimizer, keep=0),
        lambda: mw.save_checkpoint(folder / "b", model, optimizer, extra={1: 2}),
        lambda: mw.save_checkpoint(folder / "b", model, optimizer, extra=object()),
        lambda: mw.save_checkpoint(folder / "b", model, optimizer, loader=[1]),
        lambda: mw.save_checkpoint(folder, model, optimizer),
        lambda: mw.save_checkpoint(model, folder, optimizer),  # type: ignore[arg-type]
        lambda: mw.load_checkpoint(None, model, optimizer),  # type: ignore[arg-type]
        lambda: mw.load_checkpoint(folder / "a", optimizer, model),  # type: ignore[arg-type]
    ]
    found = []
    for call in calls:
        try:
            call()
            found.append("no error")
        except mw.CheckpointError as error:
            found.append(str(error))
    assert mw.load_checkpoint(folder / "nothing", model, optimizer, missing_ok=True) is None
    assert not (folder / "b").exists()
    return found


def warned_of_scheduler(folder: Path) -> list[str]:
    run = Program("dp2", PLANS["dp2"])
    found = []
    for name, scheduler in (("a", None), ("b", run.scheduler)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            mw.save_checkpoint(folder / name, run.model, run.optimizer, scheduler=scheduler)
        found.append(" ".join(str(warning.message) for warning in caught))
    return found


def test_a_scheduler_that_is_not_saved_is_named(pool2: Any, tmp_path: Path) -> None:
    forgotten, saved = pool2.run(warned_of_scheduler, tmp_path)[0]
    assert "pass scheduler=... to save_checkpoint and load_checkpoint" in forgotten
    assert "scheduler" not in saved


def test_mistakes_are_errors_that_say_what_to_write(pool2: Any, tmp_path: Path) -> None:
    wanted = [
        "ignore=['scheduler']",
        "ignore=['optimizer']",
        "was saved without the state of optimizer",
        "there is no checkpoint in",
        "it has weights alone, without an optimizer; load them into the model before to_distributed: from_pretrained(",
        "it is a Trainer's: write trainer.train(resume_from_checkpoint=...)",
        "must be a list of",
        "must be a list of",
        "step='3' must be a whole number",
        "keep=0",
        "extra would be read back differently",
        "extra is not JSON",
        "pass the loader that to_distributed returned",
        "holds something else than a checkpoint",
        "folder is of type LlamaForCausalLM, not a path; write mw.save_checkpoint(folder, model, optimizer, ...)",
        "folder is None, not a path",
        "not a module; write mw.load_checkpoint(folder, model, optimizer, ...)",
    ]
    for messages in pool2.run(mistakes, tmp_path):
        for message, part in zip(messages, wanted, strict=True):
            assert part in message, message


def saved_in_the_background(folder: Path) -> tuple[bool, list[str], str]:
    """Save and train on at once: the checkpoint is that of the moment of the call."""
    run = Program("dp2", PLANS["dp2"])
    run.train(2)
    run.save(folder / "now")
    run.save(folder / "later", asynchronous=True)
    run.train(4)
    run.save(folder / "last", asynchronous=True)  # waits for the one before
    mw.wait_for_checkpoints(run.model)
    losses = []
    for name in ("now", "later"):
        again = Program("dp2", PLANS["dp2"], seed=1)
        again.load(folder / name)
        losses.append(again.train(5))
    is_same = losses[0] == losses[1]
    (folder / "file").mkdir(exist_ok=True)
    run.save(folder / "file" / "a" / "b", asynchronous=True)
    mw.wait_for_checkpoints(run.model)
    (folder / "file" / "x").write_text("a file where a folder should be")
    run.save(folder / "file" / "x" / "c", asynchronous=True)
    try:
        run.save(folder / "next")
        failure = "no error"
    except OSError as error:
        failure = str(error)
    return is_same, sorted(path.name for path in folder.iterdir()), failure


def test_a_save_in_the_background(pool2: Any, tmp_path: Path) -> None:
    for is_same, names, failure in pool2.run(saved_in_the_background, tmp_path):
        assert is_same
        assert [name for name in names if name != "next"] == ["file", "last", "later", "now"]
        assert "File exists" in failure or "Not a directory" in failure
