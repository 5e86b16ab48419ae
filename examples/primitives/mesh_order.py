"""A mesh whose ranks are not in order, and a tensor that is sharded over both axes of the mesh.

torchrun --nproc-per-node 6 -m examples.primitives.mesh_order
"""

import torch.distributed as dist
from torch import arange

import meshwright as mw
from examples.primitives.runs import compare, launch, show


def main() -> None:
    mesh = mw.ProcessMesh([[2, 4, 5], [0, 1, 3]], dim_names=["x", "y"])
    data = arange(1, 13).view(4, 3)
    part = mw.shard_tensor(data, mesh, [mw.Shard(0), mw.Shard(1)])
    show("part", part.to_local())
    row, column = mesh.coordinate(dist.get_rank())
    compare("part", part.to_local(), data[2 * row : 2 * row + 2, column : column + 1])
    compare("whole", mw.reshard(part, mesh, [mw.Replicate(), mw.Replicate()]).to_local(), data)


if __name__ == "__main__":
    launch(main)
