"""The ranks that must have the same rows. One of them may read for the others, and all compare their rows.

The time for which a program waits for its data, which the lines of a run show.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.errors import DivergenceError, PeerFailedError
from meshwright.faults import interpose
from meshwright.faults.interpose import own_collectives
from meshwright.faults.together import bytes_of_first
from meshwright.mesh.axes import Axis, Mesh
from meshwright.mesh.packed_values import pack, unpack
from meshwright.mesh.process_group import wire_device
from meshwright.parallel.collectives import all_gather


class Peers:
    """The ranks that differ from this rank only along the given axes.

    Args:
        axes: the axes. The rank that is first on all of them is the leader, which can broadcast to the others.
    """

    def __init__(self, axes: tuple[Axis, ...] = ()):
        self.axes = tuple(axis for axis in axes if axis.size > 1)  # an axis of size 1 may have no process group

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the leader."""
        return all(axis.rank == 0 for axis in self.axes)

    @property
    def count(self) -> int:
        return math.prod(axis.size for axis in self.axes)

    def gather(self, *numbers: int) -> list[list[int]]:
        """Return the numbers that each peer passed, one list per rank."""
        own = torch.tensor([numbers], dtype=torch.int64)
        for axis in self.axes:
            own = all_gather(own.to(wire_device(group=axis.group)), axis)
        return own.tolist()

    def broadcast(self, value: object) -> Any:
        """Return the leader's value on every peer. If the value is an exception, every peer raises.

        Raises:
            Exception: on the leader, the exception itself.
            PeerFailedError: on the other peers, with the exception's message.
        """
        if self.count == 1:
            return _raised(value)
        payload = None
        if self.is_leader:
            try:
                payload = _packed(value)
            except Exception as error:  # the value cannot be sent, and the others must not wait for it
                value, payload = error, _packed(error)
        for number, axis in enumerate(self.axes):
            # Only ranks that are first on all later axes have the value, or receive it in this iteration.
            if all(later.rank == 0 for later in self.axes[number + 1 :]):
                with own_collectives():
                    payload = bytes_of_first(payload, axis.group)
        if self.is_leader:
            return _raised(value)
        assert payload is not None
        received, failure = unpack(payload)
        if failure is not None:
            raise PeerFailedError(f"the rank that reads for this one failed: {failure}")
        return received


@dataclass(frozen=True, kw_only=True)
class LoaderMesh:
    """The mesh that a loader reads for, as seen from this rank.

    Args:
        dp: this rank's place among the ranks that take different rows.
        peers: the ranks that take the same rows as this one.
        everyone: all of these ranks; by default ``dp`` and ``peers``.
        device: the device that tensors are moved to, by default the CPU.
    """

    dp: Axis
    peers: Peers = field(default_factory=Peers)
    everyone: Peers | None = None
    device: torch.device | None = None

    @staticmethod
    def of(mesh: Mesh, device: torch.device) -> LoaderMesh:
        """Return the loader's view of a model's mesh."""
        return LoaderMesh(dp=mesh.dp, peers=Peers(mesh.of_same_rows), device=device)


DRAWN = (
    "The dataset or collate function may draw random numbers or read the clock, or not every rank loaded the state. "
    "Seed by the sample's index, or set source='leader' so that one rank reads for all"
)


def check_same_rows(everyone: Peers, place: int, code: int, where: str, advice: str = DRAWN) -> None:
    """Raise on all ranks unless ranks with the same ``place`` have the same rows.

    Args:
        everyone: the ranks that compare.
        place: a number that is equal on ranks that must read the same rows.
        code: a digest of what this rank has read.
        where: the step, as a text for the message.
        advice: why ranks may differ and what to do, for the message.

    Raises:
        DivergenceError: the rows of some ranks differ. The message lists these ranks.
    """
    rank = dist.get_rank() if everyone.count > 1 else 0
    codes_at: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for other, its_place, its_code in everyone.gather(rank, place, code):
        codes_at[its_place][its_code].append(other)
    for ranks_of in codes_at.values():
        if len(ranks_of) > 1:
            groups = ", others on ".join(f"rank(s) {', '.join(map(str, ranks))}" for ranks in ranks_of.values())
            raise DivergenceError(
                f"{where}: ranks that must have the same rows have different rows: some on {groups}. {advice}"
            )


def _raised(value: object) -> Any:
    if isinstance(value, Exception):
        raise value
    return value


def _packed(value: object) -> Tensor:
    if isinstance(value, Exception):
        return pack((None, f"{type(value).__name__}: {value}"))
    return pack((value, None), "the batch")


_T = TypeVar("_T")


class _ReadingState(threading.local):
    seconds = 0.0


_state = _ReadingState()


def waited_for_data() -> float:
    """Return the seconds that this thread has waited for data, without those in which it waited for other ranks."""
    return _state.seconds


def timed(items: Iterator[_T]) -> Iterator[_T]:
    """Yield the items, and count the time until each of them is there."""
    while True:
        begun, waited = time.perf_counter(), interpose.waited()
        try:
            item = next(items)
        except StopIteration:
            return
        finally:
            _state.seconds += max(0.0, time.perf_counter() - begun - (interpose.waited() - waited))
        yield item
