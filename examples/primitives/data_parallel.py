"""Data parallelism: the batch is split over 4 ranks, and each rank holds the whole weights.

torchrun --nproc-per-node 4 -m examples.primitives.data_parallel
"""

from torch import Tensor

import meshwright as mw
from examples.primitives.mlp import Mlp, check_against_one_process, train
from examples.primitives.runs import launch, show

mesh = mw.ProcessMesh([0, 1, 2, 3], dim_names=["x"])


class DataParallelMlp(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.w0 = mw.shard_tensor(self.w0, mesh, [mw.Replicate()])
        self.w1 = mw.shard_tensor(self.w1, mesh, [mw.Replicate()])

    def forward(self, x: Tensor) -> Tensor:
        x = mw.shard_tensor(x, mesh, [mw.Shard(0)])
        return x @ self.w0 @ self.w1


def main() -> None:
    one = Mlp()
    model = DataParallelMlp()
    losses = train(model)
    show("w0", model.w0.to_local())
    check_against_one_process(model, one, losses, mesh)


if __name__ == "__main__":
    launch(main)
