"""The cores of this host, and processes that share them."""

from __future__ import annotations

import os


def core_count() -> int:
    """Return the number of cores that this process may use, which may be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
