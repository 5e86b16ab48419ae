"""The ranks that must see the same rows: one may read for the others, and all compare what they have."""

from __future__ import annotations

import math
import pickle
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.data.nested import fill, map_tensors
from meshwright.errors import DivergenceError, PeerFailedError
from meshwright.faults.interpose import own_collectives
from meshwright.faults.memory_digest import is_plain
from meshwright.mesh.process_group import wire_device
from meshwright.parallel.collectives import Axis, all_gather

ALIGNMENT = 8  # bytes, so that every tensor can be a view of one buffer


class Peers:
    """The ranks that differ from this one on some axes only.

    Args:
        axes: those axes; what the first rank on all of them sends reaches all.
    """

    def __init__(self, axes: tuple[Axis, ...] = ()):
        self.axes = tuple(axis for axis in axes if axis.size > 1)  # one of size 1 has no group to talk in

    @property
    def is_leader(self) -> bool:
        """Whether this is the first of them."""
        return all(axis.rank == 0 for axis in self.axes)

    @property
    def count(self) -> int:
        return math.prod(axis.size for axis in self.axes)

    def gather(self, *numbers: int) -> list[list[int]]:
        """The numbers of every one of them."""
        own = torch.tensor([numbers], dtype=torch.int64)
        if self.axes:
            own = own.to(wire_device())
        for axis in self.axes:
            own = all_gather(own, axis)
        return own.tolist()

    def broadcast(self, value: Any) -> Any:
        """The leader's value on every peer; an exception is raised on all of them.

        Raises:
            Exception: the leader's own, there.
            PeerFailedError: with its message, on the others.
        """
        if self.count == 1:
            return _raised(value)
        payload = None
        if self.is_leader:
            try:
                payload = _pack(value)
            except Exception as error:  # a value that cannot be sent: the others must not wait for it
                value, payload = error, _pack(error)
        for number, axis in enumerate(self.axes):
            # Along each axis in turn: of the axes that follow, only the first rank has it yet.
            if all(later.rank == 0 for later in self.axes[number + 1 :]):
                payload = _broadcast_bytes(payload, axis)
        if self.is_leader:
            return _raised(value)
        assert payload is not None
        received = _unpack(payload)
        if isinstance(received, _Failure):
            raise PeerFailedError(f"the rank that reads for this one failed: {received.text}")
        return received


def check_same_rows(everyone: Peers, place: int, code: int, where: str) -> None:
    """Raise on all ranks alike unless those of one place have the same rows.

    Args:
        everyone: the ranks that compare.
        place: ranks with the same one must read the same.
        code: a digest of what this rank has read.
        where: in which step, for the message.

    Raises:
        DivergenceError: naming ranks with other rows.
    """
    rank = dist.get_rank() if everyone.count > 1 else 0
    codes_at: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for other, its_place, its_code in everyone.gather(rank, place, code):
        codes_at[its_place][its_code].append(other)
    for ranks_of in codes_at.values():
        if len(ranks_of) > 1:
            groups = ", others on ".join(f"rank(s) {', '.join(map(str, ranks))}" for ranks in ranks_of.values())
            raise DivergenceError(
                f"{where}: ranks that must have the same rows have some on {groups}. A dataset or collate function "
                "that draws random numbers or reads the clock does this, or a state that not all of them loaded; seed "
                "by the sample, or set source='leader' to read on one rank for all"
            )


def first_ranks(values: list[Any], everyone: Peers) -> list[Any]:
    """The first rank's values on all ranks; long lists of integers travel as a tensor."""
    if everyone.is_leader and all(type(value) is int and -(2**63) <= value < 2**63 for value in values):
        return everyone.broadcast(torch.tensor(values, dtype=torch.int64)).tolist()
    received = everyone.broadcast(values)
    return received.tolist() if isinstance(received, Tensor) else received


def _raised(value: Any) -> Any:
    if isinstance(value, Exception):
        raise value
    return value


@dataclass(frozen=True)
class _Failure:
    text: str


@dataclass(frozen=True)
class _Slot:
    """A tensor's place in the buffer."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def _pack(value: Any) -> Tensor:
    """One buffer: the tensors' bytes, the pickled rest, and the length of that."""
    parts: list[Tensor] = []
    filled = 0

    def put(x: Tensor) -> Any:
        nonlocal filled
        if not is_plain(x):
            return x  # sparse and the like: pickled with the rest
        raw = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        slot = _Slot(filled, tuple(x.shape), x.dtype)
        parts.append(raw)
        if padding := -len(raw) % ALIGNMENT:
            parts.append(torch.zeros(padding, dtype=torch.uint8))
        filled += len(raw) + padding
        return slot

    if isinstance(value, Exception):
        value = _Failure(f"{type(value).__name__}: {value}")
    rest = pickle.dumps(map_tensors(value, put))
    parts.append(torch.frombuffer(bytearray(rest), dtype=torch.uint8))
    parts.append(torch.tensor([len(rest)], dtype=torch.int64).view(torch.uint8))
    return torch.cat(parts)


def _unpack(payload: Tensor) -> Any:
    length = int.from_bytes(bytes(payload[-8:].tolist()), "little")
    skeleton = pickle.loads(bytes(payload[-8 - length : -8].numpy()))

    def get(slot: Any) -> Any:
        if not isinstance(slot, _Slot):
            return slot
        size = slot.dtype.itemsize * math.prod(slot.shape)
        return payload[slot.offset : slot.offset + size].clone().view(slot.dtype).reshape(slot.shape)

    return fill(skeleton, get)


@own_collectives()
def _broadcast_bytes(payload: Tensor | None, axis: Axis) -> Tensor:
    assert axis.group is not None
    device = wire_device()
    length = torch.tensor([0 if payload is None else len(payload)], device=device)
    dist.broadcast(length, group_src=0, group=axis.group)
    buffer = torch.empty(int(length), dtype=torch.uint8) if payload is None else payload
    buffer = buffer.to(device)
    dist.broadcast(buffer, group_src=0, group=axis.group)
    return buffer.cpu()
