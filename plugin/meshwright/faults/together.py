"""Runs steps that can fail on one rank alone (a missing file, a full disk), so that all ranks raise or none does."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright import errors
from meshwright.faults.interpose import own_collectives

T = TypeVar("T")


def succeed_together(step: Callable[[], T]) -> T:
    """Run a step without communication on every rank. If the step fails on any rank, raise on all ranks.

    Raises:
        Exception: on a rank that failed, its own exception. On other ranks, an exception of the same class, whose
            message gives the rank that failed and its error.
    """
    if not dist.is_initialized():
        return step()
    result, error = _attempt(step)
    failures: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, _describe(error))
    _raise_first(failures, error)
    assert error is None
    return result  # type: ignore[return-value]


def on_first_rank(step: Callable[[], T]) -> T:
    """Run a step on rank 0 alone, and return its (picklable) result on every rank; if it fails, all ranks raise.

    Raises:
        Exception: on rank 0, its own exception. On other ranks, an exception of the same class with rank 0's error.
    """
    if not dist.is_initialized():
        return step()
    message: list[Any] = [None, None]
    error = None
    if dist.get_rank() == 0:
        result, error = _attempt(step)
        message = [result, _describe(error)]
    dist.broadcast_object_list(message, src=0)
    _raise_first([message[1]], error)
    received: T = message[0]
    return received


def text_from_first(make: Callable[[], str], device: torch.device) -> str:
    """Run a step on rank 0 alone, and return its text on every rank; if it fails, all ranks raise.

    Args:
        make: the step, which must not communicate.
        device: a device that the process group can communicate on.

    Raises:
        Exception: on rank 0, its own exception. On other ranks, an exception of the same class with rank 0's error.
    """
    if not dist.is_initialized():
        return make()
    text, failure = "", None
    if dist.get_rank() == 0:
        made, failure = _attempt(make)
        text = made if made is not None else json.dumps(_describe(failure))
    head = torch.tensor([len(text.encode()), failure is not None], device=device)
    take_from_first(head, device)
    size, has_failed = head.tolist()
    body = torch.tensor(list(text.encode()) or [0] * size, dtype=torch.uint8, device=device)
    take_from_first(body, device)
    text = bytes(body.tolist()[:size]).decode()
    if has_failed:
        raise failure or _rebuilt(0, json.loads(text))
    return text


def take_from_first(tensor: Tensor, device: torch.device) -> None:
    """Overwrite a tensor with rank 0's values, sent from a device that the process group can communicate on."""
    staged = tensor.detach().to(device)
    dist.broadcast(staged, src=0)
    if staged.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(staged)


@own_collectives()
def wait_for_first_rank() -> None:
    """Wait until rank 0 calls this too. Call it during long work of rank 0, since no wait may exceed the timeout."""
    if dist.is_initialized():
        dist.barrier()


def _attempt(step: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return step(), None
    except Exception as error:
        return None, error


Description = tuple[list[str], str]  # the names of an error's classes, its own first, and its message


def _describe(error: Exception | None) -> Description | None:
    return None if error is None else ([kind.__name__ for kind in type(error).__mro__], str(error))


def _raise_first(failures: list[Description | None], own: Exception | None) -> None:
    if own is not None:
        raise own
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise _rebuilt(rank, failure)


def _rebuilt(rank: int, failure: Description) -> Exception:
    """Return an error of the class that another rank raised, or of its nearest base in Meshwright or Python."""
    names, message = failure
    text = f"rank {rank} failed, so every rank stops: {names[0]}: {message}"
    for name in names:
        kind = getattr(errors, name, None) or getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception) and kind is not Exception:
            error = kind.__new__(kind, text)  # the __init__ of some classes takes more than a text
            error.args = (text,)
            if text in str(error):
                return error
    return RuntimeError(text)
