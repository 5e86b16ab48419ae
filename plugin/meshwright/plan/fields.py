"""Checks for the fields of configuration dataclasses. The error for a wrong name or type says what to write."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from meshwright.errors import PlanError

C = TypeVar("C", bound=Callable[..., Any])
R = TypeVar("R")


def nearest(name: str, known: Collection[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known name closest to a misspelt one; None if none is close.

    Example:
        >>> nearest("sequence_paralel", ["sequence_parallel", "tp"])
        'sequence_parallel'
    """
    close = difflib.get_close_matches(name.lower().replace("-", "_"), list(known), n=1, cutoff=cutoff)
    return close[0] if close else None


def unknown_field(
    owner: str, name: object, known: Sequence[str], elsewhere: Mapping[str, str] | None = None, *, kind: str = "field"
) -> str:
    """Return the message for a field or argument that does not exist, with what to write instead.

    Args:
        owner: name of the class that has the fields, for example "ParallelPlan".
        name: the field that does not exist.
        known: the fields that exist.
        elsewhere: name in another framework -> what to write here.
        kind: "field", or "argument" of a function.
    """
    text = str(name)
    instead = (elsewhere or {}).get(text.lower().replace("-", "_")) or nearest(text, known)
    cure = "remove it" if not instead else instead if instead.startswith("leave it out") else f"write {instead}"
    return f"{owner} has no {kind} {name!r}; {cure}. Its {kind}s are {', '.join(known)}"


def either_name(owner: str, dataloader: R | None, loader: R | None) -> R | None:
    """Return a call's loader, which may be passed under either of two names.

    Raises:
        PlanError: if both are given.
    """
    if dataloader is not None and loader is not None:
        raise PlanError(f"{owner} got dataloader= and loader=, two names of one argument; leave one out")
    return dataloader if loader is None else loader


def names_checked(elsewhere: Mapping[str, str] | None = None) -> Callable[[C], C]:
    """Return a decorator that makes a function or a keyword-only dataclass raise a PlanError for a wrong name.

    Python would raise a TypeError, which does not say what to write instead.

    Args:
        elsewhere: name in another framework -> what to write here.
    """

    def decorate(owner: C) -> C:
        is_class = isinstance(owner, type)
        target: Any = owner
        called = target.__init__ if is_class else target
        known = list(inspect.signature(called).parameters)[is_class:]
        kind = "field" if is_class else "argument"

        @functools.wraps(called)
        def named(*args: object, **kwargs: object) -> object:
            if is_class and len(args) > 1:
                raise PlanError(
                    f"{owner.__name__} takes its fields by name, but got {args[1]!r} by position; write "
                    f"{owner.__name__}({known[0]}={args[1]!r})"
                )
            for name in kwargs:
                if name not in known:
                    raise PlanError(unknown_field(owner.__name__, name, known, elsewhere, kind=kind))
            return called(*args, **kwargs)

        named.__signature__ = inspect.signature(called)  # type: ignore[attr-defined]
        if not is_class:
            return named  # type: ignore[return-value]
        target.__init__ = named
        return owner

    return decorate


def check_bool(owner: str, name: str, value: object, *, optional: bool = False) -> None:
    """Raise a PlanError unless the value is True or False (or None, if optional)."""
    if not isinstance(value, bool) and not (optional and value is None):
        others = "True, False or None" if optional else "True or False"
        raise PlanError(f"{owner}.{name}={value!r} is a {_kind(value)} and must be {others}, without quotes")


def check_int(owner: str, name: str, value: object, *, least: int = 1, optional: bool = False) -> None:
    """Raise a PlanError unless the value is an integer of at least ``least`` (or None, if optional)."""
    if optional and value is None:
        return
    if type(value) is not int or value < least:
        size = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise PlanError(f"{owner}.{name} must be {size}, not {value!r}{_as_number(owner, name, value, int)}")


def check_number(owner: str, name: str, value: object, *, optional: bool = False) -> None:
    """Raise a PlanError unless the value is a finite number above zero (or None, if optional)."""
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        cure = _as_number(owner, name, value, float)
        raise PlanError(f"{owner}.{name}={value!r} must be a number above zero" + (cure or ", in digits"))


def check_choice(owner: str, name: str, value: object, choices: Sequence[object]) -> None:
    """Raise a PlanError unless the value equals one of the choices and has the same type as that choice."""
    if any(type(value) is type(choice) and value == choice for choice in choices):
        return
    shown = [repr(choice) for choice in choices]
    raise PlanError(f"{owner}.{name}={value!r} must be {', '.join(shown[:-1])} or {shown[-1]}")


def check_type(owner: str, name: str, value: object, kinds: type | tuple[type, ...], what: str) -> None:
    """Raise a PlanError unless the value is None or one of the types.

    Args:
        what: description of the types, for messages.
    """
    if value is not None and not isinstance(value, kinds):
        raise PlanError(f"{owner}.{name}={value!r} is a {_kind(value)} and must be {what}")


def _kind(value: object) -> str:
    return {str: "string", int: "number", float: "number", type(None): "None"}.get(type(value), type(value).__name__)


def _as_number(owner: str, name: str, value: Any, kind: type) -> str:
    """Return what to write instead of a number given as a string or as a whole float; empty if nothing fits."""
    try:
        number = kind(value) if isinstance(value, str | float) else None
    except (ValueError, OverflowError):
        return ""
    return "" if number is None or number <= 0 or number != float(value) else f"; write {owner}({name}={number})"
