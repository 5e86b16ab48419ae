"""The cores of this host, and processes that share them."""

from __future__ import annotations

import math
import os
from pathlib import Path

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
