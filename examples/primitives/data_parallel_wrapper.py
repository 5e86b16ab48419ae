"""Train a small network on two processes, each with its own rows.

Run it with ``torchrun --nproc-per-node 2 examples/primitives/data_parallel_wrapper.py``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshwright as mw


class LinearNet(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear1 = nn.Linear(10, 10)
        self.linear2 = nn.Linear(10, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.linear1(x))


def main() -> None:
    ddp = mw.DataParallel(LinearNet())  # joins the launcher's processes, and sends rank 0's weights to all
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.001)
    loss_fn = nn.MSELoss()

    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)  # each rank draws its own rows
    for _ in range(10):
        loss = loss_fn(ddp(torch.randn(10, 10)), torch.randn(10, 1))
        loss.backward()  # averages the gradients over the ranks
        optimizer.step()
        optimizer.zero_grad()
    print(f"weights after training: {sum(p.sum().item() for p in ddp.parameters()):.9f}")


if __name__ == "__main__":
    main()
