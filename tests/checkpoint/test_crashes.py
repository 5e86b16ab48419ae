"""A save that is killed at any step, or finds the disk full: what can be loaded is the old or the new, whole."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshwright as mw
from meshwright.errors import CheckpointError
from support.exact import Float64
from support.faulty_disk import FaultyDisk, Killed
from support.kills import STRIDE
from support.models import build
from support.tiers import nightly


class Run:
    """A model and an optimizer whose every element is one number, which a whole checkpoint has everywhere."""

    def __init__(self) -> None:
        config = mw.ToDistributedConfig(
            plan=mw.ParallelPlan(dp=2, zero_stage=1) if dist.get_world_size() == 2 else None
        )
        model = build("llama", num_hidden_layers=1).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.model, self.optimizer, _ = mw.to_distributed(model, optimizer, config=config)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def fill(self, number: float) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(number)
            for state in dict.values(self.optimizer.state):
                for value in state.values():
                    value.fill_(number)

    def numbers(self) -> set[float]:
        weights = [p.detach() for p in self.model.parameters()]
        states = [value for state in dict.values(self.optimizer.state) for value in state.values()]
        return {float(number) for value in (*weights, *states) for number in value.unique()}


def killed_saves(root: Path, kind: str, victim: int, every: int) -> tuple[int, list[str]]:
    """Kill the save of number 2 over that of number 1 at steps; return the number of steps and what went wrong."""
    with Float64():
        logging.disable(logging.WARNING)
        run, wrong = Run(), []
        rank = dist.get_rank()
        disk = FaultyDisk()
        run.fill(0)
        mw.save_checkpoint(root / "counted" / "a", run.model, run.optimizer)
        with disk.active():
            mw.save_checkpoint(root / "counted" / "a", run.model, run.optimizer, keep=1)
        total = [None] * 2
        dist.all_gather_object(total, disk.steps)
        for step in range(victim % every, total[victim], every):
            parent = root / f"{victim}-{step}"
            # One checkpoint is replaced, and an older one is removed by the rotation.
            run.fill(0)
            mw.save_checkpoint(parent / "older", run.model, run.optimizer)
            run.fill(1)
            mw.save_checkpoint(parent / "a", run.model, run.optimizer, step=1)
            run.fill(2)
            faulty = FaultyDisk(step if rank == victim else None, kind)
            try:
                with faulty.active():
                    mw.save_checkpoint(parent / "a", run.model, run.optimizer, step=2, keep=1)
                has_failed = False
            except (Killed, OSError, RuntimeError, CheckpointError):
                has_failed = True
            gc.collect()
            wrong += [f"{step}: no failure"] * (not has_failed and kind == "kill" and rank == victim)
            for folder in (parent / "a", parent):
                run.fill(7)
                loaded = mw.load_checkpoint(folder, run.model, run.optimizer)
                if run.numbers() not in ({1.0}, {2.0}) or {float(loaded.step)} != run.numbers():
                    wrong.append(f"{step} {faulty.log[-1:]}: {folder.name} has {run.numbers()}, step {loaded.step}")
            run.fill(3)
            mw.save_checkpoint(parent / "b", run.model, run.optimizer, step=3, keep=2)
            left = sorted(path.name for path in parent.iterdir())
            if left != ["a", "b"]:
                wrong.append(f"{step} {faulty.log[-1:]}: {left} are left")
        return total[victim], wrong


def in_the_pool(victim: int, kind: str, root: Path, every: int) -> Any:
    # A simulated kill on one rank is an error of the collectives on the other, as the death of a process is.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwright.faults.together.attempt", attempt)
        return killed_saves(root, kind, victim, every)


def attempt(step: Any) -> Any:
    try:
        return step(), None
    except Killed:
        return None, OSError("killed")
    except Exception as error:
        return None, error


@pytest.mark.parametrize("kind", ["kill", "full"])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("every", [nightly(STRIDE), 15], ids=["many steps", "some steps"])
def test_a_save_that_ends_at_any_step(victim: int, kind: str, every: int, pool2: Any, tmp_path: Path) -> None:
    total, wrong = pool2.run(in_the_pool, victim, kind, tmp_path, every, timeout=200)[0]
    assert not wrong, "\n".join(wrong)
    assert total > 12
    print(f"{total} steps on rank {victim}")
