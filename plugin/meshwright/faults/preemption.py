"""Ranks that save after the same step and end, once a scheduler has announced the end of the job by a signal."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Collection
from types import FrameType
from typing import NoReturn

import torch.distributed as dist

from meshwright.faults.guard import active_guard
from meshwright.printable import tell
from meshwright.progress import is_first_rank

PREEMPTED = 75  # EX_TEMPFAIL of <sysexits.h>: the job has saved, and wants to be started again
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

_heard: dict[signal.Signals, str | None] = {}  # what each signal that this process listens to has announced


def listen(signals: Collection[signal.Signals] = SIGNALS) -> None:
    """Remember these signals from now on, instead of ending at them; for the main thread of a process.

    A program whose training runs in another thread, as under Ray Train, calls this when its process starts.
    """
    for number in signals:
        if number not in _heard:
            _heard[number] = None
            signal.signal(number, _remember)
    # The launcher lets SIGUSR1 wait while a process imports its modules, since it would end it.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


def _remember(number: int, frame: FrameType | None) -> None:
    received = signal.Signals(number)
    _heard[received] = f"{received.name} to rank {os.environ.get('RANK', 0)} on {socket.gethostname()}"


class Preemption:
    """Tells every rank after which step to save and to end, once a signal has reached any of them.

    A scheduler announces the end of a job by a signal, which reaches the ranks at different times, or one of them
    alone. The ranks agree on the step through the connection of their guard: steps without a signal cost no message.

    Args:
        signals: the signals that announce the end. From now on they no longer end this process.

    Raises:
        ValueError: if another thread than the main thread is the first to listen to a signal.

    Example::

        preemption = mw.Preemption()
        for step, batch in enumerate(loader, start=1):
            ...
            if preemption.is_due():
                mw.save_checkpoint("runs/last", model, optimizer, loader=loader, step=step)
                preemption.leave()
    """

    def __init__(self, signals: Collection[signal.Signals] = SIGNALS) -> None:
        self._signals = tuple(signal.Signals(number) for number in signals)
        self.reason: str | None = None  # a signal and the rank that got it, once it is due
        unheard = [number.name for number in self._signals if number not in _heard]
        if not unheard or threading.current_thread() is threading.main_thread():
            listen(self._signals)
        else:
            raise ValueError(
                f"Preemption() is made in a thread, but a process can listen to {', '.join(unheard)} only in its main "
                "thread; make it there, or call meshwright.faults.preemption.listen() there first"
            )

    @property
    def wishes(self) -> set[str]:
        """The signals that this rank has got."""
        return {text for number in self._signals if (text := _heard[number]) is not None}

    def is_due(self) -> bool:
        """Return, alike on every rank, whether to save and to end now; every rank asks after each step.

        Raises:
            RuntimeError: if there are several ranks that could not agree, since ``to_distributed`` was not called.
        """
        guard = active_guard()
        if guard is None:
            if dist.is_initialized() and dist.get_world_size() > 1:
                raise RuntimeError(
                    f"Preemption.is_due() is called on {dist.get_world_size()} ranks before they can agree; call "
                    "meshwright.to_distributed(model, optimizer, loader) first"
                )
            return self.settle(self.wishes)
        return self.settle(guard.wishes_of_all(self.wishes))

    def settle(self, agreed: Collection[str] | None) -> bool:
        """Take what the ranks agreed on: their wishes, or None if others have gone on; return whether it is due."""
        if agreed and self.reason is None:
            first, *others = sorted(agreed)
            self.reason = first + (f" and {len(others)} more signal(s)" if others else "")
        return self.reason is not None

    def leave(self) -> NoReturn:
        """End this process with exit code 75, for which the launcher and the schedulers start the job again."""
        if is_first_rank():
            why = self.reason or "the program's own wish"
            tell(f"preempted by {why}; ends with exit code {PREEMPTED}")
        raise SystemExit(PREEMPTED)  # not sys.exit, which the guard would take for a failure
