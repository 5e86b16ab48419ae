"""Ends this process from a thread beside the program, whatever the program does."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from meshwright.faults import ending
from meshwright.faults.ending import Deadline
from meshwright.printable import tell

SPEAKS = 1.0  # seconds in which the process can print; its program may hold the lock of the stream
MARGIN = 0.5  # seconds for the rest


def end_process(
    text: str, deadline: Deadline, last: Callable[[], None], error: BaseException | None = None
) -> NoReturn:
    """End this process with exit code 1.

    Args:
        text: what to print; empty for nothing.
        deadline: this process's deadline, for the case that a part of its end hangs too.
        last: a function to call after the text was printed.
        error: the cause, for launchers that show it.
    """
    deadline.set(SPEAKS + MARGIN)

    def speak() -> None:
        if text:
            tell(text)
        if error is not None:
            ending.tell_launcher(error)
        sys.stdout.flush()

    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    speaker.join(SPEAKS)
    last()
    end_children()
    os._exit(1)


def end_children() -> None:
    """Kill this process's daemons, such as a loader's workers: a stopped one would live on, or be waited for."""
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
