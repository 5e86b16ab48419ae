"""Steps of torch's own schedule classes, over the same stages."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, schedules

from benchmarks.schedules.model import Sizes
from benchmarks.schedules.torch_stages import STAGES
from meshwright.plan.partition import even_stages
from meshwright.plan.schedule import chunks_of, stages_of_rank

CLASSES: dict[str, Any] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zb-h1": schedules.ScheduleInterleavedZeroBubble,  # with one stage on each rank it is ZB-H1
    "zbv": schedules.ScheduleZBVZeroBubble,
}


class TorchSchedule:
    """A step of one of torch's schedules.

    Args:
        schedule: our name of the schedule.
        sizes: the model and the rows.
        kind: the kind of the stages, one of ``STAGES``.
    """

    def __init__(self, schedule: str, sizes: Sizes, kind: str):
        p, rank, v = dist.get_world_size(), dist.get_rank(), chunks_of(schedule)
        counts = even_stages(sizes.layers, p * v)
        self.batch = sizes.batch()
        self.own = stages_of_rank(schedule, rank, p, v)
        self.last = p * v - 1
        self.named: list[tuple[str, Tensor]] = []  # with the names of the whole model, for each stage
        stages: list[Any] = []
        for s in self.own:
            whole = sizes.model()
            self.named += whole.named_parameters()
            module: Any = STAGES[kind](whole, range(sum(counts[:s]), sum(counts[: s + 1])))
            stages.append(PipelineStage(module, s, p * v, torch.device("cpu")))
        given = stages if schedule not in ("gpipe", "1f1b") else stages[0]
        self.schedule = CLASSES[schedule](given, sizes.micro_batches, loss_fn=stages[0].submod.loss)

    def step(self) -> None:
        """Compute the gradients of a step."""
        ids, labels = self.batch["input_ids"], self.batch["labels"]
        args = (ids,) if 0 in self.own else ()
        options: dict[str, Any] = {"target": labels, "losses": []} if self.last in self.own else {}
        self.schedule.step(*args, **options, return_outputs=False)

    def zero_grad(self) -> None:
        for _, parameter in self.named:
            parameter.grad = None

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of this rank's stages, under the names of the whole model."""
        return {name: p.grad for name, p in self.named if p.grad is not None}
