"""Parses JSON of a checkpoint, which may have been written to fill the memory, to take for ever or to mean two things.

The work is linear in the bytes of the text. Besides the file's own size, parsing takes at most ``MEMORY`` bytes, which
is decided before it begins: by how many values of each kind the text can have at most.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from meshwright.errors import CheckpointError
from meshwright.schema import shown

# Bytes of memory that the values of a text may take, and of the text itself. The count of ``memory_of_json`` is 6 MiB
# for the manifest of a model of 405B parameters with AdamW and master weights.
MEMORY = 48 * 2**20
_SLOT, _NUMBER, _LIST, _TABLE, _MEMBER, _TEXT = 16, 32, 88, 240, 150, 64  # bytes of each in CPython, at most
_DIGITS = 40  # of a number; int() takes quadratic time, and no field has more
_LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (_DIGITS + 1))
_ASTRAL = re.compile(rb"[\xf0-\xff]")  # begins a character of four bytes


def memory_of_json(content: bytes | bytearray) -> int:
    """Return how many bytes of memory the values of a JSON text take at most, beside those of the text itself."""
    commas, lists, tables, members, quotes = (content.count(mark) for mark in b',[{:"')
    texts = quotes // 2
    numbers = max(commas + 1 - texts + members, 0)
    # Python keeps a text in 4 bytes per character if one of them is outside the Basic Multilingual Plane.
    text_width = 1 if content.isascii() else 4 if _ASTRAL.search(content) else 2
    value_width = 7 if b"\\u" in content else text_width  # an escaped character: the text is copied as it grows
    return (
        (commas + lists + tables) * _SLOT + numbers * _NUMBER + lists * _LIST + tables * _TABLE + members * _MEMBER
        + texts * _TEXT + len(content) * (text_width - 1 + value_width)
    )  # fmt: skip


def parse_json(content: bytearray, path: Path, *, allowance: int = 0) -> Any:
    """Return the value of a JSON text, in which NaN and infinities are numbers.

    Args:
        content: the text, in UTF-8; it is emptied, so that it is not in memory twice.
        path: its file, for messages.
        allowance: bytes of memory that the text may take beyond ``MEMORY``.

    Raises:
        CheckpointError: if the text is not JSON, too deep, too large in memory, has a number of more digits than any
            field, or a name twice in one object.
    """
    if (needed := memory_of_json(content)) > MEMORY + allowance:
        raise CheckpointError(
            f"{path} is damaged: its {len(content)} bytes have so many values that they could take {needed >> 20} MiB "
            f"of memory, more than the {MEMORY + allowance >> 20} MiB of any such file; load another checkpoint"
        )
    hooks: dict[str, Any] = {}
    if found := _LONG_NUMBER.search(content):  # perhaps in a text: only then is each number looked at
        end = max(content.rfind(b'":', 0, found.start()), 0)  # of the last name before it
        name = content[content.rfind(b'"', 0, end) + 1 : end].decode(errors="replace")

        def short(digits: str) -> str:
            if len(digits) > _DIGITS:
                raise ValueError(f"it has a number of {len(digits)} characters after {shown(name)}")
            return digits

        hooks = {"parse_int": lambda digits: int(short(digits)), "parse_float": lambda digits: float(short(digits))}
    try:
        text = content.decode()
        content.clear()
        return json.loads(text, object_pairs_hook=_table, **hooks)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: it is not JSON of a checkpoint: {str(error)[:200]}") from error


def _table(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{shown(twice)} is there twice")
    return table
