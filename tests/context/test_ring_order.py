"""Each hop of a ring is posted before the block that it overlaps is computed, and waited for after it."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.context.flash import FlashCall, flash_attention
from meshwright.context.key_exchange import RingKeys
from meshwright.context.masks import ContextMask
from meshwright.context.ring import RingCall, ring_attention
from meshwright.mesh.axes import Axis
from meshwright.parallel.sequence_parts import SequenceParts

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# K: keys and values leave; G: gradients of keys and values leave; k, g: they are waited for; M: matrix products.
FORWARD = "(KM+k){%d}M+"
# The gradients of a block leave while the next block is computed; at the end they come home.
BACKWARD = "KM+Gk(KM+gGk){%d}M+gGg"


class Order(TorchDispatchMode):
    """Records, in the order of issue, what is sent, what is waited for, and what is multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.events = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.bmm.default, FLASH.default, FLASH_BACKWARD.default):
            self.events += "M"
        return func(*args, **(kwargs or {}))

    def send(self, operations: list[Any]) -> list[Any]:
        letter = "K" if operations[0].tensor.dtype == torch.bfloat16 else "G"  # gradients are added up in float32
        self.events += letter
        works = _send(operations)
        return [_Work(work, self, letter.lower() if i == 0 else "") for i, work in enumerate(works)]


class _Work:
    def __init__(self, work: Any, order: Order, letter: str):
        self.work, self.order, self.letter = work, order, letter

    def wait(self, *limits: Any) -> None:
        self.order.events += self.letter
        self.work.wait(*limits)


_send = dist.batch_isend_irecv


def events_of_a_ring(kernel: str) -> tuple[str, str]:
    axis = Axis("cp", size=dist.get_world_size(), rank=dist.get_rank(), group=dist.group.WORLD)
    length = 16 * axis.size
    runs_of = tuple(SequenceParts(axis).runs(length, rank) for rank in range(axis.size))
    keys = RingKeys(axis, runs_of)
    blocks = RingCall(keys=keys, mask=ContextMask.causal(rows=1, length=length), scale=0.5)
    flash = FlashCall(keys=keys, runs=runs_of[axis.rank], documents=((0,),), scale=0.5)
    q, k, v = (torch.randn(1, 2, 16, 4, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    found = []
    with Order() as order, mock.patch.object(dist, "batch_isend_irecv", order.send):
        output = flash_attention(flash, q, k, v) if kernel == "flash" else ring_attention(blocks, q, k, v)
        found.append(order.events)
        order.events = ""
        output.sum().backward()
    return found[0], order.events


@pytest.mark.parametrize("kernel", ["plain", "flash"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_hops_are_posted_before_the_blocks_they_overlap(
    ranks: int, kernel: str, request: pytest.FixtureRequest
) -> None:
    for forward, backward in request.getfixturevalue(f"pool{ranks}").run(events_of_a_ring, kernel):
        assert re.fullmatch(FORWARD % (ranks - 1), forward), forward
        assert re.fullmatch(BACKWARD % (ranks - 2), backward), backward
