"""Point-to-point channels between the ranks of one pipeline.

A channel carries tensors from one rank to another, in the sender's order, which the receiver knows from the schedule.
Each direction of each pair has a process group of its own. NCCL has no tags and runs the operations of one group in the
order of issue, so two ranks that send to each other through one group could each wait for the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.faults.interpose import own_collectives
from meshwright.mesh.axes import Axis
from meshwright.mesh.process_group import wait_for_message
from meshwright.mesh.shared_groups import shared_group

AHEAD = 3  # number of receives that are posted before their tensors are needed


@dataclass(frozen=True)
class Expected:
    """A tensor that a rank will receive.

    Args:
        key: the identity of the tensor among the channel's tensors.
        shape: its shape.
        dtype: its dtype; None if the sender announces it, see :meth:`Links.send`.
        numbers: how many float64 numbers arrive with it.
    """

    key: Hashable
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    numbers: int = 0


# What crosses from stage to stage: hidden states or their gradient, and the numbers that travel with them, if any.
Crossing = tuple[Tensor, Tensor | None]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


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
        self._sent: dict[int, deque[list[tuple[Any, Tensor]]]] = {}  # by receiver: the messages of each tensor
        self._arrived: dict[int, int] = {}  # by receiver, the number of tensors that were settled

    @own_collectives()
    def send(self, x: Tensor, receiver: int, *, announces: bool = False, numbers: Tensor | None = None) -> None:
        """Start to send a tensor to a rank of the pipeline; the tensor must not be changed until it has arrived.

        Args:
            x: the tensor.
            receiver: the rank of the pipeline.
            announces: whether the receiver does not know the dtype, which is then sent before.
            numbers: float64 numbers that are sent behind it.
        """
        group = self._groups[self.pp.rank, receiver]
        place = dist.get_group_rank(group, self._global(receiver))
        x = x.detach().contiguous()
        code = [torch.tensor([DTYPES.index(x.dtype)], device=self.device)] if announces else []
        behind = [] if numbers is None else [numbers.detach().contiguous()]
        messages = [(dist.isend(y, group=group, group_dst=place), y) for y in (*code, x, *behind)]
        self._sent.setdefault(receiver, deque()).append(messages)

    def settle(self, receiver: int, count: int) -> None:
        """Wait until the first ``count`` tensors that were sent to a rank in this step have arrived; let go of them."""
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
        """Return an object that receives the expected tensors from a rank of the pipeline, in their order."""
        group = self._groups[sender, self.pp.rank]
        return Receiver(group, dist.get_group_rank(group, self._global(sender)), deque(expected), self.device)

    def _global(self, rank: int) -> int:
        assert self.pp.group is not None
        return dist.get_global_rank(self.pp.group, rank)


class Receiver:
    """Receives tensors in the sender's order, with up to ``AHEAD`` receives posted before they are needed.

    Args:
        group: the channel's process group.
        source: the sender's rank in the group.
        expected: the tensors, in the sender's order.
        device: the device to receive on.
    """

    def __init__(self, group: dist.ProcessGroup, source: int, expected: deque[Expected], device: torch.device):
        self._group, self._source, self._expected, self._device = group, source, expected, device
        self._posted: dict[Hashable, list[tuple[Any, Tensor]]] = {}
        self.post()

    @own_collectives()
    def post(self) -> None:
        """Post receives until ``AHEAD`` of them are waiting, or the dtype of the next tensor is not known yet."""
        while self._expected and self._expected[0].dtype is not None and len(self._posted) < AHEAD:
            self._post_next()

    def _post_next(self) -> None:
        item = self._expected.popleft()
        dtype = item.dtype
        if dtype is None:
            code = torch.empty(1, dtype=torch.int64, device=self._device)
            self._wait(dist.irecv(code, group=self._group, group_src=self._source))
            dtype = DTYPES[int(code)]
        found = [torch.empty(item.shape, dtype=dtype, device=self._device)]
        if item.numbers:
            found.append(torch.empty(item.numbers, dtype=torch.float64, device=self._device))
        self._posted[item.key] = [(dist.irecv(x, group=self._group, group_src=self._source), x) for x in found]

    @own_collectives()
    def take(self, key: Hashable) -> Crossing:
        """Wait for a tensor and the numbers behind it, and return them."""
        while key not in self._posted:
            self._post_next()
        found = self._posted.pop(key)
        for work, _ in found:
            self._wait(work)
        self.post()
        x, numbers = found[0][1], found[1][1] if len(found) > 1 else None
        return x, numbers

    def _wait(self, work: dist.Work | None) -> None:
        wait_for_message(work, self._group, self._device)
