"""The same stages under torch's own schedules, with hand-built modules and torch's own loop."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from benchmarks.schedules.model import Sizes
from meshwright.pipeline.partition import even_stages
from meshwright.pipeline.schedule import chunks_of, stages_of_rank

CLASSES: dict[str, Any] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zb-h1": schedules.ScheduleInterleavedZeroBubble,  # with one stage on each rank it is ZB-H1
    "zbv": schedules.ScheduleZBVZeroBubble,
}


class StageOfLlama(nn.Module):
    """Some layers of a Llama, with the embedding on the first stage, and the norm and the head on the last.

    Args:
        whole: the whole model.
        span: the indices of the layers.
    """

    def __init__(self, whole: Any, span: range):
        super().__init__()
        last = len(whole.model.layers)
        self.embed = whole.model.embed_tokens if span.start == 0 else None
        self.layers = nn.ModuleDict({str(i): whole.model.layers[i] for i in span})
        self.norm, self.head = (whole.model.norm, whole.lm_head) if span.stop == last else (None, None)
        self.rotary = whole.model.rotary_emb

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        positions = torch.arange(x.shape[1])[None]
        table = self.rotary(x, positions)
        for layer in self.layers.values():
            x = layer(x, attention_mask=None, position_ids=positions, position_embeddings=table)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss of a micro-batch; torch's schedules divide by the number of micro-batches."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class TorchSchedule:
    """A step of one of torch's schedules.

    Args:
        schedule: our name of the schedule.
        sizes: the model and the rows.
    """

    def __init__(self, schedule: str, sizes: Sizes):
        p, rank, v = dist.get_world_size(), dist.get_rank(), chunks_of(schedule)
        counts = even_stages(sizes.layers, p * v)
        self.whole, self.batch = sizes.model(), sizes.batch()
        self.own = stages_of_rank(schedule, rank, p, v)
        self.last = p * v - 1
        spans = {s: range(sum(counts[:s]), sum(counts[: s + 1])) for s in self.own}
        self.modules = [StageOfLlama(self.whole, spans[s]) for s in self.own]
        stages = [
            PipelineStage(module, s, p * v, torch.device("cpu"))
            for module, s in zip(self.modules, self.own, strict=True)
        ]
        given = stages if schedule not in ("gpipe", "1f1b") else stages[0]
        self.schedule = CLASSES[schedule](given, sizes.micro_batches, loss_fn=loss_of)

    def step(self) -> None:
        """Compute the gradients of a step."""
        ids, labels = self.batch["input_ids"], self.batch["labels"]
        args = (ids,) if 0 in self.own else ()
        options: dict[str, Any] = {"target": labels, "losses": []} if self.last in self.own else {}
        self.schedule.step(*args, **options, return_outputs=False)

    def zero_grad(self) -> None:
        self.whole.zero_grad()

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of this rank's stages, under the names of the whole model."""
        return {name: p.grad for name, p in self.whole.named_parameters() if p.grad is not None}
