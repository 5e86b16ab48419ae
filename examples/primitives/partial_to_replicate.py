"""Reduce a partial sum over two ranks, so that both ranks hold the result.

torchrun --nproc-per-node 2 -m examples.primitives.partial_to_replicate
"""

import torch

import meshwright as mw
from examples.primitives.runs import compare, launch, show

DATA = [[1, 2, 3], [4, 5, 6]]


def main() -> None:
    mesh = mw.ProcessMesh([0, 1], dim_names=["x"])
    before = mw.shard_tensor(DATA, mesh, [mw.Partial()])
    show("before", before.to_local())
    after = mw.reshard(before, mesh, [mw.Replicate()])
    show("after", after.to_local())
    compare("after", after.to_local(), torch.tensor(DATA))


if __name__ == "__main__":
    launch(main)
