"""Runs a command that gets SIGTERM when its launcher ends, also if the launcher was killed; for Linux.

A program of its own, which needs the standard library only: ``python tied_to_launcher.py PID COMMAND...``, where PID is
the launcher. The command replaces this program, so its process and its exit code are the command's.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>; survives exec


def tied(command: str, arguments: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Return the command and arguments that run a command tied to this process; elsewhere than on Linux, unchanged."""
    if sys.platform != "linux":
        return command, arguments
    return sys.executable, ("-I", "-S", os.path.abspath(__file__), str(os.getpid()), command, *arguments)


def _main() -> None:
    launcher, *command = sys.argv[1:]
    if "MESHWRIGHT_JOB" in os.environ:  # it waits until the program has imported what can act on it
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    except (OSError, AttributeError):  # no prctl here; the command runs all the same
        pass
    else:
        if os.getppid() != int(launcher):  # it ended before prctl
            sys.exit(128 + signal.SIGTERM)
    os.execvp(command[0], command)


if __name__ == "__main__":
    _main()
