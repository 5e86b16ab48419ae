"""The hub: a thread of rank 0 that serves the referee. Every rank has two connections to the hub.

Each message is one line of JSON. The ``ask`` connection carries questions and their answers. The ``watch`` connection
carries heartbeats in both directions, notices to the rank, and the rank's report of its end. When the connection
closes, the process has ended, since the kernel closes connections at once, however the process died.

Anybody who reaches the port can connect. Until a connection has sent the token, it may send a short line only, for a
few seconds, and the number of such connections is limited.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import threading
import time
from typing import Any

from meshwright.faults.link import Connection, line
from meshwright.faults.referee import Group, Post, Referee
from meshwright.mesh.process_group import listening_address
from meshwright.mesh.siblings import this_process
from meshwright.printable import tell

BEAT = 1.0  # seconds between heartbeats, in both directions
LOOKS = 4  # times per heartbeat that the hub looks for silent ranks
READ = 2**16  # bytes that are received at once
HELLO_TIME = 10.0  # seconds in which a connection has to send the token
LAST_WORDS = 0.05  # seconds in which a hub that closes still passes on what the ranks have said
STRANGERS = 64  # how many unknown connections are kept, in addition to two per rank
NOTHING_NEW = line({})


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
        self._connections: dict[tuple[int, str], Connection] = {}
        self._groups: dict[tuple[int, int], Group] = {}  # the groups that each rank has numbered
        self._received = bytearray(READ)  # what one connection has received, until the next one receives
        self._closing = ""
        self._has_reported = False
        self.posted = Posted(world_size)
        self._texts: dict[str, dict[int, str]] = {}  # texts by topic and rank, until all ranks have said theirs
        self._loop = asyncio.new_event_loop()
        _allow_open_files(4 * world_size)
        backlog = STRANGERS + 2 * world_size
        serving = self._loop.create_server(self._connection, host, 0, backlog=backlog)
        self._server = self._loop.run_until_complete(serving)
        self.port: int = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="meshwright-hub", daemon=True)
        self._thread.start()
        reached = os.environ["MASTER_ADDR"] if host in ("::", "0.0.0.0") else host
        self.address = reached, self.port, token

    @classmethod
    def open(cls, *, name: str, world_size: int, timeout: float) -> Hub:
        """Start a hub where the other hosts reach this one, with a token of its own.

        ``address`` has what a rank needs to connect: host, port and token.
        """
        token = secrets.token_hex(16)
        return cls(listening_address(), name=name, world_size=world_size, token=token, timeout=timeout)

    def _connection(self) -> Connection:
        return Connection(self._received, on_open=self._open, on_message=self._take, on_close=self._close)

    def close(self, how: str) -> None:
        """Tell the other ranks how rank 0 ended, and stop serving."""
        self._closing = how
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=2.0)

    @property
    def sockets(self) -> list[Any]:
        """All open sockets, including the listening socket."""
        connections = [one.transport.get_extra_info("socket") for one in list(self._connections.values())]
        return [*self._server.sockets, *connections]

    def _run(self) -> None:
        ticking = self._loop.create_task(self._tick())
        self._loop.run_forever()
        ticking.cancel()
        self._loop.run_until_complete(asyncio.sleep(LAST_WORDS))
        for connection in self._connections.values():
            if connection.channel == "watch":
                connection.write(line({"closed": self._closing}))
            connection.transport.close()
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
            for connection in list(self._connections.values()):
                if connection.channel == "watch":
                    connection.write(NOTHING_NEW)

    def _open(self, connection: Connection) -> None:
        if self._strangers >= STRANGERS + 2 * self._world_size:
            connection.transport.abort()
            return
        self._strangers += 1
        connection.deadline = self._loop.call_later(HELLO_TIME, connection.transport.abort)

    def _take(self, connection: Connection, message: dict[str, Any]) -> bool:
        """Serve a message; return False if it is that of a stranger without the token."""
        if connection.rank is not None:
            self._deliver(self._handle(connection.rank, message))
            return True
        if not self._is_hello(message):
            return False
        self._end_wait_for_hello(connection)
        connection.is_rank(message["rank"], message["channel"])
        self._connections[message["rank"], connection.channel] = connection
        if connection.channel == "watch":
            self._referee.join(message["rank"], message["name"], time.monotonic(), message["process"])
        connection.write(line({"name": self._name, "process": this_process()}))
        return True

    def _close(self, connection: Connection) -> None:
        self._end_wait_for_hello(connection)
        if connection.rank is None:
            return
        self._connections.pop((connection.rank, connection.channel), None)
        if connection.channel == "watch" and not self._closing:  # a hub that closes has closed the connection itself
            self._deliver(self._referee.lose(connection.rank), says_so=True)

    def _end_wait_for_hello(self, connection: Connection) -> None:
        if connection.deadline is not None:
            connection.deadline.cancel()
            connection.deadline = None
            self._strangers -= 1

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
                return self._referee.report(rank, now, **message)
            case "name":
                return self._rename(rank, message["name"])
            case "ask":
                group = self._groups[rank, message.pop("group")]
                return self._referee.ask(rank, now=now, group=group, **message)
            case "group":
                self._groups[rank, message["number"]] = self._referee.group(message["ranks"])
                return []
            case "receive":
                return self._referee.receive(rank, now=now, **message)
            case "send":
                return self._referee.send(rank, **message)
            case "post":
                self.posted.add(rank, **message)
                return []
            case "say":
                return self._say(rank, **message)
            case "raised":
                return self._referee.raised(rank, **message)
            case "passed":
                return self._referee.passed(rank, **message)
            case "leave":
                return self._referee.leave(rank, **message)
            case "fail":
                return self._referee.fail(rank, **message)
        raise AssertionError(f"a message of unknown kind {kind!r}")

    def _say(self, rank: int, topic: str, text: str) -> list[Post]:
        """Keep a rank's text; once all ranks have said theirs, send them all to each (see every_rank.py)."""
        texts = self._texts.setdefault(topic, {})
        texts[rank] = text
        if len(texts) < self._world_size:
            return []
        everyone = range(self._world_size)
        del self._texts[topic]
        return [Post(tuple(everyone), "notice", {"topic": topic, "texts": [texts[other] for other in everyone]})]

    def _rename(self, rank: int, name: str) -> list[Post]:
        self._referee.rename(rank, name)
        if rank:
            return []
        self._name = name  # the others show it if they lose their connection to the hub
        return [Post(tuple(range(self._world_size)), "notice", {"name": name})]

    def _deliver(self, posts: list[Post], *, says_so: bool = False) -> None:
        """Send messages. With ``says_so``, or for a late rank, also print the first cause: a lost rank cannot."""
        is_news = says_so or any("late" in post.body for post in posts)
        if is_news and not self._has_reported and any("failed" in post.body for post in posts):
            # At once, since a launcher ends this process as soon as it knows of the other one's end.
            tell(self._referee.first_cause)
            self._has_reported = True
        for post in posts:
            text = line(post.body)
            for rank in post.ranks:
                connection = self._connections.get((rank, "ask" if post.channel == "answer" else "watch"))
                if connection is not None:
                    connection.write(text)


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


_KEPT = 64  # topics that wait to be taken; more mean that nobody takes them


class Posted:
    """Collects values by topic and rank; the hub adds, and another thread of rank 0 takes.

    Args:
        world_size: the number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._changed = threading.Condition()
        self._values: dict[str, dict[int, Any]] = {}

    def add(self, rank: int, *, topic: str, value: object) -> None:
        """Add a rank's value."""
        with self._changed:
            self._values.setdefault(topic, {})[rank] = value
            while len(self._values) > _KEPT:
                del self._values[next(iter(self._values))]
            self._changed.notify_all()

    def take(self, topic: str, patience: float) -> dict[int, Any]:
        """Return the values of a topic by rank, when all ranks have added theirs or the patience has ended."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._values.get(topic, ())) == self._world_size, timeout=patience)
            return self._values.pop(topic, {})
