"""Reads, checks and writes files that other programs and people touch. Reading takes bounded memory, and writing is
whole or not at all.

The work is linear in the bytes of the text. Besides the file's own size, parsing takes at most ``MEMORY`` bytes, which
is decided before it begins: by how many values of each kind the text can have at most.

A check is a function of a value and of the name of its field. Checks are combined like the values themselves:
``table(listed(integer(0, 9)))`` is a table of lists of digits. A file is described by one table of its fields.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

import yaml

from meshwright.errors import CheckpointError, PlanError

Check = Callable[[Any, str], None]

LARGEST = 2**60  # no size or position in a checkpoint is larger
LARGEST_COUNT = (
    2**53
)  # no number of steps, samples or epochs is larger; JSON readers of other languages know it exactly


class _WrongFieldError(Exception):
    """A field has a wrong value; the text says which, and what it must be."""


def require(value: object, check: Check, where: str | Path) -> None:
    """Check a value that was read from a file.

    Args:
        value: the value.
        check: what it must be.
        where: the file, for the message.

    Raises:
        CheckpointError: if it is something else; the message names the file and the field.
    """
    if (wrong := problem_of(value, check)) is not None:
        raise CheckpointError(f"{where} is damaged: {wrong}; load another checkpoint")


def problem_of(value: object, check: Check) -> str | None:
    """Return what is wrong with a value that was read from a file, with the name of the field; None if nothing is."""
    try:
        check(value, "")
    except _WrongFieldError as error:
        return str(error)
    except RecursionError:
        return "its values are nested too deeply"
    return None


def shown(value: object) -> str:
    """Return a short text of a value, however large it is."""
    if isinstance(value, dict | list | tuple):
        return f"a {'table' if isinstance(value, dict) else 'list'} of {len(value)}"
    return repr(value[:100] if isinstance(value, str) else value)[:100]


def _wrong(field: str, value: object, expected: str) -> _WrongFieldError:
    return _WrongFieldError(f"{field or 'it'} is {shown(value)}, and must be {expected}")


def _of(field: str, name: object) -> str:
    return f"{field}[{shown(name)}]" if field else shown(name)


def that(expected: str, is_right: Callable[[Any], bool]) -> Check:
    """Return a check by a function; ``expected`` describes what it accepts."""

    def check(value: object, field: str) -> None:
        if not is_right(value):
            raise _wrong(field, value, expected)

    return check


def integer(low: int = 0, high: int = LARGEST_COUNT) -> Check:
    """A whole number, and no truth value."""
    return that(f"a whole number from {low} to {high}", lambda value: type(value) is int and low <= value <= high)


def number(low: float = -math.inf, high: float = math.inf, *, is_finite: bool = True) -> Check:
    """A number, and no truth value."""

    def is_right(value: Any) -> bool:
        return type(value) in (int, float) and ((low <= value <= high and abs(value) < math.inf) or not is_finite)

    limits = "" if low == -math.inf and high == math.inf else f" from {low:g} to {high:g}"
    return that(f"a {'finite ' if is_finite else ''}number{limits}", is_right)


def text(pattern: str = "", *, most: int = 2**20, what: str = "") -> Check:
    """A text of Unicode characters that matches a pattern; ``what`` describes it."""
    form = re.compile(pattern, re.DOTALL) if pattern else None

    def is_right(value: object) -> bool:
        if not isinstance(value, str) or len(value) > most or (form is not None and not form.fullmatch(value)):
            return False
        return value.isascii() or not _SURROGATE.search(value)

    form_text = f"a text of the form {pattern}" if pattern else f"a text of at most {most} characters"
    return that(what or form_text, is_right)


_SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, which no file name, terminal or log can hold
NAME = text("(?!__.*__$).+", most=4096, what="a name")  # of a tensor, a parameter, a state or an option

boolean = that("true or false", lambda value: type(value) is bool)
anything = that("", lambda value: True)


def is_same(value: object, expected: object) -> bool:
    """Whether two values are equal; a truth value is no number."""
    return isinstance(value, bool) == isinstance(expected, bool) and bool(value == expected)


def equal(expected: object) -> Check:
    """This very value."""
    return that(repr(expected), lambda value: is_same(value, expected))


def one_of(values: Collection[str]) -> Check:
    """One of some texts."""
    return that(f"one of {', '.join(values)}", lambda value: isinstance(value, str) and value in values)


def maybe(check: Check) -> Check:
    """None, or what a check accepts."""

    def check_value(value: object, field: str) -> None:
        if value is not None:
            check(value, field)

    return check_value


def listed(item: Check, *, least: int = 0, most: float = math.inf) -> Check:
    """A list."""

    def check(value: object, field: str) -> None:
        if not isinstance(value, list) or not least <= len(value) <= most:
            raise _wrong(field, value, f"a list of {least} to {most} values")
        for index, element in enumerate(value):
            item(element, f"{field}[{index}]")

    return check


def row(*items: Check) -> Check:
    """A list of as many values as there are checks."""

    def check(value: object, field: str) -> None:
        if not isinstance(value, list) or len(value) != len(items):
            raise _wrong(field, value, f"a list of {len(items)} values")
        for index, (item, element) in enumerate(zip(items, value, strict=True)):
            item(element, f"{field}[{index}]")

    return check


def table(item: Check, *, names: Check = NAME) -> Check:
    """A table of any names."""

    def check(value: object, field: str) -> None:
        if not isinstance(value, dict):
            raise _wrong(field, value, "a table")
        for name, element in value.items():
            names(name, f"a name in {field or 'it'}")
            item(element, _of(field, name))

    return check


def record(required: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    """A table of these names, of which it may lack ``optional`` ones."""
    known = {**required, **(optional or {})}

    def check(value: object, field: str) -> None:
        if not isinstance(value, dict):
            raise _wrong(field, value, "a table")
        what = field or "it"
        unknown, missing = sorted(value.keys() - known.keys()), sorted(required.keys() - value.keys())
        problems = [f"has unknown fields: {', '.join(map(_plain, unknown[:5]))}"] if unknown else []
        problems += [f"lacks {', '.join(missing)}"] if missing else []
        if problems:
            raise _WrongFieldError(f"{what} {' and '.join(problems)}")
        for name, item in known.items():
            if name in value:
                item(value[name], _of(field, name))

    return check


def holding(known: Mapping[str, Check]) -> Check:
    """A table in which these names, where it has them and they are not None, hold what their checks accept."""

    def check(value: object, field: str) -> None:
        if not isinstance(value, dict):
            raise _wrong(field, value, "a table")
        for name in value.keys() & known.keys():
            if value[name] is not None:
                known[name](value[name], _of(field, name))

    return check


def _plain(name: str) -> str:
    return name if name.isidentifier() and len(name) < 100 else shown(name)


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


def write_whole(path: str | os.PathLike[str], content: str, *, option: str) -> None:
    """Write a file in one step, so that a full disk or a kill leaves what was there; its rights follow the umask.

    A link stays, and the file behind it is replaced. What is no file, such as /dev/stdout, is written directly.

    Args:
        path: the file.
        content: its text.
        option: what has named the file, for the error.

    Raises:
        PlanError: if the file cannot be written; an older one is then whole.

    Example::

        write_whole("plan.yaml", "dp: 2\\n", option="--save")
    """
    place = Path(os.path.realpath(path))
    try:
        if place.exists() and not stat.S_ISREG(place.stat().st_mode):
            place.write_text(content, encoding="utf-8")
            return
        draft = place.with_name(f".{place.name[:100]}.{uuid.uuid4().hex[:8]}")
        try:
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "w", encoding="utf-8") as file:
                file.write(content)
            os.replace(draft, place)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
    except OSError as error:
        kept = "; the file that was there is whole" if place.is_file() else ""
        raise PlanError(
            f"{option} {path} cannot be written ({error.strerror or error}){kept}. Name another file, or free space"
        ) from None
