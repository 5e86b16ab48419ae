"""``python -m benchmarks.checkpoints``: what digests cost, how long training waits, and DCP and accelerate."""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import comb
from pathlib import Path
from typing import Annotated
from unittest import mock

import torch
import torch.distributed as dist
import typer

import meshwright as mw
from benchmarks.__main__ import worker_environment
from benchmarks.checkpoint_contenders import Accelerated, FullySharded, Ours, ReadyState, Saver
from benchmarks.environment import environment
from benchmarks.workload import Workload
from meshwright.checkpoint import part_files
from meshwright.faults.guard import active_guard
from meshwright.faults.interpose import observe

PROCESSES = 4
# 45 M parameters in float32 with two moments each: 0.54 GB that are in one place only.
WORKLOAD = Workload(sequence_length=32)
CONTESTS = ("digest", "stall", "dcp", "accelerate")


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One thing that is timed.

    Args:
        saver: what saves or loads.
        act: the call that is timed.
        folder: the folder that it writes, which is removed after each turn; None if it only reads.
        after: function that is called after each turn, without being timed.
    """

    saver: Saver
    act: Callable[[], None]
    folder: Path | None = None
    after: Callable[[], None] = lambda: None


def seconds_in_turn(turns: dict[str, Turn], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of the slowest rank: name -> one per round. The order is new in each round."""
    order, draw = list(turns), random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for index in range(rounds + 1):
        draw.shuffle(order)
        for name in order:
            found = _seconds(turns[name])
            if index:  # the first round warms up
                seconds[name].append(found)
    return seconds


def _seconds(turn: Turn) -> float:
    observe(active_guard() if turn.saver.watched else None)
    dist.barrier()
    start = time.perf_counter()
    turn.act()
    spent = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    turn.after()
    observe(None)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    if turn.folder is not None and dist.get_rank() == 0:
        shutil.rmtree(turn.folder)
    return spent.item()


def row(name: str, ours: list[float], other: list[float], goal: float) -> str:
    """Return a line: the medians, and the median of ours / other within a round with its 95 % interval."""
    ratios = sorted(a / b for a, b in zip(ours, other, strict=True))
    low, high = interval(ratios)
    ratio = f"{statistics.median(ratios):.3f} ({low:.3f}-{high:.3f})"
    return f"| {name} | {statistics.median(ours):.3f} | {statistics.median(other):.3f} | {ratio} | <= {goal:.2f} |"


def interval(ordered: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median of ordered values: all of them if there are fewer than six."""
    count, below, skipped = len(ordered), 0.0, 0
    while (below := below + comb(count, skipped) / 2**count) <= 0.025:
        skipped += 1
    return ordered[max(skipped - 1, 0)], ordered[count - max(skipped, 1)]


@contextmanager
def without_digests() -> Iterator[None]:
    """Save and load tensors and indexes without computing digests. Only a benchmark may: damage goes unnoticed."""
    with mock.patch.object(part_files, "digest", lambda memory: ""):
        yield


def undigested(call: Callable[[Path], None], folder: Path) -> None:
    with without_digests():
        call(folder)


def forget(folder: Path) -> None:
    """Drop the files of a folder from the cache of the system, which can then only read them from the disk."""
    if dist.get_rank() == 0:
        for path in folder.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dist.barrier()


class Contests:
    """The contests, whose ranks share a folder.

    Args:
        folder: the folder of all files.
        rounds: the number of turns of each contender.
        is_cold: whether files are dropped from the system's cache before each load.
    """

    def __init__(self, folder: Path, rounds: int, is_cold: bool):
        self.folder, self.rounds, self.is_cold = folder, rounds, is_cold

    def digest(self) -> Iterator[str]:
        ours = self.checked(Ours(WORKLOAD, dp=4, zero_stage=3), "digested")
        off = self.folder / "undigested"
        undigested(ours.save, off)
        saves = {
            "on": self.saving(ours, ours.save),
            "off": self.saving(ours, partial(undigested, ours.save)),
        }
        loads = {
            "on": self.loading(ours, ours.load, self.folder / "digested"),
            "off": self.loading(ours, partial(undigested, ours.load), off),
        }
        for what, turns in (("save", saves), ("load", loads)):
            found = seconds_in_turn(turns, self.rounds)
            yield row(f"{what}, digests on / off", found["on"], found["off"], 1.10)

    def stall(self) -> Iterator[str]:
        ours = self.checked(Ours(WORKLOAD, dp=4, zero_stage=3), "stall")
        turns = {
            "in background": self.saving(ours, ours.save_in_background, lambda: mw.wait_for_checkpoints(ours.model)),
            "save": self.saving(ours, ours.save),
        }
        found = seconds_in_turn(turns, self.rounds)
        yield row("call that saves in the background / save", found["in background"], found["save"], 0.10)

    def dcp(self) -> Iterator[str]:
        ours = self.checked(Ours(WORKLOAD, dp=4, zero_stage=3), "ours")
        others = {
            "DCP": self.checked(FullySharded(WORKLOAD), "dcp"),
            "DCP of ready DTensors": self.checked(ReadyState(WORKLOAD), "ready"),
        }
        yield from self.against(ours, "ours", others)

    def accelerate(self) -> Iterator[str]:
        ours = self.checked(Ours(WORKLOAD, dp=4), "ours_ddp")
        others = {
            "accelerate, then flushed": self.checked(Accelerated(WORKLOAD, sync_files=True), "flushed"),
            "accelerate, not flushed": self.checked(Accelerated(WORKLOAD, sync_files=False), "unflushed"),
        }
        yield from self.against(ours, "ours_ddp", others)

    def against(self, ours: Saver, name: str, others: dict[str, Saver]) -> Iterator[str]:
        saves = {key: self.saving(saver, saver.save) for key, saver in {name: ours, **others}.items()}
        found = seconds_in_turn(saves, self.rounds)
        for key in others:
            yield row(f"save, ours / {key}", found[name], found[key], 1.0)
        loads = {key: self.loading(saver, saver.load, saver.saved) for key, saver in {name: ours, **others}.items()}
        found = seconds_in_turn(loads, self.rounds)
        for key in others:
            yield row(f"load, ours / {key}", found[name], found[key], 1.0)

    def checked(self, saver: Saver, name: str) -> Saver:
        """Train a step, and check that what is saved is loaded."""
        observe(active_guard() if saver.watched else None)
        saver.step()
        saver.saved = self.folder / name
        saver.check(saver.saved)
        observe(None)
        return saver

    def saving(self, saver: Saver, save: Callable[[Path], None], after: Callable[[], None] = lambda: None) -> Turn:
        target = self.folder / "timed"
        return Turn(saver=saver, act=partial(save, target), folder=target, after=after)

    def loading(self, saver: Saver, load: Callable[[Path], None], folder: Path) -> Turn:
        after = partial(forget, folder) if self.is_cold else lambda: None
        return Turn(saver=saver, act=partial(load, folder), after=after)


def main(
    contest: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(CONTESTS)} (default: all).")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each contender takes.")] = 15,
    folder: Annotated[Path | None, typer.Option(help="Folder on the disk to measure (default: /tmp).")] = None,
    cold: Annotated[bool, typer.Option("--cold", help="Drop files from the system's cache before each load.")] = False,
) -> None:
    """Print what the digests of checkpoints cost, how long an asynchronous save stops training, and times of others."""
    if "RANK" in os.environ:
        assert folder is not None
        dist.init_process_group("gloo")
        contests = Contests(folder, rounds, cold)
        for name in contest or CONTESTS:
            for line in getattr(contests, name)():
                if dist.get_rank() == 0:
                    print(line, flush=True)
            dist.barrier()
        dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory(dir=folder) as own:
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={PROCESSES}", "--standalone"]
        command += ["-m", "benchmarks.checkpoints", f"--rounds={rounds}", f"--folder={own}"]
        command += ["--cold"] * cold + [f"--contest={name}" for name in contest or ()]
        print(json.dumps(environment()))
        print(
            f"\n| {PROCESSES} ranks | ours, s | other, s | ours / other (95 % interval) | goal |\n|---|---|---|---|---|"
        )
        sys.stdout.flush()
        subprocess.run(command, env=worker_environment(), check=True)


if __name__ == "__main__":
    typer.run(main)
