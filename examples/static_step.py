"""A training step as one call: the loop of shard_dataloader.py, and the same loop with to_static.

RUN_STATIC=1 torchrun --nproc-per-node 8 -m examples.static_step

The model has two pipeline stages, each on a mesh of half of the ranks. With RUN_STATIC=0 the program writes out its
loop. Both print each step's loss.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import meshwright as mw
from examples.primitives.runs import launch
from examples.shard_dataloader import BATCH_SIZE, RandomRows, Stages, loss_of


def stage_meshes() -> list[mw.ProcessMesh]:
    """Return a mesh of the first half of the ranks and one of the second half, with the axes x and y."""
    size = dist.get_world_size() // 2
    ranks = torch.arange(2 * size).reshape(2, 2, size // 2)
    return [mw.ProcessMesh(part.tolist(), dim_names=["x", "y"]) for part in ranks]


def run(*, is_static: bool) -> list[float]:
    """Train, and return each step's loss."""
    meshes = stage_meshes()
    model = Stages(meshes)
    loader = mw.shard_dataloader(DataLoader(RandomRows(), batch_size=BATCH_SIZE), meshes=meshes, shard_dims="x")
    optimizer = mw.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.001))
    step = mw.to_static(model, loader, loss_of, optimizer).train() if is_static else None
    losses = []
    for inputs, label in loader():
        if step is not None:
            loss = step(inputs, label)
        else:
            loss = loss_of(model(inputs), label)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss = mw.reshard(loss, mw.ProcessMesh(range(dist.get_world_size())), [mw.Replicate()]).to_local()
        losses.append(loss.item())
    return losses


def main() -> None:
    losses = run(is_static=os.environ.get("RUN_STATIC", "1") == "1")
    if dist.get_rank() == 0:
        for number, loss in enumerate(losses):
            print(f"step:{number}, loss:{loss}", flush=True)


if __name__ == "__main__":
    launch(main)
