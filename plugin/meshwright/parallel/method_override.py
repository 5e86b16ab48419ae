"""What stands in the place of a model's method, and is copied with the model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class MethodOverride:
    """Called in the place of one bound method of a model, which it has as ``self.method``.

    An object rather than a function: ``copy.deepcopy`` of a model binds the methods of its copy to the copy, but
    takes a function as it is, so that the copy would call the model it was made from.
    """

    def __init__(self, method: Callable[..., Any]):
        functools.update_wrapper(self, method)  # its signature, for those that inspect it
        self.method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError
