"""The hub among strangers: who has no token gets little of its time and memory, and no answer."""

from __future__ import annotations

import json
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from meshwright.faults import referee_server
from meshwright.faults.ending import Deadline
from meshwright.faults.link import LONGEST_HELLO, Link
from meshwright.faults.referee_server import STRANGERS, Hub
from meshwright.mesh import process_group
from meshwright.mesh.process_group import listening_address

TOKEN = "a" * 32
MIB = 2**20


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(referee_server, "HELLO_TIME", 1.0)
    hub = Hub("127.0.0.1", name="rank 0", world_size=2, token=TOKEN, timeout=60)
    yield hub
    hub.close("the test ended")


def stranger(hub: Hub) -> socket.socket:
    return socket.create_connection(("127.0.0.1", hub.port), timeout=20)


def link(hub: Hub, rank: int, on_notice: Callable[..., None] = lambda *_, **__: None) -> Link:
    hello = {"token": TOKEN, "rank": rank, "name": f"rank {rank}", "process": None}
    return Link(
        ("127.0.0.1", hub.port), hello, timeout=60, on_beat=lambda: {"status": "idle"}, on_notice=on_notice,
        on_late=lambda _: None, has_passed=lambda _: False, deadline=Deadline(),
    )  # fmt: skip


def is_closed(connection: socket.socket) -> bool:
    """Whether the hub closes a connection without a word."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def agrees(hub: Hub) -> bool:
    """Whether two ranks can still join the hub, and meet."""
    links = [link(hub, rank) for rank in range(2)]
    answers: dict[int, Any] = {}

    def ask(rank: int) -> None:
        question = {"kind": "ask", "key": "k", "what": "w" * 100_000, "note": ""}
        answers[rank] = links[rank].ask(question, patience=20, ranks=(0, 1))

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in links:
        one.tell({"kind": "leave", "how": "done"})
        one.close()
    return answers == {0: {"agreed": True}, 1: {"agreed": True}}


def hello(**changes: Any) -> bytes:
    return (
        json.dumps({"token": TOKEN, "rank": 1, "name": "x", "process": None, "channel": "ask", **changes}).encode()
        + b"\n"
    )


def test_ranks_of_a_hub_that_closes_have_not_died(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(10):  # it depends on which of the hub's tasks runs first
        hub = Hub("127.0.0.1", name="rank 0", world_size=4, token=TOKEN, timeout=60)
        links = [link(hub, rank) for rank in range(4)]
        links[0].tell({"kind": "leave", "how": "its program ended"})
        hub.close("its program ended")
        for one in links:
            one.close()
        assert capsys.readouterr().err == ""


def test_what_rank_0_says_right_before_its_hub_closes_reaches_the_others() -> None:
    causes: queue.Queue[str] = queue.Queue()
    for _ in range(10):
        hub = Hub("127.0.0.1", name="rank 0", world_size=2, token=TOKEN, timeout=60)
        links = [link(hub, 0), link(hub, 1, lambda cause, *_, **__: causes.put(cause))]
        links[0].tell({"kind": "fail", "how": "OSError"})
        hub.close("its program ended")
        assert causes.get(timeout=20) == "rank 0: OSError"
        for one in links:
            one.close()


JUNK: dict[str, bytes] = {
    "bytes": bytes(range(11, 256)) + b"\n",
    "an empty line": b"\n",
    "a list": b"[]\n",
    "a number": b"9" * 4000 + b"\n",
    "a deep list": b"[" * 4000 + b"\n",
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "no token": b"{}\n",
    "another token": hello(token="b" * 32),
    "a list as token": hello(token=[TOKEN]),
    "a token of other letters": hello(token="\ud800" * 32),
    "a rank beyond the world": hello(rank=2),
    "a truth value as rank": hello(rank=True),
    "another channel": hello(channel="both"),
    "a number as name": hello(name=1),
    "a further field": hello(more=1),
    "a token that comes too late": b" " * LONGEST_HELLO + hello(),
}


@pytest.mark.parametrize("name", JUNK)
def test_junk_is_turned_away(name: str, hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    with stranger(hub) as connection, caplog.at_level(logging.ERROR):
        connection.sendall(JUNK[name])
        assert is_closed(connection)
    assert not caplog.records  # an exception in the hub would be logged


def test_who_says_nothing_is_turned_away(hub: Hub) -> None:
    start = time.monotonic()
    with stranger(hub) as silent, stranger(hub) as slow:
        slow.sendall(b'{"token"')
        assert is_closed(silent) and is_closed(slow)
    assert time.monotonic() - start > 0.5
    assert agrees(hub)


def test_a_gigabyte_is_not_held(hub: Hub) -> None:
    before, sent = psutil.Process().memory_info().rss, 0
    connections = [stranger(hub) for _ in range(20)]
    for connection in connections:
        try:
            while sent < 2**30:
                sent += connection.send(b"x" * MIB)
        except ConnectionError:
            continue
        finally:
            connection.close()
    assert sent < 2**29  # the kernel takes some before it learns that nobody reads
    assert psutil.Process().memory_info().rss - before < 64 * MIB
    assert agrees(hub)


def test_strangers_do_not_keep_ranks_out(hub: Hub) -> None:
    strangers = [stranger(hub) for _ in range(300)]
    assert hub._strangers <= STRANGERS + 4
    assert agrees(hub)
    assert all(map(is_closed, strangers))
    for connection in strangers:
        connection.close()


def listeners(port: int) -> list[str]:
    """Return the addresses on which this machine listens on a port, in the kernel's notation."""
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    places = [line[1].rsplit(":", 1) for line in lines if line[3] == "0A"]
    return [address for address, found in places if int(found, 16) == port]


def test_only_the_chosen_interface_listens(hub: Hub) -> None:
    assert listeners(hub.port) == ["0100007F"]


ADDRESSES: dict[str, tuple[dict[str, str], str]] = {
    "one host": ({"MASTER_ADDR": "node7", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, "127.0.0.1"),
    "loopback": ({"MASTER_ADDR": "localhost", "WORLD_SIZE": "4"}, "127.0.0.1"),
    "nothing said": ({}, "127.0.0.1"),
    "an own name that leads to loopback": (
        {"MASTER_ADDR": "own", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
        "0.0.0.0",
    ),
    "an unknown name": ({"MASTER_ADDR": "unknown", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, "0.0.0.0"),
}


@pytest.mark.parametrize("name", ADDRESSES)
def test_the_interface_is_that_of_the_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment, expected = ADDRESSES[name]
    for variable in ("MASTER_ADDR", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)

    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        if host != "own":
            raise socket.gaierror("no such name")
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", port))]

    monkeypatch.setattr(process_group.socket, "getaddrinfo", resolve)
    assert listening_address() == expected
