"""One rank's two connections to the hub."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

CONNECT_TIMEOUT = 30.0  # seconds; rank 0 listens before it publishes its address


class Link:
    """Asks the referee, answers the hub's signs of life, and listens to notices.

    Args:
        address: of the hub.
        hello: what the hub wants to know first: token, rank and name.
        timeout: seconds without a sign of life from the hub after which it counts as lost.
        status: what this rank does; the hub asks every second.
        on_notice: called in the listening thread with the text of the first notice, once.
    """

    def __init__(
        self,
        address: tuple[str, int],
        hello: dict[str, Any],
        *,
        timeout: float,
        status: Callable[[], str],
        on_notice: Callable[[str], None],
    ) -> None:
        self._timeout, self._status, self._on_notice = timeout, status, on_notice
        self._lock = threading.Lock()  # of the asking connection, held until the answer
        self._telling = threading.Lock()  # of the watching one, on which the listener beats and the program leaves
        self._closed = False
        self.hub_left: str | None = None
        self._ask = _connect(address, {**hello, "channel": "ask"})
        self._answers = self._ask.makefile("rb")
        self._watch = _connect(address, {**hello, "channel": "watch"})
        self._notices = self._watch.makefile("rb")
        # The hub's first line says that it knows this rank: a question before would come from a stranger.
        greeting = self._notices.readline()
        self.hub_name: str = json.loads(greeting)["name"] if greeting.endswith(b"\n") else "rank 0"
        self._thread = threading.Thread(target=self._listen, name="meshwright-watch", daemon=True)
        self._thread.start()

    def ask(self, message: dict[str, Any], *, patience: float) -> dict[str, Any] | None:
        """Send a question and wait for its answer; None if the hub has not answered or is gone."""
        with self._lock:
            try:
                self._ask.settimeout(patience)
                self._ask.sendall(_line(message))
                line = self._answers.readline()
            except OSError:
                # A late answer must not be taken for that of the next question.
                self._ask.close()
                return None
        return json.loads(line) if line.endswith(b"\n") else None

    def announce(self, message: dict[str, Any]) -> None:
        """Send what needs no answer, in order with the questions."""
        with self._lock, contextlib.suppress(OSError):
            self._ask.sendall(_line(message))

    def tell(self, message: dict[str, Any]) -> None:
        """Send a last word on the watching connection."""
        with self._telling, contextlib.suppress(OSError):
            self._watch.sendall(_line(message))

    def close(self) -> None:
        """End both connections."""
        self._closed = True
        for connection in self.sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    @property
    def sockets(self) -> list[socket.socket]:
        return [self._ask, self._watch]

    def _listen(self) -> None:
        self._watch.settimeout(self._timeout)
        reason = "its process ended without a word (killed, crashed, or os._exit)"
        try:
            while line := self._notices.readline():
                notice = json.loads(line)
                if "failed" in notice:
                    self._on_notice(notice["failed"])
                    return
                if "closed" in notice:
                    self.hub_left = notice["closed"]
                    return
                self.tell({"kind": "beat", "status": self._status()})
        except TimeoutError:
            reason = f"stopped, hung or cut off: not a sign of life for {self._timeout:g} s"
        except (OSError, ValueError):
            pass  # the connection broke: the reason above
        if not self._closed:
            self._on_notice(f"{self.hub_name}: {reason}")


def _connect(address: tuple[str, int], hello: dict[str, Any]) -> socket.socket:
    connection = socket.create_connection(address, timeout=CONNECT_TIMEOUT)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(_line(hello))
    return connection


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
