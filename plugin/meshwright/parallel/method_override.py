"""Replacements for a model's methods, which are copied with the model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from meshwright.compiling import pause_compiling
from meshwright.errors import PlanError


class MethodOverride:
    """Replaces one bound method of a model; the original is ``self.method``.

    It is an object, not a function: ``copy.deepcopy`` of a model binds methods to the copy, but keeps a function as it
    is, so the copy would call the original model.
    """

    def __init__(self, method: Callable[..., Any]):
        functools.update_wrapper(self, method)  # keeps the signature for callers that inspect it
        self.method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class EagerMethod(MethodOverride):
    """Runs a method without compiling it, if its caller is compiled."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        resume = pause_compiling()
        try:
            return self.method(*args, **kwargs)
        finally:
            resume()


class RefusedMethod:
    """Takes the place of a method, and raises when it is called."""

    def __init__(self, message: str):
        self.message = message

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise PlanError(self.message)
