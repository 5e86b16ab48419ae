"""Whole programs, one process a rank, that may fail, be killed or be stopped; they end as a script does.

A pool would not do: what is under test is how processes end. They are forked from a server that has the
imports done, so that a run takes a second.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from harness.server import become_program, fork_context

FAULT = "fault at "


@dataclass(frozen=True)
class Outcome:
    """How one rank ended.

    Args:
        code: the exit code, negative for a signal; None for a process that was still there.
        output: its stdout and stderr.
        after: seconds from the fault (see ``mark_fault``), or from the start, to its end.
    """

    code: int | None
    output: str
    after: float


def mark_fault() -> None:
    """Called by a program right before it does what is under test."""
    print(f"{FAULT}{time.monotonic()}", flush=True)


def run_program(
    program: Callable[..., None],
    world_size: int,
    *args: Any,
    timeout: float = 30.0,
    may_remain: tuple[int, ...] = (),
    is_child: bool = False,
) -> list[Outcome]:
    """Run ``program(*args)`` on every rank, as torchrun would start it, until all ranks have ended.

    Args:
        program: a module-level function of an importable module.
        timeout: seconds; what has not ended by then is killed and has no exit code.
        may_remain: ranks that are not waited for (they stop themselves).
        is_child: whether the ranks end as multiprocessing ends its processes, not as a script does.
    """
    context = fork_context()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="programs-") as folder:
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(world_size)]
        workers = [
            context.Process(target=_main, args=(rank, world_size, store.port, str(logs[rank]), program, args, is_child))
            for rank in range(world_size)
        ]
        start = time.monotonic()
        for worker in workers:
            worker.start()
        ends = _wait(workers, start + timeout, may_remain)
        outputs = [log.read_text() if log.exists() else "" for log in logs]
    marks = [line for output in outputs for line in output.splitlines() if line.startswith(FAULT)]
    fault = min((float(line.removeprefix(FAULT)) for line in marks), default=start)
    return [Outcome(code, output, end - fault) for (code, end), output in zip(ends, outputs, strict=True)]


def _wait(workers: list[BaseProcess], deadline: float, may_remain: tuple[int, ...]) -> list[tuple[int | None, float]]:
    ends: dict[int, tuple[int | None, float]] = {}
    awaited = set(range(len(workers))) - set(may_remain)
    while not awaited <= ends.keys() and time.monotonic() < deadline:
        for rank, worker in enumerate(workers):
            if rank not in ends and worker.exitcode is not None:
                ends[rank] = (worker.exitcode, time.monotonic())
        time.sleep(0.02)
    for rank, worker in enumerate(workers):
        if rank not in ends:
            ends[rank] = (None, time.monotonic())
            worker.kill()
            worker.join()
    return [ends[rank] for rank in range(len(workers))]


def _main(
    rank: int,
    world_size: int,
    port: int,
    log: str,
    program: Callable[..., None],
    args: tuple[Any, ...],
    is_child: bool,
) -> None:
    """A process of its own, from the environment that a launcher sets to the exit hooks of a script."""
    become_program(log)
    os.environ.update(
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo" if sys.platform == "linux" else "lo0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the parent serves the store, as torchrun does
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
    )
    if is_child:
        return program(*args)
    code = 0
    try:
        program(*args)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        code = 1
        try:
            sys.excepthook(*sys.exc_info())
        except BaseException:
            traceback.print_exc()
    threading._shutdown()  # the interpreter waits for threads before it runs exit hooks
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    os._exit(code)
