"""The ranks that must see the same rows, and those that read different ones."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.data.tree import map_tensors
from meshwright.errors import DivergenceError, PeerFailedError
from meshwright.faults.interpose import own_collectives
from meshwright.parallel.collectives import Axis, all_gather

ALIGNMENT = 8  # bytes, so that every tensor can be a view of one buffer


@dataclass(frozen=True)
class Peers:
    """The ranks that read the same rows as this one.

    Args:
        axes: those of the mesh that do not decide the rows.
    """

    axes: tuple[Axis, ...] = ()

    @property
    def is_leader(self) -> bool:
        """Whether this is the first of them."""
        return all(axis.rank == 0 for axis in self.axes)

    @property
    def count(self) -> int:
        product = 1
        for axis in self.axes:
            product *= axis.size
        return product

    def check_same(self, code: int, where: str) -> None:
        """Compare a number with the peers'.

        Raises:
            DivergenceError: on all of them, naming which ranks have the same.
        """
        if self.count == 1:
            return
        own = torch.tensor([[dist.get_rank(), code]], device=communication_device())
        for axis in self.axes:
            own = all_gather(own, axis)
        ranks_of: dict[int, list[int]] = {}
        for rank, other in own.tolist():
            ranks_of.setdefault(other, []).append(rank)
        if len(ranks_of) > 1:
            groups = " but not as ".join(f"ranks {sorted(ranks)}" for ranks in ranks_of.values())
            names = ", ".join(axis.name for axis in self.axes if axis.size > 1)
            raise DivergenceError(
                f"{where}: ranks that differ only in their place on {names} must read the same rows, and these read "
                f"the same: {groups}. A dataset or collate function that draws random numbers or reads the "
                "clock does this; seed it by the sample, or set source='leader' to read on one rank for all"
            )

    def broadcast(self, value: Any) -> Any:
        """The leader's value on every peer; an exception is raised on all of them.

        Raises:
            Exception: the leader's own, there.
            PeerFailedError: with its message, on the others.
        """
        if self.count == 1:
            if isinstance(value, Exception):
                raise value
            return value
        payload = _pack(value) if self.is_leader else None
        for number, axis in enumerate(self.axes):
            # Along each axis in turn: of the axes that follow, only the first rank has it yet.
            if all(later.rank == 0 for later in self.axes[number + 1 :]):
                payload = _broadcast_bytes(payload, axis)
        if self.is_leader:
            if isinstance(value, Exception):
                raise value
            return value
        assert payload is not None
        received = _unpack(payload)
        if isinstance(received, _Failure):
            raise PeerFailedError(f"the rank that reads for this one failed: {received.text}")
        return received


def first_ranks(values: list[Any], everyone: Axis) -> list[Any]:
    """The values of the axis' first rank, on all its ranks; long lists of integers travel as a tensor."""
    if everyone.size == 1:
        return values
    leader = Peers((everyone,))
    if leader.is_leader and all(isinstance(value, int) and -(2**63) <= value < 2**63 for value in values):
        return leader.broadcast(torch.tensor(values, dtype=torch.int64)).tolist()
    received = leader.broadcast(values)
    return received.tolist() if isinstance(received, Tensor) else received


def communication_device() -> torch.device:
    """Where small tensors for the process group live."""
    return torch.device("cpu" if "gloo" in str(dist.get_backend_config()) else "cuda")


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

    def put(x: Tensor) -> _Slot:
        nonlocal filled
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
    return _fill(skeleton, payload)


def _fill(value: Any, payload: Tensor) -> Any:
    if isinstance(value, _Slot):
        size = value.dtype.itemsize
        for length in value.shape:
            size *= length
        return payload[value.offset : value.offset + size].clone().view(value.dtype).reshape(value.shape)
    if isinstance(value, dict):
        return {key: _fill(item, payload) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_fill(item, payload) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_fill(item, payload) for item in value)
    return value


@own_collectives()
def _broadcast_bytes(payload: Tensor | None, axis: Axis) -> Tensor:
    device = communication_device()
    length = torch.tensor([0 if payload is None else len(payload)], device=device)
    dist.broadcast(length, group_src=0, group=axis.group)
    buffer = torch.empty(int(length), dtype=torch.uint8) if payload is None else payload
    buffer = buffer.to(device)
    dist.broadcast(buffer, group_src=0, group=axis.group)
    return buffer.cpu()
