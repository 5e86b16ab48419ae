"""What ``to_distributed`` returns, for programs that take it for the model."""

from __future__ import annotations

from typing import Any, NoReturn

_WRITE = "write model, optimizer, loader = to_distributed(model, optimizer, loader)"


class ReturnedTuple(tuple[Any, Any, Any]):
    """The model, the optimizer and the loader."""

    __slots__ = ()

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError(f"this is the tuple that to_distributed returned, not the model; {_WRITE}")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"the tuple that to_distributed returned has no attribute {name!r}; {_WRITE}")
