"""Synchronise gradients by hand: backward under ``no_sync``, then one fused all-reduce before the step.

Run it with ``torchrun --nproc-per-node 2 examples/primitives/no_sync_by_hand.py``. A custom autograd function
needs none of this: under DataParallel, it works like any other operation.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshwright as mw


class CustomTanh(torch.autograd.Function):
    """tanh with a custom backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * (1 - y.square())


class SimpleNet(nn.Module):
    """A linear layer behind the custom function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(CustomTanh.apply(x))


def main() -> None:
    ddp = mw.DataParallel(SimpleNet())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)

    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)  # each rank draws its own rows
    for _ in range(10):
        with ddp.no_sync():  # gradients stay this rank's own
            ddp(torch.randn(2, 2, requires_grad=True)).mean().backward()
        mw.fused_allreduce_gradients(ddp.parameters())
        optimizer.step()
        optimizer.zero_grad()
    print(f"weights after training: {sum(p.sum().item() for p in ddp.parameters()):.9f}")


if __name__ == "__main__":
    main()
