"""A program that trains, in which one rank hangs at a place of choice; run it as a script, or call ``hangs``."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import meshwright as mw
from harness.programs import FAULT, mark_fault
from meshwright.checkpoint.format.part_files import RankPart
from meshwright.distribute import to_distributed
from meshwright_hf.launch.job import free_port
from support.ending import TIMEOUT
from support.models import build, tokens

HANGS_FOR = 1000.0


def hang_here() -> None:
    mark_fault()
    time.sleep(HANGS_FOR)


def hold_the_gil() -> None:
    mark_fault()
    re.match("(a+)+$", 60 * "a" + "b")  # in C code, for years


def stop_here() -> None:
    mark_fault()
    os.kill(os.getpid(), signal.SIGSTOP)


def wait_for_a_dead_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    mark_fault()
    lock.acquire()


# How a rank hangs in the loop's own code.
KINDS: dict[str, Callable[[], None]] = {
    "loop": hang_here,
    "lock": wait_for_a_dead_lock,
    "gil": hold_the_gil,
    "stop": stop_here,
}
PLACES = (
    "before the call", "set-up", "loop", "dataset", "worker", "forward hook", "backward hook", "optimizer hook", "save",
    "evaluation", "end", "lock", "gil", "stop",
)  # fmt: skip


class Rows(Dataset[Any]):
    """Rows of tokens; one of them hangs on the victim."""

    def __init__(self, hangs: bool) -> None:
        self.hangs = hangs

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.hangs and index >= 12:
            hang_here()
        ids = tokens(1, 12)[0]
        return {"input_ids": ids, "labels": ids.clone()}


def hangs(place: str, victim: int) -> None:
    """Train under dp2; rank ``victim`` hangs at ``place``, and nothing else is wrong."""
    is_victim = int(os.environ["RANK"]) == victim

    def here(name: str) -> bool:
        return is_victim and name == place

    if here("before the call"):
        time.sleep(HANGS_FOR)
    model = build("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(Rows(here("dataset") or here("worker")), batch_size=4, num_workers=int(place == "worker"))
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(dp=2), timeout_s=TIMEOUT)
    if here("set-up"):
        to_distributed.distribute = lambda *_, **__: hang_here()  # type: ignore[assignment]
    if place == "before the call":
        mark_fault()  # the others wait from here on
    model, optimizer, loader = mw.to_distributed(model, optimizer, loader, config=config)
    step = 0

    def hook(*_: Any) -> None:
        if step == 2:
            hang_here()

    if here("forward hook"):
        model.model.layers[1].register_forward_hook(hook)
    if here("backward hook"):
        model.model.layers[1].mlp.register_full_backward_hook(hook)
    if here("optimizer hook"):
        optimizer.register_step_pre_hook(hook)
    for step, batch in enumerate(loader, start=1):
        model(**batch).loss.backward()
        if step == 2 and is_victim and place in KINDS:
            KINDS[place]()
        optimizer.step()
        optimizer.zero_grad()
    if place == "save":
        if is_victim:
            RankPart.write = lambda *_, **__: hang_here()  # type: ignore[method-assign, assignment]
        mw.save_checkpoint(os.path.join(tempfile.gettempdir(), f"hang-{os.environ['MASTER_PORT']}"), model, optimizer)
    if place == "evaluation":
        model.eval()
        for number, batch in enumerate(loader):
            if number == 1 and is_victim:
                hang_here()
            with torch.no_grad():
                dist.all_reduce(model(**batch).loss)
    if here("end"):
        hang_here()
    dist.barrier()
    print("went on in silence", flush=True)


@dataclass(frozen=True)
class Ended:
    """How a started program ended.

    Args:
        codes: the exit codes of what was started: the launcher, or each rank.
        output: what all processes printed.
        after: seconds from the fault until these had ended.
    """

    codes: list[int]
    output: str
    after: float


STARTS = ("torchrun", "launch", "plain")


def run_script(start: str, place: str, victim: int, launcher: str, python: str, patience: float) -> Ended:
    """Start this file on two ranks, by torchrun, by ``meshwright launch`` or as plain processes, until all have ended.

    Args:
        start: one of ``STARTS``.
        place: where the rank hangs.
        victim: the rank that hangs.
        launcher: the command that runs Python for the launcher.
        python: the command that runs Python for the ranks.
        patience: seconds, after which what has not ended is killed.
    """
    script = [os.path.abspath(__file__), place, str(victim)]
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHON_EXEC": python, "OMP_NUM_THREADS": "1"}
    # The end of the pipe says that all processes that have inherited it have ended.
    reads, writes = os.pipe()

    def begin(*command: str, **more: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env={**os.environ, **path, **more}, stdout=writes, stderr=writes)

    if start == "torchrun":
        started = [begin(launcher, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *script)]
    elif start == "launch":
        started = [begin(launcher, "-m", "meshwright_tools.cli", "launch", "--cpu", "--dp", "2", *script)]
    else:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
        started = [begin(python, *script, RANK=str(rank), LOCAL_RANK=str(rank), **address) for rank in range(2)]
    os.close(writes)
    output, begun, ended = b"", time.monotonic(), 0.0
    with open(reads, "rb", buffering=0) as pipe:
        while time.monotonic() < begun + patience:
            if not ended and all(one.poll() is not None for one in started):
                ended = time.monotonic()
            if select.select([pipe], [], [], 0.1)[0]:
                if not (read := pipe.read(2**16)):
                    break
                output += read
    all_ended = time.monotonic()
    for one in started:
        if all_ended >= begun + patience:
            one.kill()
    text = output.decode(errors="replace")
    faults = [float(mark) for mark in re.findall(rf"{FAULT}([\d.]+)", text)]
    fault = min(faults, default=begun)
    codes = [one.wait() for one in started]
    return Ended(codes, text, (ended or all_ended) - fault)


if __name__ == "__main__":
    hangs(sys.argv[1], int(sys.argv[2]))
