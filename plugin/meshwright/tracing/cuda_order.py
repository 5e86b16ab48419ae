"""Compares the order in which the ranks of each process group issue their collectives; NCCL hangs if it differs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from meshwright.tracing.cuda_trace import CudaStep
from meshwright.tracing.host_waits import Issued

_SENT, _RECEIVED = "send", "recv_"


def order_problems(steps: Mapping[int, CudaStep]) -> list[str]:
    """Return where the ranks of a group would not fit together, in words; empty if they all do.

    All ranks of a group must issue the same collectives of the same sizes in the same order. What one rank of a pair
    sends, the other must receive in the same order, group by group, as NCCL has no tags.

    Args:
        steps: the traced step of each rank.
    """
    by_group: dict[str, dict[int, list[Issued]]] = defaultdict(dict)
    members: dict[str, tuple[int, ...]] = {}
    for rank, step in steps.items():
        for issued in step.issued:
            by_group[issued.group].setdefault(rank, []).append(issued)
            members[issued.group] = issued.ranks
    problems = []
    for group, ranks in members.items():
        lists = {rank: by_group[group].get(rank, []) for rank in ranks if rank in steps}
        problems += _of_collectives(lists) + _of_messages(lists)
    return problems


def _of_collectives(lists: dict[int, list[Issued]]) -> list[str]:
    own = {rank: [x for x in issued if x.kind not in (_SENT, _RECEIVED)] for rank, issued in lists.items()}
    (first, expected), *others = own.items()
    problems = []
    for rank, found in others:
        for index in range(max(len(expected), len(found))):
            a, b = (x[index] if index < len(x) else None for x in (expected, found))
            if a is None or b is None or (a.kind, a.shape) != (b.kind, b.shape):
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
            sent = [x.shape for x in of_sender if x.kind == _SENT and x.peer == receiver]
            received = [x.shape for x in of_receiver if x.kind == _RECEIVED and x.peer == sender]
            if sent != received:
                problems.append(
                    f"rank {sender} sends {len(sent)} messages to rank {receiver}, which receives {len(received)}, or "
                    f"their sizes differ: {sent} and {received}"
                )
    return problems


def _text(issued: Issued | None) -> str:
    return "nothing more" if issued is None else f"{issued.kind} of {list(issued.shape)}"
