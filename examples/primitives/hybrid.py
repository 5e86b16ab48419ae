"""Data, tensor and pipeline parallelism: two stages of 2 x 2 ranks, with the batch split over x and the weights over y.

torchrun --nproc-per-node 8 -m examples.primitives.hybrid
"""

from torch import Tensor

import meshwright as mw
from examples.primitives.mlp import Mlp, check_against_one_process, train
from examples.primitives.runs import launch, show

stage0 = mw.ProcessMesh([[0, 1], [2, 3]], dim_names=["x", "y"])
stage1 = mw.ProcessMesh([[4, 5], [6, 7]], dim_names=["x", "y"])
world = mw.ProcessMesh(range(8), dim_names=["x"])


class HybridMlp(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.w0 = mw.shard_tensor(self.w0, stage0, [mw.Replicate(), mw.Shard(1)])
        self.w1 = mw.shard_tensor(self.w1, stage1, [mw.Replicate(), mw.Shard(0)])

    def forward(self, x: Tensor) -> Tensor:
        y = mw.shard_tensor(x, stage0, [mw.Shard(0), mw.Replicate()]) @ self.w0
        y = mw.reshard(y, stage1, [mw.Shard(0), mw.Shard(2)])  # each rank's part, to a rank of the next stage
        z = y @ self.w1  # Partial along y
        return mw.reshard(z, stage1, [mw.Shard(0), mw.Replicate()])


def main() -> None:
    one = Mlp()
    model = HybridMlp()
    losses = train(model)
    show("w0", model.w0.to_local())
    check_against_one_process(model, one, losses, world)


if __name__ == "__main__":
    launch(main)
