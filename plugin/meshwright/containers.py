"""Containers of a class that the program has chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def rebuilt(value: list[Any] | tuple[Any, ...], items: list[Any]) -> Any:
    """Return the items in a list, tuple or named tuple of the class of ``value``."""
    kind: Callable[..., Any] = type(value)
    return kind(*items) if hasattr(value, "_fields") else kind(items)
