"""Makes all ranks succeed or fail alike: in steps that may fail on one rank, and in calls that all must make alike."""

from __future__ import annotations

import builtins
import hashlib
import json
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

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
    _raise_first([failure for _, failure in received], error, group)
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


def _raise_first(
    failures: list[Description | None], own: Exception | None, group: dist.ProcessGroup | None = None
) -> None:
    if own is not None:
        raise own
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise _rebuilt(rank if group is None else dist.get_global_rank(group, rank), failure)


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


Result = TypeVar("Result")

_begun: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()  # the default groups over which ranks have compared


@dataclass(frozen=True)
class Claim(Generic[Result]):
    """One rank's description of its call.

    Args:
        result: the result of the check, for this rank alone.
        same: the values that must be equal on all ranks, as texts by name.
        known: the values that only some ranks know, and that must be equal on these ranks.
        number: an integer from 0 to 2**63 - 1 that identifies ``known``; None on ranks that do not know these values.
    """

    result: Result
    same: Mapping[str, str]
    known: Mapping[str, str] = field(default_factory=dict)
    number: int | None = None


def agreed(check: Callable[[], Claim[Result]]) -> tuple[Result, int]:
    """Run ``check`` on every rank of the world and compare the claims. If they differ, every rank raises.

    If the check raises on one rank, the other ranks raise too instead of waiting. If all ranks agree, the comparison
    costs one all-reduce of four integers.

    Args:
        check: a function that checks this rank's arguments.

    Returns:
        This rank's result, and the ``number`` of those ranks that know it; -1 if no rank does.

    Raises:
        ValueError: the claims differ, or the check failed on some ranks. The message lists the values and their ranks.
        Exception: the check's own exception, if the check raised the same exception on every rank.

    Example:
        >>> x, _ = agreed(lambda: Claim(x, {"shape": str(x.shape)}))  # doctest: +SKIP
    """
    failure: Exception | None = None
    try:
        claim = check()
        same, known, number = claim.same, claim.known, claim.number
    # Any exception is caught, since the other ranks would wait for a rank that raises alone.
    except Exception as error:
        failure = error
        same, known, number = {"error": f"{type(error).__name__}: {error}"}, {}, None
    equal, shared = _compare(same, number)
    if not equal:
        texts = texts_of_all(json.dumps({**same, **known}))
        raise ValueError(disagreement([json.loads(text) for text in texts])) from failure
    if failure is not None:
        raise failure
    return claim.result, shared


def disagreement(descriptions: Sequence[Mapping[str, str]]) -> str:
    """Return a text that lists the entries that differ between ranks, or only the errors if there are any.

    Args:
        descriptions: one description per rank.

    Example:
        >>> print(disagreement([{"dtype": "int64", "shape": "(4,)"}, {"dtype": "int64", "shape": "(5,)"}]))
        the ranks do not make the same call:
          shape: (4,) on rank 0; (5,) on rank 1
        Pass the same on every rank.
    """
    failed = [rank for rank, description in enumerate(descriptions) if "error" in description]
    names = ["error"] if failed else list(dict.fromkeys(name for entries in descriptions for name in entries))
    lines = []
    for name in names:
        ranks_of: dict[str, list[int]] = defaultdict(list)
        for rank, description in enumerate(descriptions):
            if name in description:
                ranks_of[description[name]].append(rank)
        if failed or len(ranks_of) > 1:
            lines.append(f"  {name}: " + "; ".join(f"{text} on {_ranks(ranks)}" for text, ranks in ranks_of.items()))
    if len(failed) == len(descriptions):  # each call is wrong, and need not be the same
        return "\n".join(["the call failed on every rank:", *lines])
    return "\n".join(["the ranks do not make the same call:", *lines, "Pass the same on every rank."])


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _device_of_first_call() -> str:
    """Return the device of the next comparison: CUDA once for each default group, since all ranks must take part in
    NCCL's first call, and then the CPU, so that the hosts do not wait for their devices."""
    world = dist.group.WORLD
    if world is None or world in _begun:
        return "cpu"
    _begun.add(world)
    return "cuda"


def _compare(same: Mapping[str, str], number: int | None) -> tuple[bool, int]:
    """Return whether the ranks' entries are equal, and their numbers where known; and the number, or -1 if unknown."""
    digest = hashlib.blake2b(repr(list(same.items())).encode(), digest_size=8).digest()
    code = int.from_bytes(digest) >> 1  # one bit less, so that its negative fits as well
    device = wire_device(_device_of_first_call())
    # One MAX yields the largest and the negated smallest value. A rank that does not know the number changes neither.
    claims = [code, -code, -1 if number is None else number, -(2**63) + 1 if number is None else -number]
    extremes = torch.tensor(claims, dtype=torch.int64, device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    largest, smallest, largest_number, smallest_number = extremes.tolist()
    return largest == -smallest and largest_number in (-1, -smallest_number), largest_number
