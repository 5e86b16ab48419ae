"""Ends processes that the same launcher started on this machine and that cannot end by themselves.

A launcher ends a job by SIGTERM. A stopped process takes this signal only when it goes on, so torchrun waits for 30
seconds before it kills the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any


def this_process() -> dict[str, Any] | None:
    """Return what identifies this process on all machines and over time; None on systems other than Linux."""
    try:
        return {"machine": _machine(), "pid": os.getpid(), "started": _stat(os.getpid())[1]}
    except (OSError, IndexError):
        return None


def end_sibling(process: dict[str, Any] | None) -> None:
    """Kill a process if it was started by this process's own parent, on this machine.

    Args:
        process: what ``this_process`` returned in that process.
    """
    with contextlib.suppress(OSError, IndexError):
        if process is None or process["machine"] != _machine() or process["pid"] == os.getpid():
            return
        # The descriptor stays that of one process, even if its number is given to another one.
        descriptor = os.pidfd_open(process["pid"])
        try:
            if _stat(process["pid"]) == (os.getppid(), process["started"]):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)


def _machine() -> str:
    """Return the boot of this machine's kernel and the namespace of its process numbers."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


def _stat(pid: int) -> tuple[int, int]:
    """Return a process's parent and when it started, in ticks since the boot."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()  # the name before may have spaces and brackets
    return int(fields[1]), int(fields[19])
