"""Point-to-point channels between the ranks of one pipeline.

A channel carries tensors from one rank to another, in the sender's order, which the receiver knows from the schedule.
Tensors that cross together are one crossing.
Each direction of each pair has a process group of its own. NCCL has no tags and runs the operations of one group in the
order of issue, so two ranks that send to each other through one group could each wait for the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.faults.interpose import own_collectives
from meshwright.mesh.axes import Axis, shared_group
from meshwright.mesh.process_group import wait_for_message, wire_device

_BESIDE = 1  # the tag of messages of the hosts, which gloo keeps apart from the others
AHEAD = 3  # number of receives that are posted before their tensors are needed


# What crosses from stage to stage: hidden states, what layers get beside them, and numbers; or the gradients of these.
Crossing = tuple[Tensor, ...]
Format = tuple[tuple[tuple[int, ...], torch.dtype], ...]  # the shape and dtype of each tensor of a crossing
_WITH_GRADIENT = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128)
DTYPES = (*_WITH_GRADIENT, torch.int64, torch.int32, torch.bool)
_MOST_DIMS = 8


def format_of(crossing: Crossing) -> Format:
    """Return the shape and dtype of each tensor of a crossing."""
    return tuple((tuple(x.shape), x.dtype) for x in crossing)


def has_gradient(dtype: torch.dtype) -> bool:
    """Return whether tensors of a dtype may have a gradient."""
    return dtype in _WITH_GRADIENT


def differentiable(crossing: Crossing) -> Crossing:
    """Return the tensors of a crossing that may have a gradient."""
    return tuple(x for x in crossing if has_gradient(x.dtype))


@dataclass(frozen=True)
class Expected:
    """A crossing that a rank will receive.

    Args:
        key: the identity of the crossing among those of the channel.
        format: returns its format; None if it is not known yet, and at last if the sender announces it, see
            :meth:`Links.send`.
        count: the number of its tensors.
    """

    key: Hashable
    format: Callable[[], Format | None]
    count: int = 1


def pipeline_groups(pp: Axis, pipelines: Iterable[Sequence[int]], members: Sequence[int], purpose: str) -> Any:
    """Make a process group of the same ranks of every pipeline, and return that of this rank's pipeline.

    Every rank of the world must make the call. (With ``use_local_synchronization=True`` only the members would have to,
    but torch then derives a group's name from the number of groups that a process has, which differs between stages.)
    All models whose pipelines have the same ranks share the groups.

    Args:
        pp: this rank's place on its pipeline.
        pipelines: the global ranks of each pipeline of the world, this rank's among them.
        members: the ranks of a pipeline that get a group.
        purpose: what the group is for.

    Returns:
        The group; None if this rank is not a member.
    """
    own = None
    for ranks in pipelines:
        group = shared_group([ranks[member] for member in members], purpose)
        if dist.get_rank() in ranks and pp.rank in members:
            own = group
    return own


class Links:
    """The channels of this rank.

    Args:
        pp: the pipeline's axis.
        groups: for each pair (sender, receiver) of ranks on the axis that exchange, the group of that direction.
        device: the device of the tensors.
    """

    def __init__(self, pp: Axis, groups: Mapping[tuple[int, int], Any], device: torch.device):
        self.pp, self.device = pp, device
        self._groups = groups
        self._sent: dict[int, deque[list[tuple[Any, Tensor]]]] = {}  # by receiver: the messages of each crossing
        self._arrived: dict[int, int] = {}  # by receiver, the number of crossings that were settled

    @own_collectives()
    def send(self, crossing: Crossing, receiver: int, *, announced: int = 0) -> None:
        """Start to send tensors to a rank of the pipeline; they must not be changed until they have arrived.

        Args:
            crossing: the tensors; none if the sender has failed before it knew them.
            receiver: the rank of the pipeline.
            announced: the number of tensors whose shapes and dtypes the receiver does not know, which are then sent
                before.
        """
        group = self._groups[self.pp.rank, receiver]
        place = dist.get_group_rank(group, self._global(receiver))
        xs = [x.detach().contiguous() for x in crossing]
        header = [_header(format_of(crossing), announced, self.device)] if announced else []
        messages = [(dist.isend(y, group=group, group_dst=place), y) for y in (*header, *xs)]
        self._sent.setdefault(receiver, deque()).append(messages)

    @own_collectives()
    def send_beside(self, x: Tensor, receiver: int) -> None:
        """Start to send what the host knows beside the last crossing to a rank."""
        group = self._groups[self.pp.rank, receiver]
        place, x = dist.get_group_rank(group, self._global(receiver)), x.to(wire_device(group=group))
        self._sent[receiver][-1].append((dist.isend(x, group=group, group_dst=place, tag=_BESIDE), x))

    @own_collectives()
    def receive_beside(self, size: int, sender: int) -> Tensor:
        """Wait for the bytes that the host of a rank sends beside a crossing that has arrived."""
        group = self._groups[sender, self.pp.rank]
        x = torch.empty(size, dtype=torch.uint8, device=wire_device(group=group))
        work = dist.irecv(x, group=group, group_src=dist.get_group_rank(group, self._global(sender)), tag=_BESIDE)
        wait_for_message(work, group, x.device)
        return x.cpu()

    @own_collectives()
    def from_rank(self, x: Tensor, source: int) -> Tensor:
        """Return on all ranks of the pipeline what the host of one of them knows."""
        x = x.to(wire_device(group=self.pp.group))
        dist.broadcast(x, group=self.pp.group, group_src=source)
        return x.cpu()

    def settle(self, receiver: int, count: int) -> None:
        """Wait until the first ``count`` crossings that were sent to a rank in this step have arrived; let them go."""
        while self._arrived.get(receiver, 0) < count:
            for work, x in self._sent[receiver].popleft():
                wait_for_message(work, self._groups[self.pp.rank, receiver], x.device)
            self._arrived[receiver] = self._arrived.get(receiver, 0) + 1

    def end(self) -> None:
        """Wait until everything that was sent in this step has arrived."""
        for receiver, sent in self._sent.items():
            self.settle(receiver, self._arrived.get(receiver, 0) + len(sent))
        self._sent, self._arrived = {}, {}

    def receiver(self, sender: int, expected: Iterable[Expected]) -> Receiver:
        """Return an object that receives the expected crossings from a rank of the pipeline, in their order."""
        group = self._groups[sender, self.pp.rank]
        return Receiver(group, dist.get_group_rank(group, self._global(sender)), deque(expected), self.device)

    def _global(self, rank: int) -> int:
        assert self.pp.group is not None
        return dist.get_global_rank(self.pp.group, rank)


class Receiver:
    """Receives crossings in the sender's order, with up to ``AHEAD`` receives posted before they are needed.

    Args:
        group: the channel's process group.
        source: the sender's rank in the group.
        expected: the crossings, in the sender's order.
        device: the device to receive on.
    """

    def __init__(self, group: dist.ProcessGroup, source: int, expected: deque[Expected], device: torch.device):
        self._group, self._source, self._expected, self._device = group, source, expected, device
        self._posted: dict[Hashable, list[tuple[Any, Tensor]]] = {}
        self.post()

    @own_collectives()
    def post(self) -> None:
        """Post receives until ``AHEAD`` of them are waiting, or the format of the next crossing is not known yet."""
        while self._expected and self._expected[0].format() is not None and len(self._posted) < AHEAD:
            self._post_next()

    def _post_next(self) -> None:
        item = self._expected.popleft()
        format = item.format()
        if format is None:
            header = torch.empty(item.count, 2 + _MOST_DIMS, dtype=torch.int64, device=self._device)
            self._wait(dist.irecv(header, group=self._group, group_src=self._source))
            format = tuple((tuple(shape[:ndim]), DTYPES[code]) for code, ndim, *shape in header.tolist() if code >= 0)
        found = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in format]
        self._posted[item.key] = [(dist.irecv(x, group=self._group, group_src=self._source), x) for x in found]

    @own_collectives()
    def take(self, key: Hashable) -> Crossing:
        """Wait for a crossing, and return it."""
        while key not in self._posted:
            self._post_next()
        found = self._posted.pop(key)
        for work, _ in found:
            self._wait(work)
        self.post()
        return tuple(x for _, x in found)

    def _wait(self, work: dist.Work | None) -> None:
        wait_for_message(work, self._group, self._device)


def _header(format: Format, count: int, device: torch.device) -> Tensor:
    rows = [[DTYPES.index(dtype), len(shape), *shape, *[0] * (_MOST_DIMS - len(shape))] for shape, dtype in format]
    return torch.tensor(rows or [[-1] * (2 + _MOST_DIMS)] * count, device=device)
