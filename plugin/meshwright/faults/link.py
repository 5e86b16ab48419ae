"""The connections between the ranks and the hub, which carry lines of JSON in both directions.

Each rank has two of them, in its ``Link``. A ``Connection`` is the hub's end of one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, BinaryIO, Protocol

from meshwright.faults.ending import Deadline, waits_for_ranks

CONNECT_TIMEOUT = 30.0  # seconds at most; enough, since rank 0 listens before it publishes its address
OVERDUE = 1.5  # seconds by which a rank that cannot hear the hub lives longer than the hub waits for it
RETRY = 0.2  # seconds until the next try, if unknown connections have filled the hub
LONGEST_LINE = 2**24  # bytes; a rank's last collectives, with all their shapes, are sent as one line
LONGEST_HELLO = 2**12  # bytes of a line before the token is checked; names of hosts and axes are short


class OnNotice(Protocol):
    """The type of a function that is called with the first notice."""

    def __call__(self, cause: str, silent: list[Any], *, from_hub: bool) -> None: ...


class Link:
    """Asks the referee, answers the hub's heartbeats, and listens for notices.

    Args:
        address: the hub's address.
        hello: the first message to the hub: token, rank and name.
        timeout: the seconds without a heartbeat from the hub after which the hub counts as lost.
        on_beat: a function called at each heartbeat of the hub, every second; returns the rank's own.
        on_notice: a function called once, in the listening thread, with the text of the first notice, the processes of
            ranks that do not answer, and whether the notice came from the hub.
        has_passed: a function called with the key of a meeting that another rank has called; returns whether this rank
            is past it.
        deadline: this process's deadline, which each heartbeat of the hub moves.
        on_late: a function called, in place of ``on_notice``, if the other ranks have given up waiting for this one.
    """

    def __init__(
        self,
        address: tuple[str, int],
        hello: dict[str, Any],
        *,
        timeout: float,
        on_beat: Callable[[], dict[str, Any]],
        on_notice: OnNotice,
        on_late: Callable[[str], None],
        has_passed: Callable[[str], bool],
        deadline: Deadline,
    ) -> None:
        self._has_passed = has_passed
        self._deadline = deadline
        self._timeout, self._on_beat, self._on_notice, self._on_late = timeout, on_beat, on_notice, on_late
        self._lock = threading.Lock()  # for the ask connection; held until the answer arrives
        self._telling = threading.Lock()  # for the watch connection: the listener and the program write to it
        self._groups: dict[tuple[int, ...], int] = {}  # groups of ranks -> the number that the hub knows
        self._closed = False
        self.hub_left: str | None = None
        self._texts: dict[str, list[str]] = {}  # what all ranks have said, by topic, until it is read
        self._exchanges: set[str] = set()  # those that a thread of this rank has begun and not ended
        self._has_texts = threading.Condition()  # also of the end of an exchange
        self._ask, self._answers, _ = _connect(address, {**hello, "channel": "ask"}, timeout)
        self._watch, self._notices, hub = _connect(address, {**hello, "channel": "watch"}, timeout)
        self.hub_name = str(hub["name"])
        self._hub_process = hub["process"]
        self._thread = threading.Thread(target=self._listen, name="meshwright-watch", daemon=True)
        self._thread.start()

    @waits_for_ranks
    def ask(
        self, message: dict[str, Any], *, patience: float, ranks: tuple[int, ...] | None = None
    ) -> dict[str, Any] | None:
        """Send a question and return its answer, or None if the hub does not answer in time or is gone.

        Args:
            message: the question.
            patience: the seconds to wait for the answer.
            ranks: the ranks whom the question concerns. The hub gets them once, and their number in each question.
        """
        with self._lock:
            text = b""
            if ranks is not None:
                if ranks not in self._groups:
                    self._groups[ranks] = len(self._groups)
                    text = line({"kind": "group", "number": self._groups[ranks], "ranks": ranks})
                message = {**message, "group": self._groups[ranks]}
            try:
                self._ask.settimeout(patience)
                self._ask.sendall(text + line(message))
                answer = self._answers.readline()
            except OSError:
                # A late answer must not be read as the next question's answer.
                self._ask.close()
                return None
        return json.loads(answer) if answer.endswith(b"\n") else None

    def announce(self, message: dict[str, Any]) -> None:
        """Send a message that needs no answer, in order with the questions."""
        with self._lock, contextlib.suppress(OSError):
            self._ask.sendall(line(message))

    def tell(self, message: dict[str, Any]) -> None:
        """Send a message on the watch connection."""
        with self._telling, contextlib.suppress(OSError):
            self._watch.sendall(line(message))

    def begin(self, exchange: str) -> None:
        """Record that a thread exchanges texts, by the beginning of its topics."""
        with self._has_texts:
            self._exchanges.add(exchange)

    def end(self, exchange: str) -> None:
        """Record that a thread has ended its exchange."""
        with self._has_texts:
            self._exchanges.discard(exchange)
            self._has_texts.notify_all()

    def await_exchanges(self) -> None:
        """Wait for the threads that exchange texts, as long as the hub is there; each ends itself if it hangs."""
        with self._has_texts:
            while self._exchanges and self.hub_left is None:
                self._has_texts.wait(timeout=1.0)

    def texts_on(self, topic: str, patience: float) -> list[str] | None:
        """Return what all ranks have said on a topic, once, or None if that does not come within some seconds."""
        with self._has_texts:
            self._has_texts.wait_for(lambda: topic in self._texts, timeout=patience)
            return self._texts.pop(topic, None)

    def close(self) -> None:
        """Close both connections."""
        self._closed = True
        self.hub_left = self.hub_left or "its process group has ended"
        self._deadline.set(None)
        for connection in self.sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    @property
    def sockets(self) -> list[socket.socket]:
        return [self._ask, self._watch]

    def _listen(self) -> None:
        self._watch.settimeout(self._timeout)
        reason, silent = "its process ended abruptly (killed, crashed, or os._exit)", []
        try:
            while text := self._notices.readline():
                self._deadline.set(self._timeout + OVERDUE)
                notice = json.loads(text)
                if "failed" in notice:
                    self._on_notice(notice["failed"], notice["silent"], from_hub=True)
                    return
                if "late" in notice:
                    self._on_late(notice["late"])
                    return
                if "closed" in notice:
                    self.hub_left = notice["closed"]
                    self._deadline.set(None)
                    return
                if "texts" in notice:
                    with self._has_texts:
                        self._texts[notice["topic"]] = notice["texts"]
                        self._has_texts.notify_all()
                if "wish" in notice and self._has_passed(notice["wish"]):
                    self.tell({"kind": "passed", "key": notice["wish"]})
                self.hub_name = notice.get("name", self.hub_name)
                self.tell({"kind": "beat", **self._on_beat()})
        except TimeoutError:
            reason, silent = f"stopped, hung or cut off: no heartbeat for {self._timeout:g} s", [self._hub_process]
        except (OSError, ValueError):
            pass  # the connection broke, for the reason that is set above
        if not self._closed:
            self._on_notice(f"{self.hub_name}: {reason}", silent, from_hub=False)


def _connect(
    address: tuple[str, int], hello: dict[str, Any], timeout: float
) -> tuple[socket.socket, BinaryIO, dict[str, Any]]:
    """Connect to the hub; return the connection, a file of what the hub sends, and the hub's greeting.

    The hub's first line says that it knows this rank, which must precede the first question.

    Raises:
        TimeoutError: if rank 0 does not answer within the timeout, or within ``CONNECT_TIMEOUT`` if that is shorter.
    """
    timeout = min(timeout, CONNECT_TIMEOUT)
    deadline = time.monotonic() + timeout
    while True:
        connection = socket.create_connection(address, timeout=timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        lines = connection.makefile("rb")
        greeting = b""
        with contextlib.suppress(ConnectionError):
            connection.sendall(line(hello))
            greeting = lines.readline()
        if greeting.endswith(b"\n"):
            return connection, lines, json.loads(greeting)
        connection.close()
        if time.monotonic() > deadline:
            return connection, lines, {"name": "rank 0", "process": None}  # the first question finds that it has ended
        time.sleep(RETRY)


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
