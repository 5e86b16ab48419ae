"""Functions that tests put in the place of the runtime's own hooks."""

from collections.abc import Callable
from typing import TypeVar

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])


def of_runtime(function: FunctionT) -> FunctionT:
    """Let a function pass for a hook of the runtime, which sees a rank's parts, and not for one of the program."""
    function.watches_parts = True  # type: ignore[attr-defined]
    return function
