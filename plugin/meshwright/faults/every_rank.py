"""Calls that every rank must make, points at which all meet only if one wishes it, and the hub's exchange of texts for
them.

Some ranks may make such a call alone, for example a save inside of ``if rank == 0``. The error then names the call, and
says to make it on all ranks. At the points a rank wishes something that all must do together.

Collectives of a thread would mix with those of the training, and no longer work after ``destroy_process_group``. The
hub's connections were admitted by its token; torch's store, which anybody who reaches its port can write, is not used.
"""

from __future__ import annotations

import base64
import functools
import re
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

from meshwright.errors import PeerFailedError
from meshwright.faults.link import Link
from meshwright.faults.referee import WISH

P = ParamSpec("P")
R = TypeVar("R")

EVALUATION = "forward pass in evaluation"
BACKWARD = "gradients"
EPOCH = "beginning of an epoch"
_CALL = re.compile(rf"in ([\w.]+)\(\)|({EVALUATION})|^({BACKWARD}|{EPOCH}),")
# How a rank ended or waits, if that is no consequence of where the program is.
_FAULT = re.compile(r"abruptly|heartbeat|does not answer|Error|Exception|Interrupt|signal")


def on_every_rank(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that every rank must call, whose name is in the messages while a rank waits in it."""

    @functools.wraps(function)
    def named(*args: P.args, **kwargs: P.kwargs) -> R:
        from meshwright.faults.guard import active_guard  # the guard's messages use this module

        guard = active_guard()
        if guard is None or guard.trace.call:
            return function(*args, **kwargs)
        guard.trace.call = f"{function.__name__}()"
        try:
            return function(*args, **kwargs)
        finally:
            guard.trace.call = ""

    return named


_SKIP = "skip a batch on every rank, or on none: `if mw.gather_rows(torch.tensor([skips])).any(): continue`"


def advice(said: Mapping[str, str]) -> list[str]:
    """Return what to change if only some ranks are in a call that every rank must make.

    Args:
        said: what each rank does, by the rank's name.

    Example:
        >>> advice({"rank 0 (host a)": "save, in save_checkpoint()", "rank 1 (host a)": "forward pass, step 3"})
        ['rank 0 alone called save_checkpoint(), which every rank must call: take it out of `if rank == 0:`']
        >>> advice({"rank 0 (host a)": "gradients, step 1", "rank 1 (host a)": "forward pass, step 2"})[0].split(":")[0]
        'rank 0 alone called backward()'
    """
    if any(_FAULT.search(what) for what in said.values()):
        return []
    calls: dict[str, str | None] = {}
    for name, what in said.items():
        found = _CALL.search(what)
        calls[name] = found and found[found.lastindex or 0]
    if len(set(calls.values())) == 1:
        return []
    lines = []
    for call in dict.fromkeys(call for call in calls.values() if call is not None):
        ranks = ", ".join(name.split(" (")[0] for name, theirs in calls.items() if theirs == call)
        if call == EVALUATION:
            lines.append(f"{ranks} alone evaluated the model: evaluate on every rank, not in `if rank == 0:`")
        elif call == BACKWARD:
            lines.append(f"{ranks} alone called backward(): {_SKIP}")
        elif call == EPOCH:
            lines.append(f"{ranks} alone began to iterate: {_SKIP}")
        else:
            lines.append(f"{ranks} alone called {call}(), which every rank must call: take it out of `if rank == 0:`")
    return lines


class Wishes:
    """Counts the points at which all ranks do what one of them asked for.

    The program passes them, and the thread that listens to the hub hears of wishes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0  # the points to which the program has come
        self._waits = False  # whether it waits at the last of them
        self._called = 0  # the last point at which another rank is known to have a wish
        self._met = 0  # the last point at which all ranks have met

    def come(self, has_wishes: bool) -> str | None:
        """Record that the program has come to the next point; return the key of a meeting if it must wait there."""
        with self._lock:
            self._count += 1
            self._waits = has_wishes or self._called > self._met
            return f"{WISH}{self._count}" if self._waits else None

    def meet(self) -> None:
        """Record that all ranks have met at the last point."""
        with self._lock:
            self._met = self._count

    def has_passed(self, key: str) -> bool:
        """Record that another rank waits at a point; return whether the program has gone on from there."""
        point = int(key.removeprefix(WISH))
        with self._lock:
            self._called = max(self._called, point)
            return self._count > point or (self._count == point and not self._waits)


LARGEST = 2**30  # bytes of a text; the texts of the largest models have a few MiB
_LOOKS = 0.1  # seconds between two looks for a rank that has failed


class HubExchange:
    """Exchanges texts of all ranks through the hub, in a thread of each rank.

    Args:
        link: this rank's connections to the hub.
        rank: this rank.
        topic: a name, the same on all ranks and used once.
        cause: function that returns why another rank has failed; None while none has.
        patience: seconds that a rank whose program has ended waits for another one.

    Attributes:
        is_waiting: whether this rank waits for another one.
        count: the number of exchanges that are complete.
    """

    def __init__(self, link: Link, rank: int, *, topic: str, cause: Callable[[], str | None], patience: float):
        self.rank = rank
        self.is_waiting = False
        self.count = 0
        self._link, self._topic, self._cause, self._patience = link, topic, cause, patience
        self._error: Exception | None = None
        link.begin(topic)

    def texts_of_all(self, text: str) -> list[str]:
        """Return the text of every rank, in their order; every rank must make the call.

        Raises:
            PeerFailedError: if another rank has failed, or has left the hub.
            TimeoutError: if the program has ended on this rank, and another rank does not answer.
        """
        if self._error is not None:
            raise self._error
        self._say(self.count, text)
        texts = self._wait(self.count)
        self.count += 1
        return texts

    def text_of_first(self, text: str) -> str:
        """Return rank 0's text on every rank; every rank must make the call, and may raise as :meth:`texts_of_all`."""
        return self.texts_of_all(text if self.rank == 0 else "")[0]

    def fail(self, error: Exception, text: str) -> None:
        """Answer the other ranks in the place of this rank's thread, which hangs.

        Args:
            error: what the thread gets if it goes on.
            text: what the others get.
        """
        self._error = error
        self._say(self.count, text)
        self._say("end", "")
        self._link.end(self._topic)

    def close(self) -> None:
        """Let rank 0, whose process has the hub, go on after the others have read the last texts.

        Raises:
            PeerFailedError, TimeoutError: as :meth:`texts_of_all`.
        """
        try:
            if self._error is None:
                self._say("end", "")
                if self.rank == 0:
                    self._wait("end")
        finally:
            self._link.end(self._topic)

    def _say(self, number: int | str, text: str) -> None:
        packed = base64.b64encode(zlib.compress(text.encode(), level=1)).decode()
        self._link.tell({"kind": "say", "topic": f"{self._topic}/{number}", "text": packed})

    def _wait(self, number: int | str) -> list[str]:
        topic, alone_since = f"{self._topic}/{number}", None
        self.is_waiting = True
        try:
            while (texts := self._link.said(topic, _LOOKS)) is None:
                if (cause := self._cause() or self._link.hub_left) is not None:
                    raise PeerFailedError(f"rank {self.rank} cannot go on with a save in the background: {cause}")
                if not threading.main_thread().is_alive():
                    alone_since = alone_since or time.monotonic()
                    if time.monotonic() - alone_since > self._patience:
                        raise TimeoutError(
                            f"another rank did not answer within {self._patience:g} s of the end of the program"
                        )
        finally:
            self.is_waiting = False
        return [_unpacked(text) for text in texts]


class OneRank:
    """Exchanges texts where there is one rank."""

    rank, is_waiting = 0, False

    def __init__(self) -> None:
        self.count = 0

    def texts_of_all(self, text: str) -> list[str]:
        """Return the text."""
        self.count += 1
        return [text]

    def text_of_first(self, text: str) -> str:
        """Return the text."""
        self.count += 1
        return text

    def fail(self, error: Exception, text: str) -> None:
        """Do nothing: no other rank waits."""

    def close(self) -> None:
        """Do nothing."""


def _unpacked(text: str) -> str:
    unpacking = zlib.decompressobj()
    found = unpacking.decompress(base64.b64decode(text), LARGEST)
    if unpacking.unconsumed_tail:
        raise PeerFailedError(f"a rank has sent a text of more than {LARGEST} bytes, which no save has")
    return found.decode()
