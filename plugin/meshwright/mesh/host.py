"""This host: the cores and the memory that its processes may use, and the GPU of each."""

from __future__ import annotations

import logging
import math
import os
import socket
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.errors import PlanError
from meshwright.mesh.host_wire import SHARE_GPUS, shares_gpus

_CGROUPS = Path("/sys/fs/cgroup")
# The files of cgroup v2 and v1, as a process in a container sees them; v1 keeps quota and period apart.
_QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))


def core_count() -> int:
    """Return the number of cores that this process may use, which may be fewer than the machine has.

    The process's affinity and the CPU quota of its container (``docker run --cpus``) may each set a limit.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # not on macOS
    return min(cores, container_cores(_CGROUPS) or cores)


def container_cores(cgroups: Path) -> int | None:
    """Return the cores of a container's CPU quota, rounded up; None without a quota that can be read.

    Args:
        cgroups: the folder where the container's control group is mounted.
    """
    for names in _QUOTAS:
        try:
            quota, period = map(int, " ".join((cgroups / name).read_text() for name in names).split())
        except (OSError, ValueError):  # no such version of cgroups, or the quota is "max"
            continue
        if quota > 0 and period > 0:
            return math.ceil(quota / period)
    return None


def crowding(processes: int, *, cores: int, threads: int = 1) -> str:
    """Return words for processes that have fewer cores than threads; an empty string if there are enough cores.

    Args:
        processes: number of processes on this host.
        cores: number of its cores.
        threads: number of threads of a process.

    Example:
        >>> crowding(4, cores=2), crowding(2, cores=2)
        ('4 processes on 2 cores', '')
    """
    if processes * threads <= cores:
        return ""
    each = f" with {threads} threads each" if threads > 1 else ""
    return f"{_count(processes, 'process', 'processes')}{each} on {_count(cores, 'core', 'cores')}"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


_MEMINFO, _OWN = Path("/proc/meminfo"), Path("/proc/self/cgroup")


def available_memory() -> float:
    """Return the bytes that processes of this host may still take without swapping.

    In a container, and in a job of a scheduler, no more than what its limits leave. The kernel gives the files that it
    caches up for processes, so that these count as available.
    """
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"  # macOS knows the latter
    available = _kernels_estimate() or float(os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE"))
    return max(0.0, min([available, *_left_by_limits()]))


def _kernels_estimate() -> float | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
        return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        return None


@dataclass(frozen=True)
class _Version:
    """What a version of cgroups calls its files, and in ``memory.stat`` the cached files that it may give up."""

    root: str
    controller: str  # in a line of /proc/self/cgroup
    limit: str
    usage: str
    cached: tuple[str, str]


_VERSIONS = (
    _Version("", "", "memory.max", "memory.current", ("inactive_file", "active_file")),
    _Version(
        "memory",
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
)


def _left_by_limits() -> list[float]:
    """Return what the limit of each group that has this process leaves; a group's limit holds for the groups in it."""
    return [left for version in _VERSIONS for group in _groups(version) if (left := _left(group, version)) is not None]


def _groups(version: _Version) -> list[Path]:
    """Return the folders of this process's group and those above it; a container may see its own at the root."""
    root, own = _CGROUPS / version.root, "/"
    try:
        for line in _OWN.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if version.controller in controllers.split(","):
                own = path
    except (OSError, ValueError):
        pass
    group = root / own.strip("/")
    return [root, *(folder for folder in (group, *group.parents) if folder.is_relative_to(root) and folder != root)]


def _left(group: Path, version: _Version) -> float | None:
    """Return what a group's limit leaves; None without a limit."""
    try:
        limit = float((group / version.limit).read_text())
    except (OSError, ValueError):  # no such version of cgroups or group, or the limit is "max"
        return None
    try:
        used = float((group / version.usage).read_text())
        lines = [line.split() for line in (group / "memory.stat").read_text().splitlines()]
        cached = sum(float(value) for name, value in lines if name in version.cached)
    except (OSError, ValueError):
        return limit
    return limit - max(0.0, used - cached)


# The variables of launchers that do not set LOCAL_RANK: the rank, the number on the host, and the number of processes.
# Others name them PREFIX_RANK, PREFIX_LOCAL_RANK and PREFIX_SIZE: Open MPI, MVAPICH, jsrun, Horovod.
_LAUNCHERS = (
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
    ("PALS_RANKID", "PALS_LOCAL_RANKID", "PALS_SIZE"),
    ("FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_SIZE"),
)
_STEP = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")  # of a step of Slurm, which only srun starts

logger = logging.getLogger(__name__)


def _launchers() -> list[tuple[str, str, str]]:
    prefixes = [name.removesuffix("_SIZE") for name in sorted(os.environ) if name.endswith("_SIZE")]
    return [*_LAUNCHERS, *((f"{prefix}_RANK", f"{prefix}_LOCAL_RANK", f"{prefix}_SIZE") for prefix in prefixes)]


def local_rank(rank: int, world: int) -> int:
    """Return a process's number on its host: from torchrun's LOCAL_RANK, from srun or mpirun, or else its rank.

    A job's variables also reach processes that a script starts by itself. So a launcher counts only if it has started
    all processes.

    Args:
        rank: the process's rank.
        world: the number of processes.
    """
    if (number := os.environ.get("LOCAL_RANK")) is not None:
        return int(number)
    for _, name, size in _launchers():
        if name in os.environ and os.environ.get(size) == str(world):
            return int(os.environ[name])
    return rank


def check_is_alone() -> None:
    """Check that a process without a process group is not one of several that srun, mpirun or jsrun has started.

    A batch script of Slurm has the job's variables too, but is one process, unless srun has started a step in it.

    Raises:
        PlanError: if the launcher has started several processes; the message says how to make them one group.
    """
    if dist.is_initialized() or "WORLD_SIZE" in os.environ:
        return
    is_batch_script = os.environ.get("ENVIRONMENT") == "BATCH"
    for rank, local, size in (_STEP, *_launchers()[is_batch_script:]):
        count = os.environ.get(size, "")
        if count.isdecimal() and int(count) > 1 and (rank in os.environ or local in os.environ):
            raise PlanError(
                f"{size}={count}: {count} processes were started, but without RANK and WORLD_SIZE they are no group, "
                "so each would train a model of its own. Start one process per node, which starts the others: "
                f"meshwright launch --num_processes {count} SCRIPT. Or set in each process, before it imports torch: "
                f"RANK=${rank} WORLD_SIZE={count} LOCAL_RANK=${local} MASTER_ADDR=HOST_OF_RANK_0 MASTER_PORT=29500. If "
                "they are meant to be separate runs, say so: to_distributed(..., device_num=1)"
            )


def check_one_rank_per_gpu(store: dist.Store, rank: int, world: int, device: torch.device) -> None:
    """Check that no two ranks use the same GPU, which NCCL does not support. Every rank must make the call.

    Args:
        store: the store of all ranks, which need no process group yet.
        rank: this rank.
        world: the number of ranks.
        device: this rank's GPU.

    Raises:
        PlanError: on every rank, if two ranks use one GPU; the message names both.
        RuntimeError: if other ranks do not come within the store's timeout.
    """
    # A program may leave its process group and join another one, and a launcher keeps its store meanwhile.
    store = dist.PrefixStore(f"gpus{store.add(f'calls of rank {rank}', 1)}", store)
    host, gpu = socket.gethostname(), f"{torch.cuda.get_device_properties(device).uuid}"
    if store.add(f"ranks on {host} {gpu}", 1) == 1:
        store.set(f"first rank on {host} {gpu}", str(rank))
    else:
        first = store.get(f"first rank on {host} {gpu}").decode()
        count = torch.cuda.device_count()
        store.set(
            "shared gpu",
            f"rank {first} and rank {rank} both use {device} of host {host}, and NCCL needs a GPU for each rank. Rank "
            f"{rank} sees {count} GPU{'s' if count != 1 else ''}. Launch at most one process per GPU (torchrun "
            f"--nproc-per-node {count} SCRIPT), or, with a launcher of your own, set LOCAL_RANK in each process to its "
            f"number on its host. To test a plan on fewer GPUs than ranks, slowly: {SHARE_GPUS}=1",
        )
    if store.add("ranks with a gpu", 1) == world:
        store.set("all have a gpu", "")
    store.wait(["all have a gpu"])
    if store.check(["shared gpu"]):
        raise PlanError(store.get("shared gpu").decode())


def check_device_num(device_num: int | None, device: torch.device) -> None:
    """Check the ``device_num`` of a call against the GPUs of this host.

    A process that sees one GPU only may be one of several for which the launcher has chosen GPUs.

    Raises:
        PlanError: if this host has fewer GPUs.
    """
    if device.type != "cuda" or device_num is None:
        return
    count = torch.cuda.device_count()
    if 1 < count < device_num and not shares_gpus():
        raise PlanError(
            f"device_num={device_num}, but this host has {count} GPUs, and each rank needs one; write "
            f"device_num={count}, and more nodes: node_num=..., or make more GPUs visible (CUDA_VISIBLE_DEVICES)"
        )


def warn_of_unused_gpus(device: torch.device, rank: int) -> None:
    """Warn once that a model will train on the CPU of a host with GPUs, since its parameters are on the CPU."""
    if device.type == "cpu" and rank == 0 and torch.cuda.is_available():
        logger.warning(
            "the model is on the CPU, so it trains there, although this host has %d GPU(s). To use them, move the "
            "model before the call: torch.cuda.set_device(int(os.environ['LOCAL_RANK'])); model.to('cuda'). To "
            "train on the CPU without this message, hide the GPUs: CUDA_VISIBLE_DEVICES=''",
            torch.cuda.device_count(),
        )
