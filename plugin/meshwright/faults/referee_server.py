"""The hub: a thread of rank 0 that serves the referee. Every rank has two connections to the hub.

Each message is one line of JSON. The ``ask`` connection carries questions and their answers. The ``watch`` connection
carries heartbeats in both directions, notices to the rank, and the rank's report of its end. When the connection
closes, the process has ended, since the kernel closes connections at once, however the process died.

Anybody who reaches the port can connect. Until a connection has sent the token, it may send a short line only, for a
few seconds, and only so many connections wait at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import secrets
import sys
import threading
import time
from typing import Any

from meshwright.faults.posted import Posted
from meshwright.faults.referee import Post, Referee
from meshwright.faults.siblings import this_process

BEAT = 1.0  # seconds between heartbeats, in both directions
LOOKS = 4  # times per heartbeat that the hub looks for silent ranks
LONGEST_LINE = 2**24  # bytes; a rank's last collectives, with all their shapes, are sent as one line
LONGEST_HELLO = 2**12  # bytes before the token is known; names of hosts and axes are short
HELLO_TIME = 10.0  # seconds for these bytes
LAST_WORDS = 0.05  # seconds in which a hub that closes still passes on what the ranks have said
STRANGERS = 64  # the number of connections that may wait to be known, besides two per rank

logger = logging.getLogger(__name__)


class Hub:
    """Serves the referee to all ranks until closed.

    Args:
        host: the address to listen on; a free port is taken.
        name: the name of rank 0, which the other ranks show if they lose their connection to it.
        world_size: the number of ranks.
        token: the token that a connection must send.
        timeout: the timeout of the Referee.
    """

    def __init__(self, host: str, *, name: str, world_size: int, token: str, timeout: float) -> None:
        self._referee = Referee(timeout)
        self._name = name
        self._token = token
        self._world_size = world_size
        self._strangers = 0  # connections that have not sent the token
        self._writers: dict[tuple[int, str], asyncio.StreamWriter] = {}
        self._closing = ""
        self._has_said = False
        self.posted = Posted(world_size)
        self._loop = asyncio.new_event_loop()
        _allow_open_files(4 * world_size)
        serving = asyncio.start_server(self._serve, host, 0, backlog=STRANGERS + 2 * world_size, limit=LONGEST_HELLO)
        self._server = self._loop.run_until_complete(serving)
        self.port: int = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="meshwright-hub", daemon=True)
        self._thread.start()

    def close(self, how: str) -> None:
        """Tell the other ranks how rank 0 ended, and stop serving."""
        self._closing = how
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=2.0)

    @property
    def sockets(self) -> list[Any]:
        """All open sockets, including the listening socket."""
        connections = [writer.get_extra_info("socket") for writer in list(self._writers.values())]
        return [*self._server.sockets, *connections]

    def _run(self) -> None:
        ticking = self._loop.create_task(self._tick())
        self._loop.run_forever()
        ticking.cancel()
        self._loop.run_until_complete(asyncio.sleep(LAST_WORDS))
        for (_, channel), writer in self._writers.items():
            if channel == "watch":
                _write(writer, {"closed": self._closing})
            writer.transport.close()
        self._server.close()
        # The transports need one turn of the loop to flush and close.
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _tick(self) -> None:
        for look in itertools.count(1):
            await asyncio.sleep(BEAT / LOOKS)
            self._deliver(self._referee.tick(time.monotonic()), says_so=True)
            if look % LOOKS:
                continue
            for (_, channel), writer in list(self._writers.items()):
                if channel == "watch":
                    _write(writer, {})

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = _Lines(reader)
        hello = await self._hello(lines)
        if hello is None:
            writer.transport.abort()
            return
        rank, channel = hello["rank"], hello["channel"]
        lines.longest = LONGEST_LINE
        self._writers[rank, channel] = writer
        if channel == "watch":
            self._referee.join(rank, hello["name"], time.monotonic(), hello["process"])
        _write(writer, {"name": self._name, "process": this_process()})
        while (message := await lines.read()) is not None:
            self._deliver(self._handle(rank, message))
        self._writers.pop((rank, channel), None)
        if channel == "watch" and not self._closing:  # a hub that closes has closed the connection itself
            self._deliver(self._referee.lose(rank), says_so=True)
        writer.transport.close()

    async def _hello(self, lines: _Lines) -> dict[str, Any] | None:
        """Return the first message of a connection; None if it is not that of a rank."""
        if self._strangers >= STRANGERS + 2 * self._world_size:
            return None
        self._strangers += 1
        try:
            async with asyncio.timeout(HELLO_TIME):
                hello = await lines.read()
        except TimeoutError:
            return None
        finally:
            self._strangers -= 1
        return hello if self._is_hello(hello) else None

    def _is_hello(self, hello: dict[str, Any] | None) -> bool:
        return (
            hello is not None
            and hello.keys() == {"token", "rank", "name", "process", "channel"}
            and isinstance(hello["token"], str)
            and secrets.compare_digest(hello["token"].encode(errors="replace"), self._token.encode())
            and type(hello["rank"]) is int
            and 0 <= hello["rank"] < self._world_size
            and isinstance(hello["name"], str)
            and isinstance(hello["process"], dict | None)
            and hello["channel"] in ("ask", "watch")
        )

    def _handle(self, rank: int, message: dict[str, Any]) -> list[Post]:
        now, kind = time.monotonic(), message.pop("kind")
        match kind:
            case "beat":
                self._referee.beat(rank, now=now, **message)
                return []
            case "report":
                return [Post(rank, "answer", self._referee.report(now))]
            case "ask":
                return self._referee.ask(rank, now=now, **message)
            case "receive":
                return self._referee.receive(rank, now=now, **message)
            case "send":
                return self._referee.send(rank, **message)
            case "post":
                self.posted.add(rank, **message)
                return []
            case "leave":
                return self._referee.leave(rank, **message)
            case "fail":
                return self._referee.fail(rank, **message)
        raise AssertionError(f"a message of unknown kind {kind!r}")

    def _deliver(self, posts: list[Post], *, says_so: bool = False) -> None:
        """Send messages. With ``says_so``, also print the first cause: a rank that was lost cannot print its own."""
        if says_so and not self._has_said and any(post.channel == "notice" for post in posts):
            # At once, since a launcher ends this process as soon as it knows of the other one's end.
            print(f"meshwright: {self._referee.first_cause}", file=sys.stderr, flush=True)
            self._has_said = True
        for post in posts:
            writer = self._writers.get((post.rank, "ask" if post.channel == "answer" else "watch"))
            if writer is not None:
                _write(writer, post.body)


class _Lines:
    """The messages of a connection. asyncio's own limit of a line could not be raised once the token is known."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self.longest = LONGEST_HELLO
        self._reader = reader
        self._held = bytearray()

    async def read(self) -> dict[str, Any] | None:
        """Return the next message; None if the connection has ended, or what comes is none."""
        searched = 0
        while (end := self._held.find(b"\n", searched)) < 0:
            searched = len(self._held)
            try:
                part = await self._reader.read(2**16) if searched <= self.longest else b""
            except OSError:
                part = b""
            if not part:
                return None
            self._held += part
        line = bytes(self._held[:end])
        del self._held[: end + 1]
        try:
            message = json.loads(line) if len(line) <= self.longest else None
        except (ValueError, RecursionError):
            return None
        return message if isinstance(message, dict) else None


def _write(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    if not writer.transport.is_closing():
        writer.write(json.dumps(body).encode() + b"\n")


def _allow_open_files(count: int) -> None:
    """Raise the soft limit of open files if it is too low for two connections per rank and the program's own files."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 1024
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
