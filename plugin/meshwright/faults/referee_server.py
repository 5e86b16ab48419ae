"""The hub: a thread of rank 0 that serves the referee. Every rank has two connections to the hub.

Each message is one line of JSON. The ``ask`` connection carries questions and their answers. The ``watch`` connection
carries heartbeats in both directions, notices to the rank, and the rank's report of its end. When the connection
closes, the process has ended, since the kernel closes connections at once, however the process died.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import sys
import threading
import time
from typing import Any

from meshwright.faults.referee import Post, Referee
from meshwright.faults.siblings import this_process

BEAT = 1.0  # seconds between heartbeats, in both directions
LOOKS = 4  # times per heartbeat that the hub looks for silent ranks
LONGEST_LINE = 2**24  # bytes; a rank's last collectives, with all their shapes, are sent as one line

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
        self._writers: dict[tuple[int, str], asyncio.StreamWriter] = {}
        self._closing = ""
        self._has_said = False
        self._loop = asyncio.new_event_loop()
        _allow_open_files(4 * world_size)
        serving = asyncio.start_server(self._serve, host, 0, backlog=2 * world_size, limit=LONGEST_LINE)
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
        hello = await _read(reader)
        if hello is None or hello.get("token") != self._token:
            writer.transport.abort()
            return
        rank, channel = hello["rank"], hello["channel"]
        self._writers[rank, channel] = writer
        if channel == "watch":
            self._referee.join(rank, hello["name"], time.monotonic(), hello["process"])
            _write(writer, {"name": self._name, "process": this_process()})
        while (message := await _read(reader)) is not None:
            self._deliver(self._handle(rank, message))
        self._writers.pop((rank, channel), None)
        if channel == "watch":
            self._deliver(self._referee.lose(rank), says_so=True)
        writer.transport.close()

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


async def _read(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Return the next message, or None if the connection has ended."""
    with contextlib.suppress(OSError, ValueError):
        line = await reader.readline()
        return json.loads(line) if line.endswith(b"\n") else None
    return None


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
