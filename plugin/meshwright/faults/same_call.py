"""Checks that all ranks of the world make the same call, before any of them waits for another."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from meshwright.faults.together import texts_of_all
from meshwright.mesh.process_group import wire_device

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
