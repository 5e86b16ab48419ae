"""A pool of worker processes, one a rank, that run functions of the test modules together."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from harness import worker
from harness.messages import Failure, Job, Result, receive
from harness.server import fork_context

START_TIMEOUT = 180.0  # seconds for the server's imports, on a busy machine
STACKS_TIME = 1.0  # seconds for the workers to write their stacks
END_TIMEOUT = 5.0  # seconds for a worker to end by itself


class WorkerError(Exception):
    """A function that raised on some rank; the message holds every traceback, the earliest first."""


class WorkerHang(Exception):
    """A function that did not come back on every rank; the message holds the stack of every rank."""


class WorkerPool:
    """``world_size`` processes on this machine that start at the first run and live until ``close``.

    A run calls one module-level function on every rank, inside a fresh default process group (gloo on
    loopback) and with fresh seeds. Whatever groups it creates are gone before the next run.

    Args:
        world_size: the number of ranks.
        grace: seconds that the other ranks have to answer after one failed.

    Example:
        def total(value):
            tensor = torch.tensor(value + dist.get_rank())
            dist.all_reduce(tensor)
            return tensor.item()

        assert pool.run(total, 10) == [21, 21]
    """

    def __init__(self, world_size: int, *, grace: float = 10.0) -> None:
        self.world_size = world_size
        self.grace = grace
        self._jobs = 0
        self._workers: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._store: dist.TCPStore | None = None
        self._log_starts = [0] * world_size
        self._logs = tempfile.TemporaryDirectory(prefix="workers-")
        atexit.register(self.close)  # before multiprocessing's own, which waits for all children

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60, **kwargs: Any) -> list[Any]:
        """Return what ``function(*args, **kwargs)`` returned on each rank.

        Args:
            function: a module-level function of an importable module, as are the types of what it returns.
            timeout: seconds until all ranks must have answered.

        Raises:
            WorkerError: some rank raised, or its process died.
            WorkerHang: some rank did not answer in time; the workers are replaced at the next run.
        """
        answers = self.answers(function, *args, timeout=timeout, **kwargs)
        if failures := _failures(answers):
            raise WorkerError(_tracebacks(failures))
        return [answers[rank].value for rank in range(self.world_size)]

    def run_expecting_error(
        self, function: Callable[..., Any], *args: Any, timeout: float = 60, **kwargs: Any
    ) -> list[tuple[str, str]]:
        """Return the type name and the message of what the function raised on each rank.

        Raises:
            AssertionError: some rank did not raise.
            WorkerHang: as ``run``.
        """
        answers = self.answers(function, *args, timeout=timeout, **kwargs)
        failures = _failures(answers)
        if quiet := sorted(set(answers) - set(failures)):
            raised = f"; the others did:\n{_tracebacks(failures)}" if failures else ""
            raise AssertionError(f"no error was raised on ranks {quiet}{raised}")
        return [(failures[rank].type_name, failures[rank].message) for rank in range(self.world_size)]

    def answers(
        self, function: Callable[..., Any], *args: Any, timeout: float = 60, **kwargs: Any
    ) -> dict[int, Result | Failure]:
        """Return what the function returned or raised, for each rank.

        Raises:
            WorkerHang: as ``run``.
        """
        if not self._workers:
            self._start()
        self._jobs += 1
        job = pickle.dumps(Job(self._jobs, function, args, kwargs))
        self._log_starts = [self._log(rank).stat().st_size for rank in range(self.world_size)]
        for connection in self._connections:
            # A worker that has died since is reported below, when its answer is missing.
            with contextlib.suppress(OSError):
                connection.send_bytes(job)
        return self._collect(timeout)

    def close(self) -> None:
        """End the workers; a later run starts new ones."""
        for connection in self._connections:
            connection.close()  # upon which a worker ends by itself, so that `make coverage` counts what it ran
        for process in self._workers:
            process.join(END_TIMEOUT)
            process.kill()
            process.join()
        self._workers, self._connections, self._store = [], [], None

    def _collect(self, timeout: float) -> dict[int, Result | Failure]:
        """One answer a rank; workers that hung, died or hold answers nobody will read are ended."""
        try:
            answers = self._wait_for_answers(timeout)
        except BaseException:
            self.close()
            raise
        if any(process.exitcode is not None for process in self._workers):
            self.close()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send_bytes(b"")  # every rank is through, so that its groups can be closed
        return answers

    def _wait_for_answers(self, timeout: float) -> dict[int, Result | Failure]:
        deadline = time.monotonic() + timeout
        pending = {connection: rank for rank, connection in enumerate(self._connections)}
        answers: dict[int, Result | Failure] = {}
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise WorkerHang(self._hang_report(sorted(pending.values()), answers, timeout))
            for connection in ready:
                rank = pending.pop(connection)
                answers[rank] = self._answer(rank)
                if isinstance(answers[rank], Failure):
                    deadline = min(deadline, time.monotonic() + self.grace)
        return answers

    def _answer(self, rank: int) -> Result | Failure:
        try:
            return receive(self._connections[rank])
        except (EOFError, OSError):
            self._workers[rank].join()
            code = self._workers[rank].exitcode
            message = f"the process of rank {rank} ended with exit code {code}"
            # Time 0: what the other ranks raise is the effect.
            return Failure(0.0, "WorkerDied", message, f"{message}\n{self._output(rank)}")

    def _hang_report(self, silent: list[int], answers: dict[int, Result | Failure], timeout: float) -> str:
        for process in self._workers:
            with contextlib.suppress(ProcessLookupError):
                assert process.pid is not None
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(STACKS_TIME)
        failures = _failures(answers)
        cause = f"{self.grace:g} s after another rank failed" if failures else f"within {timeout:g} s"
        parts = [f"ranks {silent} of {self.world_size} did not answer {cause}", _tracebacks(failures)]
        parts += [f"---- rank {rank}: output and stack\n{self._output(rank)}" for rank in range(self.world_size)]
        return "\n".join(part for part in parts if part)

    def _log(self, rank: int) -> Path:
        return Path(self._logs.name) / f"rank{rank}.log"

    def _output(self, rank: int) -> str:
        """What the worker wrote since this job started: prints, warnings, and the stacks it was asked for."""
        return self._log(rank).read_bytes()[self._log_starts[rank] :].decode(errors="replace")

    def _start(self) -> None:
        self._log_starts = [0] * self.world_size
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.world_size):
            connection, theirs = Pipe()
            self._log(rank).write_bytes(b"")
            arguments = (theirs, str(self._log(rank)), self._environment(rank))
            process = fork_context().Process(target=worker.main, args=arguments)
            process.start()
            theirs.close()
            self._workers.append(process)
            self._connections.append(connection)
        if failures := _failures(self._collect(START_TIMEOUT)):
            raise WorkerError(_tracebacks(failures))

    def _environment(self, rank: int) -> dict[str, str]:
        assert self._store is not None
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.world_size),
        }


def _failures(answers: dict[int, Result | Failure]) -> dict[int, Failure]:
    return {rank: answer for rank, answer in answers.items() if isinstance(answer, Failure)}


def _tracebacks(failures: dict[int, Failure]) -> str:
    earliest_first = sorted(failures.items(), key=lambda item: item[1].time)
    return "\n".join(f"---- rank {rank} failed\n{failure.traceback}" for rank, failure in earliest_first)
