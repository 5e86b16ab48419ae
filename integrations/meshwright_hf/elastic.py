"""Torch's elastic agent under ``meshwright launch``: it says what failed, and starts the processes again."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import psutil
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.launcher import api as torch_launcher

from meshwright_hf import network
from meshwright_hf.launch_job import LAUNCH_VARIABLE, RESTARTED_VARIABLE, Launch
from meshwright_hf.tied_to_launcher import tied

# Without it, the processes of all attempts would meet in one store, where they read addresses of ended processes.
_FRESH_STORES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
NOTICES_LOSS = 15  # seconds after which torch's rendezvous counts a machine as lost: 3 heartbeats, one every 5 s


@contextlib.contextmanager
def elastic_agent(job: Launch) -> Iterator[None]:
    """Make torchrun use this module's agent, and meet as the launch says, while the context is open."""
    start: Any = torchrun.elastic_launch

    def launch(config: object, entrypoint: Any) -> Any:
        return start(config=meeting(config, job), entrypoint=entrypoint)

    agent, shared = torch_launcher.LocalElasticAgent, os.environ.get(_FRESH_STORES)
    _replace(launch, Agent)
    if job.max_restarts:
        os.environ[_FRESH_STORES] = "1"
    try:
        yield
    finally:
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
        local_addr=network.local_address_towards(job.main_process_ip),
        max_restarts=job.max_restarts,
    )


class Agent(LocalElasticAgent):
    """Torch's agent, which also prints what failed, does not wait for stopped processes, and leaves none behind."""

    _failures: Mapping[int, ProcessFailure] = {}
    _launch = ""  # names what this agent starts, also again

    def __init__(self, spec: WorkerSpec, *args: Any, **kwargs: Any):
        if isinstance(spec.entrypoint, str):
            spec.entrypoint, spec.args = tied(spec.entrypoint, spec.args)
        super().__init__(spec, *args, **kwargs)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._launch = self._launch or uuid.uuid4().hex
        os.environ[LAUNCH_VARIABLE] = self._launch  # for the Trainer (trainer_folders.py)
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._kill_what_cannot_end()
        result = super()._monitor_workers(worker_group)
        self._failures = result.failures if result.state is WorkerState.FAILED else {}
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        spec, before = worker_group.spec, worker_group.workers[0].world_size
        why = "machines have joined or left"
        if self._failures:
            why = first_failure(self._failures)[2]
        attempt = spec.max_restarts - self._remaining_restarts
        _say(f"{why}; the processes of this machine start again (restart {attempt} of {spec.max_restarts})")
        os.environ[RESTARTED_VARIABLE] = self._launch
        super()._restart_workers(worker_group)
        world = worker_group.workers[0].world_size
        if world != before:
            _say(f"{world} processes on {worker_group.group_world_size} machine(s), instead of {before}")

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


def _say(text: str) -> None:
    print(f"meshwright launch: {text}", file=sys.stderr, flush=True)
