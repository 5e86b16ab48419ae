"""The memory of this host that processes may use."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_CGROUPS, _MEMINFO, _OWN = Path("/sys/fs/cgroup"), Path("/proc/meminfo"), Path("/proc/self/cgroup")


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
