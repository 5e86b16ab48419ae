"""One check that all ranks of the world make the same call, before any of them waits for another."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from meshwright.mesh.process_group import wire_device

Result = TypeVar("Result")


@dataclass(frozen=True)
class Claim(Generic[Result]):
    """What one rank says of its call.

    Args:
        result: for this rank alone.
        same: what must be equal on all ranks, name to text.
        known: what must be equal on the ranks that know it, and only they say.
        number: ``known`` as an integer from 0 to 2**63 - 1; None on the ranks that do not know.
    """

    result: Result
    same: Mapping[str, str]
    known: Mapping[str, str] = field(default_factory=dict)
    number: int | None = None


def agreed(check: Callable[[], Claim[Result]]) -> tuple[Result, int]:
    """Run ``check`` on every rank of the world, or raise on every rank alike.

    A rank whose check raises tells the others, so that none of them waits for it. While all agree, this costs
    one all-reduce of four integers.

    Args:
        check: looks at this rank's arguments.

    Returns:
        This rank's result, and the number that the ranks which know it share; -1 if none does.

    Raises:
        ValueError: the claims differ, or the check failed on some ranks; names the ranks and both values.
        Exception: what the check raised, where it raised the same on every rank.

    Example:
        >>> x, _ = agreed(lambda: Claim(x, {"shape": str(x.shape)}))  # doctest: +SKIP
    """
    failure: Exception | None = None
    try:
        claim = check()
        same, known, number = claim.same, claim.known, claim.number
    # Whatever it is: a rank that left here alone would leave the others waiting.
    except Exception as error:
        failure = error
        same, known, number = {"error": f"{type(error).__name__}: {error}"}, {}, None
    equal, shared = _compare(same, number)
    if not equal:
        descriptions: list[Mapping[str, str]] = [{}] * dist.get_world_size()
        dist.all_gather_object(descriptions, {**same, **known})
        raise ValueError(disagreement(descriptions)) from failure
    if failure is not None:
        raise failure
    return claim.result, shared


def disagreement(descriptions: Sequence[Mapping[str, str]]) -> str:
    """Return which ranks passed what, of one description a rank: the errors, or else the entries that differ.

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
    return "\n".join(["the ranks do not make the same call:", *lines, "Pass the same on every rank."])


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _compare(same: Mapping[str, str], number: int | None) -> tuple[bool, int]:
    """Whether all ranks have the same entries and all that have a number the same; and that number."""
    digest = hashlib.blake2b(repr(list(same.items())).encode(), digest_size=8).digest()
    code = int.from_bytes(digest) >> 1  # one bit less, so that its negative fits as well
    # Over the backend that moves the tensors where it is NCCL: the first call there must be made by all ranks.
    device = wire_device("cuda")
    # Largest and negated smallest at once: a rank that does not know the number has a say in neither.
    claims = [code, -code, -1 if number is None else number, -(2**63) + 1 if number is None else -number]
    extremes = torch.tensor(claims, dtype=torch.int64, device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    largest, smallest, largest_number, smallest_number = extremes.tolist()
    return largest == -smallest and largest_number in (-1, -smallest_number), largest_number
