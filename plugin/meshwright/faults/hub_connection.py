"""One connection to the hub: lines of JSON in both directions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

LONGEST_LINE = 2**24  # bytes; a rank's last collectives, with all their shapes, are sent as one line
LONGEST_HELLO = 2**12  # bytes of a line before the token is checked; names of hosts and axes are short


class Connection(asyncio.BufferedProtocol):
    """A connection, whose process is unknown until ``is_rank`` names its rank.

    This is an asyncio protocol, since asyncio's streams take twice the time per message.

    Args:
        received: the buffer into which data is received. All connections of a hub share it.
        on_open: a function called with the connection when it opens.
        on_message: a function called with the connection and each message; returns whether to keep the connection.
        on_close: a function called with the connection when it has closed.
    """

    transport: asyncio.Transport

    def __init__(
        self,
        received: bytearray,
        *,
        on_open: Callable[[Connection], None],
        on_message: Callable[[Connection, dict[str, Any]], bool],
        on_close: Callable[[Connection], None],
    ) -> None:
        self.rank: int | None = None
        self.channel = ""
        self.deadline: asyncio.TimerHandle | None = None  # ends a stranger's connection
        self._longest = LONGEST_HELLO
        self._received = received
        self._held = bytearray()  # the beginning of a message
        self._on_open, self._on_message, self._on_close = on_open, on_message, on_close

    def is_rank(self, rank: int, channel: str) -> None:
        """Make this the connection of a rank."""
        self.rank, self.channel, self._longest = rank, channel, LONGEST_LINE

    def write(self, line: bytes) -> None:
        """Send a line, unless the connection closes."""
        if not self.transport.is_closing():
            self.transport.write(line)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._on_open(self)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._received

    def buffer_updated(self, nbytes: int) -> None:
        with memoryview(self._received) as received:
            *ends, rest = bytes(received[:nbytes]).split(b"\n")
        for end in ends:
            self._held += end
            message = _message(self._held) if len(self._held) <= self._longest else None
            self._held.clear()
            if message is None or not self._on_message(self, message):
                self.transport.abort()
                return
        self._held += rest
        if len(self._held) > self._longest:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_close(self)


def line(body: dict[str, Any]) -> bytes:
    """Return a message as it is sent."""
    return json.dumps(body).encode() + b"\n"


def _message(text: bytearray) -> dict[str, Any] | None:
    """Return a received line as a message; None if it is malformed."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None
