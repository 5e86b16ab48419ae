"""Ranks that are killed by SIGKILL at a step of a save, and what a load finds afterwards."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
from pathlib import Path

import torch
import torch.distributed as dist

import meshwright as mw
from harness.programs import run_program
from meshwright.checkpoint.format.checkpoint_folders import find_checkpoint
from support.faulty_disk import FaultyDisk
from support.models import build


class KillingDisk(FaultyDisk):
    """Kills its process at a step, in the middle of a write; what was written before stays, as the kernel keeps it."""

    def __init__(self, step: int | None):
        super().__init__(step, kind="SIGKILL")

    def _fail(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def save(folder: str, number: int, victim: int = -1, step: int = -1) -> None:
    """On each rank: save a run whose every element depends on ``number``; rank ``victim`` is killed at a step."""
    model = build("llama", num_hidden_layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(dp=dist_size(), zero_stage=1), timeout_s=20)
    model, optimizer, _ = mw.to_distributed(model, optimizer, config=config)
    mw.load_checkpoint(folder, model, optimizer, missing_ok=True)  # goes on with the run, whose checkpoints it removes
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(number))
    optimizer.step()
    disk = KillingDisk(step if dist.get_rank() == victim else None)
    with disk.active():
        mw.save_checkpoint(Path(folder) / f"step-{number}", model, optimizer, step=number, keep=1)
    print("steps", json.dumps(disk.steps), flush=True)


def dist_size() -> int:
    return int(os.environ["WORLD_SIZE"])


class Saves:
    """A save of number 2 beside that of number 1, which it removes, by some ranks.

    Args:
        folder: an empty folder.
        ranks: the number of ranks.
    """

    def __init__(self, folder: Path, ranks: int):
        self.folder, self.ranks = folder, ranks
        self.before, self.work = folder / "before", folder / "work"
        self.before.mkdir(parents=True)
        self._run(self.before, 1)
        self.old = _digests(self.before)
        shutil.copytree(self.before, self.work)
        # Steps of each rank's disk in a save that is not disturbed.
        self.steps = [int(output.rpartition("steps ")[2]) for output in self._run(self.work, 2)]
        self.new = _digests(self.work)

    def problem(self, victim: int, step: int, *, saves_again: bool) -> str | None:
        """Kill a rank at a step of the save; return what is wrong with the checkpoint that a load finds.

        Args:
            victim: the rank.
            step: the step, from 0.
            saves_again: whether to look also at what the next save leaves in the folder.
        """
        shutil.rmtree(self.work)
        shutil.copytree(self.before, self.work)
        outcomes = run_program(save, self.ranks, str(self.work), 2, victim, step, timeout=60)
        if outcomes[victim].code != -signal.SIGKILL:
            return f"was not killed: {outcomes[victim]}"
        if any(outcome.code is None for outcome in outcomes):
            return f"not all ranks have ended: {[outcome.code for outcome in outcomes]}"
        if _digests(self.work) not in (self.old, self.new):
            return "what is found is neither the old nor the new one"
        if not saves_again:
            return None
        self._run(self.work, 3)
        left = sorted(path.name for path in self.work.iterdir())
        return None if left == ["step-3"] else f"the next save leaves {left}"

    def _run(self, folder: Path, number: int) -> list[str]:
        outcomes = run_program(save, self.ranks, str(folder), number, timeout=90)
        assert all(outcome.code == 0 for outcome in outcomes), outcomes
        return [outcome.output for outcome in outcomes]


def _digests(folder: Path) -> tuple[int | None, dict[str, str]]:
    """The step of the newest whole checkpoint, and the digests of its tensor files."""
    found, manifest = find_checkpoint(folder)
    files = sorted(found.glob("*.safetensors"))
    return manifest.step, {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
