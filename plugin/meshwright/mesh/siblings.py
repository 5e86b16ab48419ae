"""Ends processes that the same launcher started on this machine and that cannot end by themselves.

A launcher ends a job by SIGTERM. A stopped process takes this signal only when it goes on, so torchrun waits for 30
seconds before it kills the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# A real-time signal of Linux on which a process writes where its threads are, also while C code holds the GIL.
STACK_SIGNAL = getattr(signal, "SIGRTMAX", 0) - 7
WRITES = 0.3  # seconds in which a process writes its stacks


def write_stacks_on_signal() -> bool:
    """Let this process write its stacks on ``STACK_SIGNAL``; return whether it will."""
    if STACK_SIGNAL <= 0:
        return False
    if not _catches(os.getpid(), STACK_SIGNAL):
        faulthandler.register(STACK_SIGNAL, file=2)  # the descriptor, since sys.stderr may be replaced
    return True


def this_process() -> dict[str, Any] | None:
    """Return what identifies this process on all machines and over time; None on systems other than Linux."""
    try:
        return {"machine": _machine(), "pid": os.getpid(), "started": _stat(os.getpid())[1]}
    except (OSError, IndexError):
        return None


def end_sibling(process: dict[str, Any] | None) -> None:
    """Kill a process, which writes its stacks first, if this process's own parent on this machine started it.

    Args:
        process: what ``this_process`` returned in that process.
    """
    with contextlib.suppress(OSError, IndexError):
        if process is None or process["machine"] != _machine() or process["pid"] == os.getpid():
            return
        _kill(process["pid"], process["started"])


def end_ranks(ranks: Sequence[int]) -> None:
    """Kill the processes of ranks that this process's parent started for the same job, by their environment.

    For ranks that have not come to the set-up, so that nothing else is known of them.
    """
    job = {name: os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")}
    wanted = [{**job, "RANK": str(rank)} for rank in ranks]
    for path in Path("/proc").glob("[0-9]*"):
        pid = int(path.name)
        with contextlib.suppress(OSError, IndexError):
            parent, started = _stat(pid)
            if parent != os.getppid() or pid == os.getpid():
                continue
            environment = _environment(pid)
            if {name: environment.get(name) for name in (*job, "RANK")} in wanted:
                _kill(pid, started)


def _kill(pid: int, started: int) -> None:
    # The descriptor stays that of one process, even if its number is given to another one.
    descriptor = os.pidfd_open(pid)
    try:
        if _stat(pid) == (os.getppid(), started):
            if _catches(pid, STACK_SIGNAL):
                signal.pidfd_send_signal(descriptor, STACK_SIGNAL)
                time.sleep(WRITES)
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    finally:
        os.close(descriptor)


def _environment(pid: int) -> dict[str, str]:
    """Return the environment with which a process was started."""
    with open(f"/proc/{pid}/environ", "rb") as file:
        entries = file.read().decode(errors="replace").split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def _catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler of a signal, without which the signal would kill it."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _machine() -> str:
    """Return the boot of this machine's kernel and the namespace of its process numbers."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


def _stat(pid: int) -> tuple[int, int]:
    """Return a process's parent and when it started, in ticks since the boot."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()  # the name before may have spaces and brackets
    return int(fields[1]), int(fields[19])
