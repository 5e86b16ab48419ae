"""Exchanges texts of all ranks through the hub, for a thread beside the training.

Collectives of a thread would mix with those of the training, and no longer work after ``destroy_process_group``. The
hub's connections were admitted by its token; torch's store, which anybody who reaches its port can write, is not used.
"""

from __future__ import annotations

import base64
import threading
import time
import zlib
from collections.abc import Callable

from meshwright.errors import PeerFailedError
from meshwright.faults.link import Link

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
