"""What the test process and a worker say to each other, as plain pickles (no tensor in shared memory)."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any


@dataclass(frozen=True)
class Job:
    """One function to call on every rank; ``number`` is unique for the life of a pool."""

    number: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Result:
    """What the function returned on one rank."""

    value: Any


@dataclass(frozen=True)
class Failure:
    """What the function raised on one rank, and when (monotonic seconds, one clock for all processes)."""

    time: float
    type_name: str
    message: str
    traceback: str


def send(connection: Connection, message: object) -> None:
    connection.send_bytes(pickle.dumps(message))


def receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())
