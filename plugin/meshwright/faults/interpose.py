"""Passes every collective that Python issues to an observer, while a guard is active.

The guard must see the program's own collectives too, since the ranks may differ in these. torch offers no hook on a
process group, so the first guard of a process wraps the methods of torch's ProcessGroup class. (torch's own
TORCH_DISTRIBUTED_DEBUG=DETAIL doubles the time of each small collective, reports ranks by their place in the group, and
does not detect that ranks use two groups in opposite orders.)
"""

from __future__ import annotations

import functools
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

COLLECTIVES = (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "allgather",
    "allgather_coalesced",
    "all_gather_single",
    "_allgather_base",
    "reduce",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_single",
    "_reduce_scatter_base",
    "alltoall",
    "all_to_all_single",
    "alltoall_base",
    "barrier",
)


# Matches the errors of gloo, NCCL and their sockets when another rank is gone or does not take part.
_NETWORK_ERROR = re.compile(r"timed? ?out|connection|broken pipe|socket|peer|NCCL|remote|EOF|aborted", re.IGNORECASE)

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Observer(Protocol):
    """The interface of an observer, which the wrapped methods call."""

    def collective(self, group: ProcessGroup, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Observe a collective before it starts; raise if the ranks do not agree."""

    def send(self, group: ProcessGroup, tensors: list[Tensor], to: int, tag: int) -> None:
        """Observe a send before it starts."""

    def receive(self, group: ProcessGroup, tensors: list[Tensor], source: int, tag: int, *, waits: bool) -> None:
        """Observe a receive before it starts; raise if it does not fit the send."""

    def explain(self, error: RuntimeError) -> RuntimeError:
        """Return a network error with its reason."""


class _InterposeState(threading.local):
    depth = 0  # of contexts of own_collectives
    about = ""  # what the collectives of this thread send
    waited = 0.0


_state = _InterposeState()
_observer: Observer | None = None


class own_collectives:  # named in lower case, since callers use it like a function
    """Mark the collectives inside this context, or of a decorated function, as the runtime's own.

    Each meeting compares a digest of their log. This is a class with its own decorator, since a decorator of contextlib
    costs several calls, and this one runs at every collective of a layer.
    """

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def own(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            _state.depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                _state.depth -= 1

        return own

    def __enter__(self) -> None:
        _state.depth += 1

    def __exit__(self, *_: object) -> None:
        _state.depth -= 1


class about:
    """Say in the log of collectives what those inside this context send, so that ranks that send other things differ.

    Args:
        what: the text, e.g. " of the weight lm_head.weight".
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        _state.about = self._what

    def __exit__(self, *_: object) -> None:
        _state.about = ""


def sent() -> str:
    """Return what the collectives of this thread send, if that is known."""
    return _state.about


def is_own() -> bool:
    """Return whether this thread is inside ``own_collectives``."""
    return _state.depth > 0


def waited() -> float:
    """Return the seconds that this thread has waited for other ranks: in collectives on CPU, and in meetings."""
    return _state.waited


class waiting:
    """Count the time inside this context as waiting for other ranks."""

    def __enter__(self) -> None:
        self._begun = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        _state.waited += time.perf_counter() - self._begun


def observe(observer: Observer | None) -> None:
    """Pass every collective, send and receive to this observer from now on; None stops this."""
    global _observer
    _observer = observer
    if observer is None or hasattr(dist.ProcessGroup.allreduce, "__wrapped__"):
        return
    for name in COLLECTIVES:
        if (method := getattr(dist.ProcessGroup, name, None)) is not None:
            setattr(dist.ProcessGroup, name, _observed_collective(name, method))
    group, work = dist.ProcessGroup, dist.Work
    for owner, name, wrap in (
        (group, "send", _observed_send), (group, "recv", _observed_receive), (work, "wait", _timed)
    ):  # fmt: skip
        setattr(owner, name, wrap(getattr(owner, name)))


def _explained(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: object, **kwargs: object) -> Any:
        try:
            return method(*args, **kwargs)
        except RuntimeError as error:
            _raise_explained(error)

    return call


def _raise_explained(error: RuntimeError) -> NoReturn:
    """Raise a network error with its reason, and any other as it is; call this where it was caught."""
    if _observer is None or not _NETWORK_ERROR.search(str(error)):
        raise error
    explained = _observer.explain(error)
    if explained is error:
        raise error
    raise explained from error


# The next two functions repeat what _explained and waiting do, since a call of a wrapper in a wrapper costs time at
# each collective of a layer.
def _timed(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: object, **kwargs: object) -> Any:
        begun = time.perf_counter()
        try:
            return method(*args, **kwargs)
        except RuntimeError as error:
            _raise_explained(error)
        finally:
            _state.waited += time.perf_counter() - begun

    return call


def _observed_collective(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(group: ProcessGroup, *args: object, **kwargs: object) -> Any:
        if _observer is None:
            return method(group, *args, **kwargs)
        _observer.collective(group, name, args, kwargs)
        try:
            return method(group, *args, **kwargs)
        except RuntimeError as error:
            _raise_explained(error)

    return call


def _observed_send(method: Callable[..., Any]) -> Callable[..., Any]:
    start = _explained(method)

    @functools.wraps(method)
    def call(group: ProcessGroup, tensors: list[Tensor], to: int, tag: int) -> Any:
        if _observer is not None and not _state.depth:
            _observer.send(group, tensors, to, tag)
        return start(group, tensors, to, tag)

    return call


def _observed_receive(method: Callable[..., Any]) -> Callable[..., Any]:
    start = _explained(method)

    @functools.wraps(method)
    def call(group: ProcessGroup, tensors: list[Tensor], source: int, tag: int) -> Any:
        if _observer is not None and not _state.depth:
            _observer.receive(group, tensors, source, tag, waits=_is_blocking())
        return start(group, tensors, source, tag)

    return call


def _is_blocking() -> bool:
    """Return whether ``dist.recv`` is the caller. A ``dist.irecv`` may come before this rank's own sends."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("torch.distributed."):
        if frame.f_code.co_name == "recv":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
