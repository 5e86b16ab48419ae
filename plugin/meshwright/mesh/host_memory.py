"""The memory of this host that processes may use."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUPS, _MEMINFO = Path("/sys/fs/cgroup"), Path("/proc/meminfo")
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")  # of cgroup v2 and v1, as a process in a container sees them


def available_memory() -> float:
    """Return the bytes that processes of this host may still take without swapping, in a container its limit at most.

    The kernel gives the files that it caches up for them, so that these count as available.
    """
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"  # macOS knows the latter
    available = _kernels_estimate() or float(os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE"))
    return min([available, *_limits()])


def _kernels_estimate() -> float | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
        return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        return None


def _limits() -> list[float]:
    found = []
    for name in _LIMITS:
        try:
            found.append(float((_CGROUPS / name).read_text()))
        except (OSError, ValueError):  # no such version of cgroups, or the limit is "max"
            continue
    return found
