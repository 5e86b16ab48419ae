"""Counts the messages and the collectives of a step, where torch dispatches them."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.plan.schedule import rank_of_stage

Pair = tuple[int, int]  # sender, receiver: global ranks


class Messages(TorchDispatchMode):
    """Counts what this rank sends, and the collectives it takes part in, while active.

    Args:
        sent: the number of messages from this rank, by pair.
        bytes: their bytes, by pair.
        collectives: the number of other operations on process groups, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[Pair] = Counter()
        self.bytes: Counter[Pair] = Counter()
        self.collectives: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", None) == "c10d":
            name = func._opname
            if name == "send":
                (x,), group, receiver = args[:3]
                named = _resolve_process_group(dist.ProcessGroup.unbox(group).group_name)
                pair = dist.get_rank(), dist.get_global_rank(named, receiver)
                self.sent[pair] += 1
                self.bytes[pair] += x.nbytes
            elif name != "recv_":
                self.collectives[name] += 1
        return func(*args, **(kwargs or {}))


def computed_messages(schedule: str, p: int, v: int, m: int) -> Counter[Pair]:
    """Return the messages of a step by pair: for each micro-batch one each way over each boundary between ranks.

    Args:
        schedule: the schedule's name.
        p: ranks of the pipeline.
        v: virtual stages of a rank.
        m: micro-batches of a step.

    Example:
        >>> computed_messages("zbv", 2, 2, 8)  # the second and the third stage are on one rank
        Counter({(0, 1): 16, (1, 0): 16})
    """
    ranks = [rank_of_stage(schedule, stage, p) for stage in range(p * v)]
    found: Counter[Pair] = Counter()
    for before, after in itertools.pairwise(ranks):
        if before != after:
            found[before, after] += m
            found[after, before] += m
    return found
