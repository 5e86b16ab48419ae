"""One check that all ranks of the world make the same call, before any of them waits for another."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

Result = TypeVar("Result")


def agreed(check: Callable[[], tuple[Mapping[str, str], Result]]) -> Result:
    """Run ``check`` on every rank of the world and return its result, or raise on every rank alike.

    A rank whose check raises tells the others, so that none of them waits for it. While all agree, this costs
    one all-reduce of two integers.

    Args:
        check: looks at this rank's arguments; returns what must be the same on all ranks, name to text, and
            the result for this rank.

    Raises:
        ValueError: the descriptions differ, or the check failed on some ranks; names the ranks and both values.
        Exception: what the check raised, where it raised the same on every rank.

    Example:
        >>> agreed(lambda: ({"shape": str(x.shape)}, x))  # doctest: +SKIP
    """
    failure: Exception | None = None
    try:
        description, result = check()
    # Whatever it is: a rank that left here alone would leave the others waiting.
    except Exception as error:
        failure, description = error, {"error": f"{type(error).__name__}: {error}"}
    if not _same_everywhere(description):
        descriptions: list[Mapping[str, str]] = [{}] * dist.get_world_size()
        dist.all_gather_object(descriptions, dict(description))
        raise ValueError(disagreement(descriptions)) from failure
    if failure is not None:
        raise failure
    return result


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
            if not failed or rank in failed:
                ranks_of[description.get(name, "nothing")].append(rank)
        if failed or len(ranks_of) > 1:
            lines.append(f"  {name}: " + "; ".join(f"{text} on {_ranks(ranks)}" for text, ranks in ranks_of.items()))
    return "\n".join(["the ranks do not make the same call:", *lines, "Pass the same on every rank."])


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _same_everywhere(description: Mapping[str, str]) -> bool:
    digest = hashlib.blake2b(repr(list(description.items())).encode(), digest_size=8).digest()
    number = int.from_bytes(digest) >> 1  # one bit less, so that its negative fits as well
    # Over the backend that moves the tensors where it is NCCL: the first call there must be made by all ranks.
    device = "cuda" if "nccl" in dist.get_backend_config() else "cpu"
    extremes = torch.tensor([number, -number], dtype=torch.int64, device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    largest, negative_smallest = extremes.tolist()
    return largest == -negative_smallest
