"""The process from which the tests fork all others: it has the imports done, which take seconds each time."""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing.context import ForkServerContext

# Python starts one such server for each test session, with the modules that it knew at its first use.
PRELOAD = [
    "accelerate.commands.launch",
    "datasets",
    "peft",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "meshwright_tools.cli",
    "meshwright.distribute.to_distributed",
    "meshwright_hf.accelerate",
    "meshwright_hf.launch.launcher",
    "meshwright_hf.trainer",
    "support.models",
    "harness.frozen",  # the last
]


def fork_context() -> ForkServerContext:
    """Return the context whose processes are forked from the server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def become_program(log: str) -> None:
    """Make this process what a shell would have started.

    What it and its own processes print is appended to a file. Its own processes start by the platform's method: those
    of a DataLoader are forked, as in a user's program, instead of importing torch anew.
    """
    multiprocessing.set_start_method(None, force=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115
