"""The processes of the contenders: each contender has its own, which wait while another one takes its turn."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import resource
import signal
import socket
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.contenders import Contender, Entry
from benchmarks.rounds import Turn
from benchmarks.workload import Workload
from meshwright.faults.guard import active_guard
from meshwright.faults.interpose import observe

LOOPBACK = "127.0.0.1"
SECONDS_TO_END = 60


class ContenderFailedError(RuntimeError):
    """Raised if a process of a contender ends or raises an error."""


class Team:
    """The processes of one contender.

    Args:
        entry: the contender, whose ``build`` can be pickled.
        workload: what it trains.

    Raises:
        ContenderFailedError: if it cannot be built.
    """

    def __init__(self, entry: Entry, workload: Workload) -> None:
        self.name = entry.name
        context = multiprocessing.get_context("spawn")
        with socket.create_server((LOOPBACK, 0)) as server:
            port = server.getsockname()[1]
        self._members: list[tuple[Any, Connection]] = []
        for rank in range(entry.ranks):
            ours, theirs = context.Pipe()
            variables = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": entry.ranks,
                "LOCAL_WORLD_SIZE": entry.ranks,
                "MASTER_ADDR": LOOPBACK,
                "MASTER_PORT": port,
            }
            process = context.Process(target=_serve, args=(theirs, entry, workload, variables), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))
        try:
            self._answers()
        except BaseException:
            self.close()
            raise

    def step(self) -> list[Turn]:
        """Run one training step; return what each rank measured.

        Raises:
            ContenderFailedError: if a rank raises an error or ends. The processes of this contender are then ended.
        """
        for _, connection in self._members:
            with contextlib.suppress(ConnectionError):  # the answer says how the process ended
                connection.send("step")
        return self._answers()

    def close(self) -> None:
        """Let the processes finish what they do and end, and kill those that do not."""
        for _, connection in self._members:
            connection.close()
        for process, _ in self._members:
            process.join(SECONDS_TO_END)
            process.kill()
            process.join()

    def _answers(self) -> list[Any]:
        """Return one answer of each rank, in the order of ranks."""
        answers: dict[int, Any] = {}
        while len(answers) < len(self._members):
            left = {c: rank for rank, (_, c) in enumerate(self._members) if rank not in answers}
            for connection in wait(list(left)):
                assert isinstance(connection, Connection)
                rank = left[connection]
                try:
                    answers[rank] = connection.recv()
                except EOFError:
                    process = self._members[rank][0]
                    process.join()
                    answers[rank] = _Failure(f"the process ended with status {process.exitcode}")
                if isinstance(answers[rank], _Failure):
                    for process, _ in self._members:  # the other ranks may wait in a collective
                        process.kill()
                    raise ContenderFailedError(f"{self.name}, rank {rank}: {answers[rank].text}")
        return [answers[rank] for rank in range(len(self._members))]


@dataclass(frozen=True)
class _Failure:
    """The answer of a rank whose turn failed."""

    text: str


def _serve(orders: Connection, entry: Entry, workload: Workload, variables: dict[str, int | str]) -> None:
    """Build a contender, and run a step for each order until the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that reports
    os.environ.update({name: str(value) for name, value in variables.items()})
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        contender = entry.build(workload)
        gc.disable()  # garbage is collected between steps, since a collection within a step is noise
        orders.send("built")
        while orders.recv() == "step":
            orders.send(take_turn(contender))
    except (EOFError, ConnectionError):
        dist.destroy_process_group()
    except BaseException:
        orders.send(_Failure(traceback.format_exc()))


def take_turn(contender: Contender) -> Turn:
    """Run one training step together with the other ranks, and measure it."""
    gc.collect()
    observe(None)
    dist.barrier()
    observe(active_guard() if contender.watched else None)
    before, waited = resource.getrusage(resource.RUSAGE_SELF), _seconds_without_core()
    began = time.monotonic()
    loss = contender.forward()
    contender.backward(loss)
    clip_began, clip_cpu_began = time.monotonic(), time.process_time()
    norm = contender.clip()
    clip, clip_cpu = time.monotonic() - clip_began, time.process_time() - clip_cpu_began
    contender.update()
    ended = time.monotonic()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return Turn(
        began=began,
        ended=ended,
        user=after.ru_utime - before.ru_utime,
        kernel=after.ru_stime - before.ru_stime,
        waited=None if waited is None else (_seconds_without_core() or 0.0) - waited,
        clip=None if norm is None else clip,
        clip_cpu=clip_cpu,
        loss=loss.item(),
        norm=None if norm is None else float(norm),
    )


def _seconds_without_core() -> float | None:
    """Return for how long this process's main thread has waited for a core since it started (Linux only)."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return None
