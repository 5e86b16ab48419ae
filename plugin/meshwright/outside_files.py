"""Reads files from outside, which may have been written to fill the memory, to take for ever or to mean two things.

The work is linear in the bytes of the text. Besides the file's own size, parsing takes at most ``MEMORY`` bytes, which
is decided before it begins: by how many values of each kind the text can have at most.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from typing import Any, ClassVar

import yaml

from meshwright.schema import shown


class OddFileError(ValueError):
    """Raised if a file is not what its reader takes; the text is a clause that says what is odd."""


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


def parse_json(content: bytearray, *, allowance: int = 0, takes_last: bool = False) -> Any:
    """Return the value of a JSON text, in which NaN and infinities are numbers.

    Args:
        content: the text, in UTF-8; it is emptied, so that it is not in memory twice.
        allowance: bytes of memory that the text may take beyond ``MEMORY``.
        takes_last: whether the last value counts of a name that is twice in one object, as for other readers of JSON.

    Raises:
        OddFileError: if the text is not JSON, too deep, too large in memory, has a number of more digits than any
            field, or a name twice in one object, unless ``takes_last``.
    """
    if (needed := memory_of_json(content)) > MEMORY + allowance:
        raise OddFileError(
            f"its {len(content)} bytes have so many values that they could take {needed >> 20} MiB of memory, more "
            f"than the {MEMORY + allowance >> 20} MiB of any such file"
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
        return json.loads(text, object_pairs_hook=None if takes_last else _table, **hooks)
    except (ValueError, RecursionError) as error:
        raise OddFileError(f"it is not JSON: {str(error)[:200]}") from error


def read_outside(path: str | os.PathLike[str], *, most: int) -> bytearray:
    """Return the bytes of a file that people name.

    Args:
        path: the file, which may be a link.
        most: the largest size in bytes of such a file.

    Raises:
        OddFileError: if it is larger.
        OSError: if it cannot be read.
    """
    with open(path, "rb") as file:
        content = bytearray(file.read(most + 1))
    if len(content) > most:
        raise OddFileError(f"it has more than {most} bytes, which no such file has")
    return content


def read_json(path: str | os.PathLike[str], *, most: int = MEMORY, takes_last: bool = False) -> Any:
    """Return the value of a file of JSON that people name; it may raise as the functions above."""
    return parse_json(read_outside(path, most=most), takes_last=takes_last)


class _PlainLoader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads YAML whose values are those of JSON: no references to other values, dates or numbers to base 60."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":bool", ":null"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) or getattr(event, "tag", None):
            raise yaml.MarkedYAMLError(
                problem="it has a reference or a tag (&, * or !), which no such file needs",
                problem_mark=event.start_mark,
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len(set(names)) < len(names):
            ((twice, _),) = Counter(names).most_common(1)
            raise yaml.MarkedYAMLError(problem=f"{shown(twice)} is there twice", problem_mark=node.start_mark)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


# The numbers of JSON, in as many digits as any field has; what looks otherwise is a text.
_NUMBERS = {"int": "-?(0|[1-9][0-9]{0,17})", "float": r"-?[0-9]{1,18}(\.[0-9]{1,18})?([eE][-+]?[0-9]{1,3})?"}
for _kind, _form in _NUMBERS.items():
    _PlainLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(f"^({_form})$"), list("-0123456789"))


def parse_yaml(content: bytearray | str) -> Any:
    """Return the value of a YAML text whose values are those of JSON.

    Raises:
        OddFileError: if it is anything else; it says in which line.
    """
    try:
        text = content if isinstance(content, str) else content.decode()
        return yaml.load(text, Loader=_PlainLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark is not None else ""
        raise OddFileError(f"{line}{str(getattr(error, 'problem', None) or error)[:200]}") from None
    except (ValueError, RecursionError) as error:
        raise OddFileError(f"it is not YAML of such a file: {str(error)[:200]}") from None


def _table(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{shown(twice)} is there twice")
    return table
