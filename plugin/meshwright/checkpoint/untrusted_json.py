"""Parses JSON of a checkpoint, which may have been written to fill the memory or to mean two things."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshwright.errors import CheckpointError

MAX_BYTES = 2**30  # of a file of JSON
_MAX_VALUES = 2**23  # an empty list of two bytes takes 64 bytes of memory
LARGEST = 2**60  # no size or position in a checkpoint is larger


def parse_json(content: bytes | bytearray, path: Path, *, has_nan: bool = False) -> Any:
    """Return the value of a JSON text.

    Args:
        content: the text, in UTF-8.
        path: its file, for messages.
        has_nan: whether NaN and infinities are numbers.

    Raises:
        CheckpointError: if the text is not JSON, too deep, has too many values, or a name twice in one object.
    """
    if sum(content.count(mark) for mark in b",[{") > _MAX_VALUES:
        raise CheckpointError(f"{path} is damaged: it has more than {_MAX_VALUES:,} values; load another checkpoint")
    try:
        return json.loads(content, object_pairs_hook=_table, parse_constant=None if has_nan else _refused)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: it is not JSON of a checkpoint: {str(error)[:200]}") from error


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in table if names.count(name) > 1)
        raise ValueError(f"{twice[:100]!r} is there twice")
    return table


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is not a number")
