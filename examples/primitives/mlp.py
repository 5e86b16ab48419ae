"""The two-layer model that the training programs share, its data, and its training on one process or on meshes."""

import torch
from torch import Tensor, nn

import meshwright as mw
from examples.primitives.runs import compare

STEPS, BATCH, SEQUENCE, HIDDEN, INNER = 3, 4, 3, 8, 16


class Mlp(nn.Module):
    """Computes x @ w0 @ w1 without placements, as one process does. Every rank draws the same weights."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.w0 = nn.Parameter(torch.randn(HIDDEN, INNER, dtype=torch.float64, generator=generator))
        self.w1 = nn.Parameter(torch.randn(INNER, HIDDEN, dtype=torch.float64, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w0 @ self.w1


def batches() -> list[Tensor]:
    """Return the batches, which are whole on every rank."""
    generator = torch.Generator().manual_seed(1)
    shape = (STEPS, BATCH, SEQUENCE, HIDDEN)
    return list(torch.rand(shape, dtype=torch.float64, generator=generator))


def train(model: nn.Module) -> list[Tensor]:
    """Train, and return the loss of each step; the code is the same on one process and on any mesh."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for x in batches():
        loss = (model(x) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def check_against_one_process(model: nn.Module, one: Mlp, losses: list[Tensor], world: mw.ProcessMesh) -> None:
    """Compare the losses and the trained weights, gathered on every rank, with those of one process."""
    gathered = [mw.reshard(loss, world, [mw.Replicate()]).to_local() for loss in losses]
    compare("losses", torch.stack(gathered), torch.stack(train(one)))
    for (name, weight), expected in zip(model.named_parameters(), one.parameters(), strict=True):
        whole = mw.reshard(weight.detach(), world, [mw.Replicate()]).to_local()
        compare(name, whole, expected.detach())
