"""Says what each field of a saved file may hold, so that one check names the field whose type or range is wrong.

A check is a function of a value and of the name of its field. Checks are combined like the values themselves:
``table(listed(integer(0, 9)))`` is a table of lists of digits. A file is described by one table of its fields.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import CheckpointError

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
