"""Compares the order in which the ranks of each process group issue their collectives; NCCL hangs if it differs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from meshwright.plan.config import ParallelPlan
from meshwright.tracing.cuda_trace import CudaStep
from meshwright.tracing.host_waits import Issued

_SENT, _RECEIVED = "send", "recv_"


def chosen_ranks(plan: ParallelPlan, most: int) -> list[int]:
    """Return which ranks of a plan to trace, so that two ranks of each kind of process group are compared.

    Rank 0 and its neighbour on each axis come first, then the first rank of each stage, then the neighbours of these.

    Args:
        plan: the plan.
        most: the largest number of ranks.
    """
    apart, neighbours = 1, [0]
    for name, size in reversed(plan.sizes.items()):  # from the innermost axis of the mesh to the outermost
        if name == "pp":
            break
        groups = {1, plan.ulysses or 1} if name == "cp" else {1}  # hybrid cuts cp in two
        neighbours += [apart * group for group in sorted(groups) if size > group]
        apart *= size
    stages = [0, 1, plan.pp - 1, *range(plan.pp)] if plan.pp > 1 else [0]
    order = [*neighbours, *(s * apart for s in stages), *(s * apart + n for s in stages for n in neighbours)]
    return sorted(list(dict.fromkeys([*order, *range(min(most, plan.world_size))]))[:most])


def order_problems(steps: Mapping[int, CudaStep]) -> list[str]:
    """Return where the ranks of a group would not fit together, in words; empty if they all do.

    All ranks of a group must issue the same collectives in the same order, of the same sizes, dtypes and roots. What
    one rank of a pair sends, the other must receive in the same order, group by group, as NCCL has no tags.

    Args:
        steps: the traced step of each rank.
    """
    problems = []
    for lists in _by_group(steps):
        problems += _of_collectives(lists) + _of_messages(lists)
    return problems


def compared_groups(steps: Mapping[int, CudaStep]) -> int:
    """Return the number of process groups of which :func:`order_problems` compares at least two ranks.

    Args:
        steps: the traced step of each rank.
    """
    return sum(len(lists) > 1 for lists in _by_group(steps))


def _by_group(steps: Mapping[int, CudaStep]) -> list[dict[int, list[Issued]]]:
    """Return for each process group what each traced rank of it issues."""
    by_group: dict[str, dict[int, list[Issued]]] = defaultdict(dict)
    members: dict[str, tuple[int, ...]] = {}
    for rank, step in steps.items():
        for issued in step.issued:
            by_group[issued.group].setdefault(rank, []).append(issued)
            members[issued.group] = issued.ranks
    return [
        {rank: by_group[group].get(rank, []) for rank in ranks if rank in steps} for group, ranks in members.items()
    ]


def _of_collectives(lists: dict[int, list[Issued]]) -> list[str]:
    own = {rank: [x for x in issued if x.kind not in (_SENT, _RECEIVED)] for rank, issued in lists.items()}
    (first, expected), *others = own.items()
    problems = []
    for rank, found in others:
        for index in range(max(len(expected), len(found))):
            a, b = (x[index] if index < len(x) else None for x in (expected, found))
            if a is None or b is None or a.must_match != b.must_match:
                problems.append(
                    f"collective {index + 1} of ranks {list(lists)}: rank {first} issues {_text(a)}, rank {rank} "
                    f"{_text(b)}"
                )
                break
    return problems


def _of_messages(lists: dict[int, list[Issued]]) -> list[str]:
    problems = []
    for sender, of_sender in lists.items():
        for receiver, of_receiver in lists.items():
            sent = [(*x.shape, x.dtype) for x in of_sender if x.kind == _SENT and x.peer == receiver]
            received = [(*x.shape, x.dtype) for x in of_receiver if x.kind == _RECEIVED and x.peer == sender]
            if sent != received:
                problems.append(
                    f"rank {sender} sends {len(sent)} messages to rank {receiver}, which receives {len(received)}, or "
                    f"their sizes or dtypes differ: {sent} and {received}"
                )
    return problems


def _text(issued: Issued | None) -> str:
    if issued is None:
        return "nothing more"
    root = "" if issued.root is None else f" with root {issued.root}"
    return f"{issued.kind} of {list(issued.shape)} {issued.dtype}{root}"
