"""Runs steps that can fail on one rank alone (a missing file, a full disk), so that all ranks raise or none does."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright import errors
from meshwright.faults.interpose import own_collectives
from meshwright.mesh.packed_values import UnsupportedValue, pack, unpack
from meshwright.mesh.process_group import wire_device

T = TypeVar("T")


class Exchange(Protocol):
    """A way in which ranks exchange texts."""

    rank: int

    def texts_of_all(self, text: str) -> list[str]:
        """Return the text of every rank, in their order; every rank must make the call."""

    def text_of_first(self, text: str) -> str:
        """Return rank 0's text on every rank; every rank must make the call."""


def succeed_together(step: Callable[[], T]) -> T:
    """Run a step without communication on every rank. If the step fails on any rank, raise on all ranks.

    Args:
        step: the step.

    Raises:
        Exception: on a rank that failed, its own exception. On other ranks, an exception of the same class, whose
            message gives the rank that failed and its error.
    """
    result, error = attempt(step)
    # An empty text means success: if all texts are empty, a single collective shows it.
    texts = texts_of_all("" if error is None else json.dumps(_describe(error)))
    _raise_first([json.loads(text) if text else None for text in texts], error)
    assert error is None
    return result  # type: ignore[return-value]


def exchange_together(
    step: Callable[[], tuple[T, str]], meeting: Exchange | None = None, *, group: dist.ProcessGroup | None = None
) -> tuple[T, list[str]]:
    """Run a step without communication on every rank, and exchange the ranks' texts.

    Args:
        step: the step, which returns its result and its text.
        meeting: the means by which the ranks exchange texts (default: collectives of the default process group).
        group: without a meeting, the process group of the ranks; None for all.

    Returns:
        The step's result on this rank, and the texts of all ranks in their order.

    Raises:
        Exception: if the step fails on any rank, as :func:`succeed_together` does.
    """
    done, error = attempt(step)
    own = json.dumps([done and done[1], _describe(error)])
    texts = texts_of_all(own, group) if meeting is None else meeting.texts_of_all(own)
    received = [json.loads(other) for other in texts]
    _raise_first([failure for _, failure in received], error)
    assert done is not None
    return done[0], [other for other, _ in received]


def on_first_rank(step: Callable[[], T], meeting: Exchange | None = None) -> T:
    """Run a step on rank 0 alone, and return its result on every rank; if it fails, all ranks raise.

    Args:
        step: the step. JSON must be able to hold its result; tuples become lists.
        meeting: how the ranks exchange the result; by default by collectives of the default group.

    Raises:
        Exception: on rank 0, its own exception. On other ranks, an exception of the same class with rank 0's error.
    """
    if meeting is None and not dist.is_initialized():
        return step()
    rank = dist.get_rank() if meeting is None else meeting.rank
    result, error = attempt(lambda: json.dumps(step())) if rank == 0 else (None, None)
    exchange = _text_of_first if meeting is None else meeting.text_of_first
    received, failure = json.loads(exchange(json.dumps([result, _describe(error)]) if rank == 0 else ""))
    _raise_first([failure], error)
    return json.loads(received)  # type: ignore[no-any-return]


def texts_of_all(text: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """Return the text of every rank of a group, in their order; every rank of the group must make the call."""
    if not dist.is_initialized():
        return [text]
    # Without a text on any rank, only the lengths are exchanged.
    written = torch.frombuffer(bytearray(json.dumps(text).encode()), dtype=torch.uint8)
    own = written if text else written[:0]
    return [json.loads(bytes(other.numpy()) or '""') for other in _bytes_of_all(own, group)]


def values_of_all(value: object, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the value of every rank of a group, in their order; every rank of the group must make the call.

    Args:
        value: a value that ``pack`` can pack.
        group: the process group; None for all ranks.

    Raises:
        ValueError: on every rank, if the value of a rank cannot be packed. The message names the rank and the part.
    """
    error: UnsupportedValue | None = None
    try:
        own = pack((value, None))
    except UnsupportedValue as raised:
        error, own = raised, pack((None, str(raised)))
    received = [unpack(other) for other in _bytes_of_all(own, group)]
    if error is not None:
        raise error
    for rank, (_, problem) in enumerate(received):
        if problem is not None:
            raise ValueError(f"rank {rank} of {len(received)} cannot send its values: {problem}")
    return [other for other, _ in received]


def _bytes_of_all(own: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Return the bytes of every rank of a group, on the CPU."""
    device = wire_device(group=group)
    size = torch.tensor([len(own)], device=device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    lengths = [int(other) for other in sizes]
    if not any(lengths):
        return [own[:0]] * len(lengths)
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(own)] = own
    padded = padded.to(device)
    received = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(received, padded, group=group)
    return [other[:length].cpu() for other, length in zip(received, lengths, strict=True)]


def _text_of_first(text: str) -> str:
    """Return rank 0's text on every rank."""
    own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else None
    return bytes(bytes_of_first(own).numpy()).decode()


def bytes_of_first(own: Tensor | None, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the bytes of a group's first rank on every rank of it, on the CPU; the other ranks pass None."""
    device = wire_device(group=group)
    length = torch.tensor([0 if own is None else len(own)], device=device)
    dist.broadcast(length, group_src=0, group=group)
    body = (torch.empty(int(length), dtype=torch.uint8) if own is None else own).to(device)
    dist.broadcast(body, group_src=0, group=group)
    return body.cpu()


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


def attempt(step: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Run a step, and return its result or its exception."""
    try:
        return step(), None
    except Exception as error:
        return None, error


def raise_if_any(error: Exception | None) -> None:
    """Raise an exception that :func:`attempt` returned."""
    if error is not None:
        raise error


Description = tuple[list[str], str]  # the names of an error's classes, its own first, and its message


def failure_text(error: Exception) -> str:
    """Return the text by which :func:`exchange_together` and :func:`on_first_rank` tell other ranks of an error."""
    return json.dumps([None, _describe(error)])


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
