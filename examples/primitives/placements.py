"""Shard a tensor along dim 0, along dim 1, and along dims that it does not have, which raises an error.

torchrun --nproc-per-node 2 -m examples.primitives.placements
"""

import torch
import torch.distributed as dist

import meshwright as mw
from examples.primitives.runs import compare, launch, show

DATA = [[1, 2, 3], [4, 5, 6]]


def main() -> None:
    mesh = mw.ProcessMesh([0, 1], dim_names=["x"])
    rank = dist.get_rank()

    rows = mw.shard_tensor(DATA, mesh, [mw.Shard(0)]).to_local()
    show("rows", rows)
    compare("rows", rows, torch.tensor(DATA)[rank : rank + 1])

    columns = mw.shard_tensor(DATA, mesh, [mw.Shard(1)]).to_local()
    show("columns", columns)  # 3 columns on 2 ranks: 2 and 1
    compare("columns", columns, torch.tensor(DATA)[:, 2 * rank : 2 * rank + 2])

    for dim in (2, 3):
        try:
            mw.shard_tensor(DATA, mesh, [mw.Shard(dim)])
        except ValueError as error:
            print(f"rank {rank}: {error}", flush=True)
        else:
            raise AssertionError(f"Shard({dim}) was accepted")


if __name__ == "__main__":
    launch(main)
