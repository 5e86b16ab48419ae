"""Torch's elastic agent under ``meshwright launch``: it says what failed, and starts the processes again."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import psutil
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.launcher import api as torch_launcher

from meshwright.faults.preemption import PREEMPTED, SIGNALS
from meshwright_hf.launch.job import (
    LAUNCH_VARIABLE,
    RESTARTED_VARIABLE,
    Launch,
    launch_name,
    local_address_towards,
    say,
)
from meshwright_hf.launch.tied_to_launcher import tied

# Without it, the processes of all attempts would meet in one store, where they read addresses of ended processes.
_FRESH_STORES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_OTHER_SIGNALS = "SIGINT,SIGHUP,SIGQUIT"  # at which the agent of a job that a scheduler starts again ends it
_LAST_TOGETHER = 10  # seconds for which the launchers of a preempted job wait for each other
NOTICES_LOSS = 15  # seconds after which torch's rendezvous counts a machine as lost: 3 heartbeats, one every 5 s


@contextlib.contextmanager
def elastic_agent(job: Launch) -> Iterator[Announced]:
    """Make torchrun use this module's agent, and meet as the launch says, while the context is open.

    Yields the signals that have announced the end of the job.
    """
    start: Any = torchrun.elastic_launch

    def launch(config: object, entrypoint: Any) -> Any:
        return start(config=meeting(config, job), entrypoint=entrypoint)

    agent, shared = torch_launcher.LocalElasticAgent, os.environ.get(_FRESH_STORES)
    announced = Announced(job.job_id)
    _replace(launch, functools.partial(Agent, announced=announced))
    if job.max_restarts:
        os.environ[_FRESH_STORES] = "1"
    before = {number: signal.signal(number, announced.take) for number in (SIGNALS if job.job_id else ())}
    try:
        yield announced
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _replace(start, agent)
        if job.max_restarts and shared is None:
            del os.environ[_FRESH_STORES]


def _replace(launch: Any, agent: Any) -> None:
    torchrun.elastic_launch = launch  # type: ignore[misc]
    torch_launcher.LocalElasticAgent = agent  # type: ignore[misc]


def meeting(config: Any, job: Launch) -> Any:
    """Return torch's LaunchConfig with the rendezvous of a launch; without restarts, return it unchanged.

    The static rendezvous of accelerate cannot restart: its store keeps the addresses of ended processes, and it does
    not notice machines that are gone.
    """
    if job.job_id is not None:
        config = dataclasses.replace(config, signals_to_handle=_OTHER_SIGNALS)
    if not job.max_restarts:
        return config
    assert job.main_process_ip is not None
    last_call = min(30, job.start_timeout)  # seconds for which the smallest allowed number of machines waits for more
    options = {
        "is_host": str(job.machine_rank == 0),
        "join_timeout": job.start_timeout + (NOTICES_LOSS + last_call if job.may_shrink else 0),
        "read_timeout": job.start_timeout,
        "last_call_timeout": last_call,
    }
    return dataclasses.replace(
        config,
        min_nodes=job.min_machines or job.num_machines,
        max_nodes=job.num_machines,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{job.main_process_ip}:{job.main_process_port}",
        rdzv_configs=options,
        local_addr=local_address_towards(job.main_process_ip),
        max_restarts=job.max_restarts,
    )


class Announced:
    """The signals that have announced the end of a job; they are passed on to the processes of this machine.

    Args:
        job_id: the name of a job that a scheduler starts again; None for another job, whose signals are not taken.
    """

    def __init__(self, job_id: str | None) -> None:
        self.job_id = job_id
        self._signals: set[int] = set()
        self.agent: Agent | None = None

    def __bool__(self) -> bool:
        return bool(self._signals)

    def take(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        self._signals.add(number)
        self.pass_on()

    def pass_on(self) -> None:
        """Send the processes, if there are any yet, all signals so far; a process may get one more than once."""
        processes = getattr(self.agent, "_pcontext", None)
        for pid in () if processes is None else processes.pids().values():
            for number in self._signals:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)


class Agent(LocalElasticAgent):
    """Torch's agent, which also prints what failed, does not wait for stopped processes, and leaves none behind.

    In a job that a scheduler starts again, it passes the signals that announce the job's end on to the processes, which
    end by themselves, and does not start them again.
    """

    _failures: Mapping[int, ProcessFailure] = {}
    _launch = ""  # names what this agent starts, also again

    def __init__(self, spec: WorkerSpec, *args: Any, announced: Announced, **kwargs: Any):
        if isinstance(spec.entrypoint, str):
            spec.entrypoint, spec.args = tied(spec.entrypoint, spec.args)
        super().__init__(spec, *args, **kwargs)
        self._announced, announced.agent = announced, self

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._launch = self._launch or launch_name(self._announced.job_id)
        os.environ[LAUNCH_VARIABLE] = self._launch  # for the Trainer (folders.py)
        started = super()._start_workers(worker_group)
        self._announced.pass_on()  # what came while there were no processes
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._kill_what_cannot_end()
        result = super()._monitor_workers(worker_group)
        self._failures = result.failures if result.state is WorkerState.FAILED else {}
        codes = {failure.exitcode for failure in self._failures.values()}
        if self._announced.job_id is not None and codes and (self._announced or PREEMPTED in codes):
            self._remaining_restarts = 0
            self._exit_barrier_timeout = _LAST_TOGETHER
            self._exit_barrier()  # machine 0 has the store, without which the others would take the end for a failure
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        spec, before = worker_group.spec, worker_group.workers[0].world_size
        why = "machines have joined or left"
        if self._failures:
            why = first_failure(self._failures)[2]
        attempt = spec.max_restarts - self._remaining_restarts
        say(f"{why}; the processes of this machine start again (restart {attempt} of {spec.max_restarts})")
        os.environ[RESTARTED_VARIABLE] = self._launch
        super()._restart_workers(worker_group)
        world = worker_group.workers[0].world_size
        if world != before:
            say(f"{world} processes on {worker_group.group_world_size} machine(s), instead of {before}")

    def _kill_what_cannot_end(self) -> None:
        """Kill stopped processes once another one has failed: torch's SIGTERM would not end them for 30 s."""
        handlers: Mapping[int, Any] = getattr(self._pcontext, "subprocess_handlers", {})
        processes = [handler.proc for handler in handlers.values()]
        if not any(process.poll() for process in processes):
            return
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if process.poll() is None and psutil.Process(process.pid).status() == psutil.STATUS_STOPPED:
                    process.kill()


def first_failure(failures: Mapping[int, ProcessFailure]) -> tuple[int, int, str]:
    """Return the rank that failed first, its exit code as a shell would give it, and how it ended.

    The failures are in the order in which the agent found them: those that it caused itself by ending the rest come
    last. Their timestamps are whole seconds, which are often equal.
    """
    rank, failure = next(iter(failures.items()))
    code = failure.exitcode
    how = f"ended with exit code {code}" if code > 0 else f"was killed by {_name(-code)}"
    return rank, code if code > 0 else 128 - code, f"rank {rank} {how}"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name
        return f"signal {number}"
