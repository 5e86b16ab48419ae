"""Runs one function on local processes, in the environment that torchrun sets. If one process fails, all end."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from meshwright.errors import PeerFailedError, PlanError, VerificationError
from meshwright.mesh.process_group import LOOPBACK, bound_socket

Tell = Callable[[str], None]
R = TypeVar("R")

GRACE = 5.0  # seconds for the other ranks to answer after one rank failed
STACKS_TIME = 10.0  # most seconds to wait for the processes to write their stacks
_STACK = "most recent call first"  # what faulthandler writes
_OF_A_LAUNCHER = (
    "MESHWRIGHT_PLAN",
    "MESHWRIGHT_PLAN_USED",
    "GROUP_RANK",
    "ROLE_RANK",
    "NODE_RANK",
    "TORCHELASTIC_RUN_ID",
)


@dataclass(frozen=True)
class Failure:
    """The error that a function raised.

    Args:
        time: the time of the failure, on a clock that all processes share.
        error: a PlanError with the same message, if the error is meshwright's PlanError; None for any other error.
        text: the error's traceback.
        is_effect: whether the error only says that another rank failed.
    """

    time: float
    error: ValueError | None
    text: str
    is_effect: bool


def start_server(modules: Sequence[str] = ()) -> None:
    """Start a server that imports what the processes need, in the background.

    The processes are forked from this server, since the imports would take seconds in each process.

    Args:
        modules: the modules to import besides this package; those that cannot be imported are left out.
    """
    if "forkserver" in multiprocessing.get_all_start_methods():
        # A server that is already running keeps its imports, and the processes import what is missing.
        own = ["__main__", "meshwright_tools.verification.program"]
        multiprocessing.get_context("forkserver").set_forkserver_preload([*own, *filter(None, modules)])
        from multiprocessing import forkserver

        forkserver.ensure_running()


def run_together(
    function: Callable[..., R], world_size: int, *args: object, timeout: float, tell: Tell = lambda text: None
) -> list[R]:
    """Run ``function(*args, tell)`` on each rank, and return the results in the order of the ranks.

    Args:
        function: a module-level function, which is pickled with its arguments.
        world_size: the number of processes, which form one group on this machine (gloo, CPU).
        timeout: seconds within which all processes must answer.
        tell: a function that receives rank 0's progress messages.

    Raises:
        PlanError: if a rank raised a PlanError, or the arguments cannot be pickled.
        VerificationError: if a rank raised another error, ended, or did not answer in time.
    """
    methods = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    listener = bound_socket(LOOPBACK, 0)  # torch would listen on all interfaces
    port = listener.getsockname()[1]
    store = dist.TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    with tempfile.TemporaryDirectory(prefix="meshwright-verify-") as folder:
        group = _Processes([Path(folder) / f"rank{rank}.log" for rank in range(world_size)])
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                place = _ProcessPlace(rank, world_size, store.port, str(group.logs[rank]))
                process = context.Process(target=_main, args=(theirs, place, function, args), daemon=True)
                group.processes.append(process)
                group.connections.append(ours)
                _start(process)
                theirs.close()
            return group.results(timeout, tell)
        finally:
            group.end()


@dataclass(frozen=True)
class _ProcessPlace:
    rank: int
    world_size: int
    port: int
    log: str


def _start(process: BaseProcess) -> None:
    try:
        process.start()
    except (AttributeError, TypeError, ValueError, ImportError) as error:  # what pickle raises
        raise _unpicklable(error) from error
    except Exception as error:
        if type(error).__name__ != "PicklingError":
            raise
        raise _unpicklable(error) from error


def _unpicklable(error: BaseException) -> PlanError:
    return PlanError(
        f"model_factory cannot be sent to another process ({error}); verify starts processes that import it. "
        "Define it with def at the top level of a file and pass it by name, with its arguments bound by "
        "functools.partial. In a notebook, put it into a .py file beside the notebook and import it"
    )


class _Processes:
    """The processes of one run, and their results."""

    def __init__(self, logs: list[Path]):
        self.logs = logs
        self.processes: list[BaseProcess] = []
        self.connections: list[Connection] = []

    def results(self, timeout: float, tell: Tell) -> list[Any]:
        deadline = time.monotonic() + timeout
        pending = {connection: rank for rank, connection in enumerate(self.connections)}
        done: dict[int, object] = {}
        failures: dict[int, Failure] = {}
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready and failures:
                break
            if not ready:
                raise VerificationError(self._hang(sorted(pending.values()), timeout))
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = pending[connection]
                kind, value = self._receive(connection, rank)
                if kind == "told":
                    if rank == 0:
                        tell(value)
                    continue
                del pending[connection]
                (failures if kind == "failed" else done)[rank] = value
                if kind == "failed":
                    deadline = min(deadline, time.monotonic() + GRACE)
        if failures:
            self._raise(failures)
        return [done[rank] for rank in range(len(self.processes))]

    def _receive(self, connection: Connection, rank: int) -> tuple[str, Any]:
        try:
            answer: tuple[str, Any] = connection.recv()
            return answer
        except (EOFError, OSError):
            self.processes[rank].join(1.0)
            code = self.processes[rank].exitcode
            hint = ""
            if not self.logs[rank].exists():
                hint = (
                    " while it imported the program (see its output above); call verify under "
                    'if __name__ == "__main__":, since the processes import the script'
                )
            return "failed", Failure(
                0.0, None, f"the process ended with exit code {code}{hint}\n{self._log(rank)}", False
            )

    def _raise(self, failures: dict[int, Failure]) -> None:
        rank, first = min(failures.items(), key=lambda item: (item[1].is_effect, item[1].time))
        if first.error is not None:
            raise first.error
        where = f"rank {rank} of {len(self.processes)}" if len(self.processes) > 1 else "the program on one device"
        raise VerificationError(f"{where} failed\n{first.text}")

    def _hang(self, silent: list[int], timeout: float) -> str:
        for process in self.processes:
            if process.pid is not None and process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + STACKS_TIME
        while time.monotonic() < deadline and not all(_STACK in self._log(rank) for rank in silent):
            time.sleep(0.1)
        stacks = "\n".join(f"---- rank {rank}\n{self._log(rank)}" for rank in range(len(self.processes)))
        return (
            f"rank(s) {', '.join(map(str, silent))} of {len(self.processes)} did not answer within {timeout:g} s; pass "
            f"a larger timeout=, or see in the stacks where the ranks are:\n{stacks}"
        )

    def _log(self, rank: int) -> str:
        return self.logs[rank].read_text(errors="replace").strip() if self.logs[rank].exists() else ""

    def end(self) -> None:
        started = [process for process in self.processes if process.pid is not None]
        for process in started:
            process.kill()
        for process in started:
            process.join()
        for connection in self.connections:
            connection.close()


def _main(
    connection: Connection, place: _ProcessPlace, function: Callable[..., object], args: tuple[object, ...]
) -> None:
    descriptor = os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    # Ctrl-C reaches the whole foreground process group. This process ignores it, since the parent ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(connection,), daemon=True).start()
    for name in _OF_A_LAUNCHER:
        os.environ.pop(name, None)
    os.environ.update(
        OMP_NUM_THREADS="1",
        CUDA_VISIBLE_DEVICES="",
        GLOO_SOCKET_IFNAME="lo" if sys.platform == "linux" else "lo0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(place.port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the parent serves the store, as torchrun does
        RANK=str(place.rank),
        LOCAL_RANK=str(place.rank),
        WORLD_SIZE=str(place.world_size),
        LOCAL_WORLD_SIZE=str(place.world_size),
    )
    torch.set_num_threads(1)
    try:
        answer: tuple[str, object] = ("done", function(*args, lambda text: connection.send(("told", text))))
    except BaseException as error:
        answer = ("failed", _failure(error))
    try:
        connection.send(answer)
    except Exception as error:  # the function's result cannot be pickled
        connection.send(("failed", Failure(time.monotonic(), None, f"{answer[1]!r}\n{error}", False)))
    # Wait until the parent ends this process: other ranks may still need it, and leaving a group does not wait.
    threading.Event().wait()


def _failure(error: BaseException) -> Failure:
    # Causes and frames are not sent, since they may refer to any object.
    plain = type(error).__module__ == "meshwright.errors" and isinstance(error, PlanError)
    own = PlanError(str(error)) if plain else None
    text = "".join(traceback.format_exception(error))
    return Failure(time.monotonic(), own, text, isinstance(error, PeerFailedError))


def _end_with_parent(connection: Connection) -> None:
    """End this process when the parent is gone. The parent sends nothing, so the connection is readable only then."""
    wait([connection])
    os._exit(1)
