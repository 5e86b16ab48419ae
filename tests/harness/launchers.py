"""The ``meshwright`` command as a process of its own, forked from a server that has the imports done."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.server import become_program, fork_context


@dataclass(frozen=True)
class Ended:
    """How the command ended.

    Args:
        code: its exit code, negative for a signal.
        output: what it and all its processes printed.
    """

    code: int
    output: str


def run_command(
    *arguments: str, folder: Path, interrupts: Sequence[tuple[int, Callable[[], bool]]] = (), timeout: float = 120.0
) -> Ended:
    """Run ``meshwright ARGUMENTS`` in a folder until it ends.

    Args:
        folder: the working directory; what is printed goes to a file in it.
        interrupts: signals to send one after the other, each with whether to send it now; asked until it is.
        timeout: seconds, after which the command is killed, and the test fails.
    """
    context = fork_context()
    log = folder / "output.log"
    process = context.Process(target=_main, args=(arguments, str(folder), str(log), dict(os.environ)))
    process.start()
    waiting = list(interrupts)
    deadline = time.monotonic() + timeout
    while process.exitcode is None and time.monotonic() < deadline:
        if waiting and waiting[0][1]():
            assert process.pid is not None
            os.kill(process.pid, waiting.pop(0)[0])
        process.join(0.05)
    output = log.read_text() if log.exists() else ""
    if process.exitcode is None:
        process.kill()
        process.join()
        raise TimeoutError(f"meshwright {' '.join(arguments)} had not ended after {timeout:g} s:\n{output}")
    return Ended(process.exitcode, output)


def _main(arguments: tuple[str, ...], folder: str, log: str, environment: dict[str, str]) -> None:
    """As a shell would start the command."""
    become_program(log)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    sys.argv = ["meshwright", *arguments]
    from meshwright_tools.cli import main

    code = 1
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
