"""Gather a tensor whose rows are sharded over two ranks.

torchrun --nproc-per-node 2 -m examples.primitives.shard_to_replicate
"""

import torch

import meshwright as mw
from examples.primitives.runs import compare, launch, show

DATA = [[1, 2, 3], [4, 5, 6]]


def main() -> None:
    mesh = mw.ProcessMesh([0, 1], dim_names=["x"])
    before = mw.shard_tensor(DATA, mesh, [mw.Shard(0)])
    show("before", before.to_local())
    after = mw.reshard(before, mesh, [mw.Replicate()])
    show("after", after.to_local())
    compare("after", after.to_local(), torch.tensor(DATA))


if __name__ == "__main__":
    launch(main)
