"""Build a model without memory (deferred weights), and train it on 2 ranks with a loader.

torchrun --nproc-per-node 2 -m examples.primitives.deferred_weights
"""

import contextlib

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

import meshwright as mw
from examples.primitives.runs import compare, launch, show

SAMPLES, SEQUENCE, HIDDEN, INNER = 20, 3, 8, 16


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w0 = nn.Parameter(torch.empty(HIDDEN, INNER).normal_())
        self.w1 = nn.Linear(INNER, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.w1(x @ self.w0)


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs, labels = torch.rand((2, SAMPLES, SEQUENCE, HIDDEN), generator=generator)
    return TensorDataset(inputs, labels)


def loader() -> DataLoader:
    data = dataset()
    return DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), batch_size=4, drop_last=False))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: DataLoader) -> None:
    for inputs, labels in batches:
        nn.functional.mse_loss(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def built(*, deferred: bool) -> tuple[Mlp, torch.optim.Optimizer]:
    torch.manual_seed(0)
    with mw.deferred_init() if deferred else contextlib.nullcontext():
        model = Mlp()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def main() -> None:
    model, optimizer = built(deferred=True)
    show("w1 before", torch.tensor(model.w1.weight.is_meta))
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(dp=2))
    model, optimizer, batches = mw.to_distributed(model, optimizer, loader(), config=config)
    one, its_optimizer = built(deferred=False)
    for (name, weight), expected in zip(model.named_parameters(), one.parameters(), strict=True):
        assert torch.equal(weight, expected), name  # to the bit

    train(model, optimizer, batches)
    train(one, its_optimizer, loader())
    for (name, weight), expected in zip(model.named_parameters(), one.parameters(), strict=True):
        compare(name, weight.detach(), expected.detach(), tolerance=1e-5)


if __name__ == "__main__":
    launch(main)
