"""Tensor parallelism: w0 is sharded by columns and w1 by rows, so each rank computes a part of every sum.

torchrun --nproc-per-node 4 -m examples.primitives.tensor_parallel
"""

from torch import Tensor

import meshwright as mw
from examples.primitives.mlp import Mlp, check_against_one_process, train
from examples.primitives.runs import launch, show

mesh = mw.ProcessMesh([0, 1, 2, 3], dim_names=["x"])


class TensorParallelMlp(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.w0 = mw.shard_tensor(self.w0, mesh, [mw.Shard(1)])
        self.w1 = mw.shard_tensor(self.w1, mesh, [mw.Shard(0)])

    def forward(self, x: Tensor) -> Tensor:
        x = mw.shard_tensor(x, mesh, [mw.Replicate()])
        z = x @ self.w0 @ self.w1  # Partial: not yet summed over the ranks
        return mw.reshard(z, mesh, [mw.Replicate()])


def main() -> None:
    one = Mlp()
    model = TensorParallelMlp()
    losses = train(model)
    show("w0", model.w0.to_local())
    check_against_one_process(model, one, losses, mesh)


if __name__ == "__main__":
    launch(main)
