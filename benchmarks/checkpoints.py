"""``python -m benchmarks.checkpoints``: measure what digests cost, how long training waits, and other libraries."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated
from unittest import mock

import torch
import torch.distributed as dist
import typer

import meshwright as mw
from benchmarks.checkpoint_contenders import Accelerated, FullySharded, Ours, ReadyState, Saver
from benchmarks.environment import environment
from benchmarks.summary import Ratio
from benchmarks.workload import Workload
from harness.torchrun import torchrun
from meshwright.checkpoint.format import part_files
from meshwright.checkpoint.format.background import Background
from meshwright.faults.guard import active_guard
from meshwright.faults.interpose import observe

PROCESSES = 4
# 45 M parameters in float32 with two moments each: 0.54 GB, and no value is held twice.
WORKLOAD = Workload(sequence_length=32)


class Contest(StrEnum):
    """The contests to run."""

    digest = "digest"
    stall = "stall"
    dcp = "dcp"
    accelerate = "accelerate"


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One thing that is timed.

    Args:
        saver: the contender that saves or loads.
        act: the call that is timed.
        folder: the folder that it writes, which is removed after each turn; None if it only reads.
        after: function that is called after each turn, without being timed.
        clock: the clock of CPU time: of the process, or of its training thread only.
    """

    saver: Saver
    act: Callable[[], None]
    folder: Path | None = None
    after: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.process_time


@dataclass(frozen=True)
class Times:
    """The times of one turn: the seconds of the slowest rank, and the CPU seconds of all ranks."""

    wall: float
    cpu: float


def times_in_turn(turns: dict[str, Turn], rounds: int) -> dict[str, list[Times]]:
    """Return the times of each turn: name -> one per round. The order is new in each round."""
    order, draw = list(turns), random.Random(0)
    times: dict[str, list[Times]] = {name: [] for name in turns}
    for index in range(rounds + 1):
        draw.shuffle(order)
        for name in order:
            found = _times(turns[name])
            if index:  # the first round warms up
                times[name].append(found)
    return times


def _times(turn: Turn) -> Times:
    observe(active_guard() if turn.saver.watched else None)
    dist.barrier()
    start, start_cpu = time.perf_counter(), turn.clock()
    turn.act()
    wall = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    cpu = torch.tensor(turn.clock() - start_cpu, dtype=torch.float64)
    turn.after()
    observe(None)
    dist.all_reduce(wall, dist.ReduceOp.MAX)
    dist.all_reduce(cpu)
    if turn.folder is not None and dist.get_rank() == 0:
        shutil.rmtree(turn.folder)
    return Times(wall.item(), cpu.item())


def row(name: str, ours: list[Times], other: list[Times], goal: float) -> str:
    """Return a line: the median seconds, and the medians of ours / other within a round with their 95 % intervals."""
    seconds = [f"{statistics.median(times.wall for times in side):.3f}" for side in (ours, other)]
    of_wall = Ratio.paired([times.wall for times in ours], [times.wall for times in other])
    of_cpu = Ratio.paired([times.cpu for times in ours], [times.cpu for times in other])
    return f"| {' | '.join([name, *seconds, str(of_wall), str(of_cpu), f'<= {goal:.2f}'])} |"


@contextmanager
def without_digests() -> Iterator[None]:
    """Save and load tensors and indexes without computing digests. Only a benchmark may: damage goes unnoticed."""
    with mock.patch.object(part_files, "digest", lambda memory: ""):
        yield


def undigested(call: Callable[[Path], None], folder: Path) -> None:
    with without_digests():
        call(folder)


def forget(folder: Path) -> None:
    """Drop the files of a folder from the system's cache, so that they are then read from the disk."""
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
            found = times_in_turn(turns, self.rounds)
            yield row(f"{what}, digests on / off", found["on"], found["off"], 1.10)

    def stall(self) -> Iterator[str]:
        ours = self.checked(Ours(WORKLOAD, dp=4, zero_stage=3), "stall")

        def in_background(waits: bool) -> Turn:
            def save(folder: Path) -> None:
                ours.save_in_background(folder)
                if waits:
                    Background.of(ours.model).wait_for_copy()

            turn = self.saving(ours, save, lambda: mw.wait_for_checkpoints(ours.model))
            return replace(turn, clock=time.thread_time)

        turns = {
            "call": in_background(waits=False),
            "call and copy": in_background(waits=True),
            "save": replace(self.saving(ours, ours.save), clock=time.thread_time),
        }
        found = times_in_turn(turns, self.rounds)
        yield row("call that saves in the background / save", found["call"], found["save"], 0.10)
        yield row("the same, and a step at once / save", found["call and copy"], found["save"], 0.10)

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
        savers = {"ours": ours, "other": others["accelerate, not flushed"]}
        loads = {key: self.loading(saver, saver.load, saver.saved, is_new=True) for key, saver in savers.items()}
        found = times_in_turn(loads, self.rounds)
        yield row("load into a new optimizer, ours / accelerate", found["ours"], found["other"], 1.0)

    def against(self, ours: Saver, name: str, others: dict[str, Saver]) -> Iterator[str]:
        saves = {key: self.saving(saver, saver.save) for key, saver in {name: ours, **others}.items()}
        found = times_in_turn(saves, self.rounds)
        for key in others:
            yield row(f"save, ours / {key}", found[name], found[key], 1.0)
        loads = {key: self.loading(saver, saver.load, saver.saved) for key, saver in {name: ours, **others}.items()}
        found = times_in_turn(loads, self.rounds)
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

    def loading(self, saver: Saver, load: Callable[[Path], None], folder: Path, *, is_new: bool = False) -> Turn:
        def after() -> None:
            if self.is_cold:
                forget(folder)
            if is_new:
                saver.drop_state()  # so that the next load starts with a new optimizer; the first load is not counted

        return Turn(saver=saver, act=partial(load, folder), after=after)


def main(
    contest: Annotated[
        list[Contest] | None, typer.Option(help="Contest to run; may be given several times (default: all).")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each contender takes.")] = 15,
    folder: Annotated[Path | None, typer.Option(help="Folder on the disk to measure (default: /tmp).")] = None,
    cold: Annotated[bool, typer.Option("--cold", help="Drop files from the system's cache before each load.")] = False,
) -> None:
    """Print what digests cost, how long an asynchronous save stops training, and the times of other libraries.

    Four processes of one thread hold a Llama of 45 M parameters and its AdamW state, 0.54 GB in float32. The two sides
    of a ratio take turns in one run, in a new order each round, and the ratio is the median of the rounds with its 95 %
    interval (with fewer than six rounds, with the range of all rounds). The next column has the same ratio of the CPU
    time of all ranks, which other load and the disk affect less. Before anything is timed, each contender must load
    what it saved, to the bit.

    digest: a save and a load with digests, against the same without them, under ZeRO-3.

    stall: the time for which the call with asynchronous=True blocks, against a whole save, under ZeRO-3. The CPU time
    is that of the training thread. The second row is the longest stall: an optimizer that steps at once waits for the
    copy, which otherwise runs during the next forward and backward pass.

    dcp: save and load under ZeRO-3, against torch.distributed.checkpoint under FSDP2, both flushed to the disk. One row
    has the calls of torch's tutorial, the other only the writing and reading of DTensors that exist already.

    accelerate: save and load under data parallelism, against save_state and load_state, which do not flush. In one row
    the files are flushed afterwards, and the time includes this. In the last row the optimizers have no state before
    the load.

    Files are read from the system's cache unless --cold is given.

    Examples:

    $ python -m benchmarks.checkpoints

    $ python -m benchmarks.checkpoints --contest digest --contest stall --rounds 30

    $ python -m benchmarks.checkpoints --contest dcp --folder /dev/shm
    """
    if "RANK" in os.environ:
        assert folder is not None
        dist.init_process_group("gloo")
        logging.getLogger("meshwright").setLevel(logging.ERROR)  # it warns of optimizers that it did not make
        contests = Contests(folder, rounds, cold)
        for chosen in contest or Contest:
            for line in getattr(contests, chosen.value)():
                if dist.get_rank() == 0:
                    print(line, flush=True)
            dist.barrier()
        dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory(dir=folder) as own:
        arguments = [f"--rounds={rounds}", f"--folder={own}"]
        arguments += ["--cold"] * cold + [f"--contest={name}" for name in contest or ()]
        print(json.dumps(environment()))
        print(f"\n| {PROCESSES} ranks | ours, s | other, s | ours / other (95 % interval) | of CPU time | goal |")
        print("|---|---|---|---|---|---|", flush=True)
        if status := torchrun(PROCESSES, "benchmarks.checkpoints", *arguments):
            raise typer.Exit(status)


if __name__ == "__main__":
    application = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    application.command()(main)
    application()
