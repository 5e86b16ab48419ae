"""Compares what the ranks see at one path, since hosts without a shared disk may have different files there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from meshwright.checkpoint.files.place import Place
from meshwright.errors import CheckpointError
from meshwright.faults.together import exchange_together

T = TypeVar("T")


def read_same(folder: Place, read: Callable[[], tuple[T, str]]) -> T:
    """Read the same files on all ranks; every rank must make the call.

    Args:
        folder: the folder of the files.
        read: function that returns what it has read, and a digest of that.

    Raises:
        CheckpointError: on every rank, if a file is damaged on one of them, or their digests differ.
    """
    found, digests = exchange_together(read)
    check_same(folder, digests)
    return found


def check_same(folder: Place, digests: list[str]) -> None:
    """Raise a CheckpointError that names the ranks, if they have read other digests in a folder than rank 0."""
    if others := [rank for rank, other in enumerate(digests) if other != digests[0]]:
        raise CheckpointError(
            f"rank(s) {', '.join(map(str, others))} see another checkpoint in {folder} than rank 0; copy one to every "
            "host"
        )
