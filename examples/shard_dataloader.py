"""A loader whose inputs and labels live on different meshes: two pipeline stages of 2 x 2 ranks each.

torchrun --nproc-per-node 8 -m examples.shard_dataloader

The first program shards batches of an input and a label along "x". The second shards dict batches, whose "inputs" are
a list of two, along "dp". Both train, and compare each step's loss with that of one process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import meshwright as mw
from examples.primitives.runs import compare, launch

SEQUENCE, HIDDEN, SAMPLES, BATCH_SIZE = 4, 8, 8, 2


class RandomRows(Dataset[Any]):
    """Random rows of shape [sequence, hidden], each with a label."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1024)
        self.inputs = torch.rand(2, SAMPLES, SEQUENCE, HIDDEN, dtype=torch.float64, generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.inputs[0, index], float(index)


class RandomDicts(RandomRows):
    """The same rows as dicts with two inputs."""

    def __getitem__(self, index: int) -> Any:
        return {"inputs": [self.inputs[0, index], self.inputs[1, index]], "label": float(index)}


class Stages(nn.Module):
    """A model with one layer on each mesh; without meshes, the same model for one process."""

    def __init__(self, meshes: list[mw.ProcessMesh] | None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.meshes = meshes
        self.w0 = nn.Parameter(torch.randn(HIDDEN, HIDDEN, dtype=torch.float64, generator=generator))
        self.w1 = nn.Parameter(torch.randn(HIDDEN, HIDDEN, dtype=torch.float64, generator=generator))
        if meshes:
            self.w0 = mw.shard_tensor(self.w0, meshes[0], [mw.Replicate(), mw.Shard(1)])
            self.w1 = mw.shard_tensor(self.w1, meshes[1], [mw.Replicate(), mw.Shard(0)])

    def forward(self, *inputs: Tensor) -> Tensor:
        y = sum(x @ self.w0 for x in inputs)
        if self.meshes:
            y = mw.reshard(y, self.meshes[1], [mw.Shard(0), mw.Shard(2)])
        return y @ self.w1


def loss_of(logits: Tensor, label: Tensor) -> Tensor:
    """Return the loss, which is a sum over the batch, as in one process."""
    return ((logits.sum(dim=[1, 2]) - label) ** 2).sum()


def run(name: str, dataset: Dataset[Any], axis: str, **options: Any) -> None:
    """Train on two meshes and in one process, and compare the losses."""
    meshes = [mw.ProcessMesh([[0, 1], [2, 3]], [axis, "mp"]), mw.ProcessMesh([[4, 5], [6, 7]], [axis, "mp"])]
    plain = DataLoader(dataset, batch_size=BATCH_SIZE)
    loader = mw.shard_dataloader(plain, meshes, shard_dims=axis, **options)
    model, one = Stages(meshes), Stages(None)
    # foreach=False: torch's operators over lists need all tensors on one mesh, and the stages have two.
    optimizers = [torch.optim.AdamW(part.parameters(), foreach=False) for part in (model, one)]
    whole = mw.ProcessMesh(range(8), ["world"])
    for step, (batch, whole_batch) in enumerate(zip(loader(), plain, strict=True)):
        inputs, label = unpack(batch)
        loss = loss_of(model(*inputs), label)
        # The loss is on the second stage; reshard sends it to every rank.
        value = mw.reshard(loss, whole, [mw.Replicate()]).to_local()
        inputs, label = unpack(whole_batch)
        expected = loss_of(one(*inputs), label)
        for part in (loss, expected):
            part.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        compare(f"{name} step {step}, loss {value.item():.3f}", value, expected)


def unpack(batch: Any) -> tuple[list[Tensor], Tensor]:
    """Return the inputs and the label of either kind of batch."""
    return (batch["inputs"], batch["label"]) if isinstance(batch, dict) else ([batch[0]], batch[1])


def main() -> None:
    run("list", RandomRows(), axis="x")
    run("dict", RandomDicts(), axis="dp", input_keys=["inputs", "label"])


if __name__ == "__main__":
    launch(main)
