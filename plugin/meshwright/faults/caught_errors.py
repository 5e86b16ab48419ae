"""Errors that a program catches before it goes on, although the other ranks cannot.

After an error of the guard the ranks are at different places, so the next call into Meshwright ends the process. After
an error of this rank's own forward pass the others may wait for it in this pass; only what follows shows whether all
ranks have raised it.
"""

from __future__ import annotations

import sys
import threading
from typing import TypeVar

from meshwright.errors import DivergenceError, PeerFailedError, PlanError
from meshwright.faults import main_thread
from meshwright.faults.ending import in_short

Error = TypeVar("Error", bound=RuntimeError)


class CaughtErrors:
    """The errors of one rank after which its program may have gone on.

    Attributes:
        of_pass: what the program has caught of its last forward pass, for messages; empty once the ranks agree again.
    """

    def __init__(self) -> None:
        self._first: RuntimeError | None = None
        self.of_pass = ""

    def keep(self, error: Error) -> Error:
        """Remember an error after which the ranks cannot go on together, and return it."""
        self._first = self._first or error
        return error

    def swallowed(self) -> RuntimeError | None:
        """Return the first error of the group, if the program has caught it and gone on.

        Raises:
            RuntimeError: this error, while the program still handles it, as in a ``finally``.
        """
        if self._first is None or threading.current_thread() is not threading.main_thread():
            return None
        if sys.exc_info()[1] is not None:
            raise self._first
        return self._first

    def see_pass(self, error: BaseException | None, step: int) -> bool:
        """Take the error that ends a forward pass; return whether it is one of the program."""
        if error is None or isinstance(error, DivergenceError | PeerFailedError | PlanError):
            return False
        self.of_pass = (
            f"its program caught {in_short(error)}, which the forward pass of step {step} at {main_thread.place()} "
            "raised, and went on: skip a batch on every rank or on none"
        )
        return True


def text_of(error: RuntimeError) -> str:
    """Return what a process says that ends because its program has caught an error of the group."""
    return (
        f"the program caught {type(error).__name__} and went on, but the ranks are no longer at the same place, so "
        "nothing that they compute together would be right. Let this error end the program: catch the classes that "
        f"you expect instead of RuntimeError or Exception. It was:\n{error}"
    )
