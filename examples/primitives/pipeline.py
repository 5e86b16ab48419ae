"""A pipeline of two stages: the first layer is on 4 ranks, the second on 4 other ranks.

torchrun --nproc-per-node 8 -m examples.primitives.pipeline
"""

from torch import Tensor

import meshwright as mw
from examples.primitives.mlp import Mlp, check_against_one_process, train
from examples.primitives.runs import launch, show

stage0 = mw.ProcessMesh([0, 1, 2, 3], dim_names=["x"])
stage1 = mw.ProcessMesh([4, 5, 6, 7], dim_names=["x"])
world = mw.ProcessMesh(range(8), dim_names=["x"])


class PipelineMlp(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.w0 = mw.shard_tensor(self.w0, stage0, [mw.Replicate()])
        self.w1 = mw.shard_tensor(self.w1, stage1, [mw.Replicate()])

    def forward(self, x: Tensor) -> Tensor:
        y = mw.shard_tensor(x, stage0, [mw.Replicate()]) @ self.w0
        y = mw.reshard(y, stage1, [mw.Replicate()])  # to the next stage; backward sends the gradient back
        return y @ self.w1


def main() -> None:
    one = Mlp()
    model = PipelineMlp()
    losses = train(model)
    show("w0", model.w0.to_local())
    check_against_one_process(model, one, losses, world)


if __name__ == "__main__":
    launch(main)
