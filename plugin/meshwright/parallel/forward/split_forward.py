"""Run one batch as several micro-batches inside ``model(**batch)``, with the user's loop unchanged.

All but the last micro-batch run forward and backward inside the call, and their gradients are summed
separately. The call returns the loss of the whole batch. The backward of this loss runs the backward of
the last micro-batch and adds the summed gradients, so reduction still overlaps with computation and
happens once. Without ``backward()``, no gradients stay behind. Under ZeRO stages 2 and 3, each micro-batch's
gradients are reduced as they arrive, and each rank keeps its shard of their sum.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.autograd import TensorFunction, keeps_graph
from meshwright.faults.guard import Guard
from meshwright.mesh.axes import Axis
from meshwright.parallel.batch.fixed_inputs import FixedInputs
from meshwright.parallel.batch.items import BatchFormat
from meshwright.parallel.batch.schema import Batch, BatchSchema
from meshwright.parallel.batch.share import cut
from meshwright.parallel.collectives import largest
from meshwright.parallel.draws.device_draws import DeviceDraws
from meshwright.parallel.forward.micro_batch_outputs import Pieces
from meshwright.parallel.forward.writes import WritesPerPiece
from meshwright.parallel.gradients.loss_scale import LossScale
from meshwright.parallel.gradients.summed import TWICE, UNSPLIT, SummedGradients
from meshwright.parallel.gradients.sync import GradientSync
from meshwright.parallel.losses.batch_loss import BatchLoss
from meshwright.parallel.method_chain import BatchStep, StepOrder
from meshwright.parallel.output_loss import loss_of
from meshwright.parallel.shards.stand_in import is_stand_in
from meshwright.plan.config import ParallelPlan


class SplitForward(BatchStep):
    """The step of a model whose plan has micro-batches, which splits training batches by rows.

    Args:
        model: a model whose forward returns an output with ``.loss``.
        plan: the plan, which says how many micro-batches there are.
        dp: the axis over which the batch is already split.
        syncs: the model's synchronisers. If all of them can leave the gradients of a pass unreduced (``can_wait``), the
            gradients of inner micro-batches (all but the last) are summed unreduced. Otherwise there is only one
            synchroniser, which reduces these gradients.
        loss: the model's loss, which is made to divide by the counts of the whole batch.
        guard: the guard, by which all ranks raise if forward writes state in each micro-batch; None on one process.
        scale: the scale of the losses of inner micro-batches, if they are in float16.
        format: what the arguments of the model mean.
        draws: what the model's passes draw.
        keeps_logits: whether the outputs of all micro-batches are kept, so that they can be read.
    """

    order = StepOrder.MICRO_BATCHES

    def __init__(
        self,
        model: nn.Module,
        *,
        plan: ParallelPlan,
        dp: Axis,
        syncs: list[GradientSync],
        loss: BatchLoss,
        guard: Guard | None,
        scale: LossScale,
        format: BatchFormat,
        draws: DeviceDraws,
        keeps_logits: bool = False,
    ):
        super().__init__(model)
        self.plan, self.dp, self.syncs, self.loss, self.format = plan, dp, syncs, loss, format
        self.scale, self.draws, self.keeps_logits = scale, draws, keeps_logits
        self.writes, self.fixed = WritesPerPiece(model, guard), FixedInputs("Each micro-batch")

    def __call__(self, *args: object, **kwargs: object) -> object:
        batch = self.batch_of(args, kwargs)
        schema = BatchSchema(batch, self.format)
        if not (self.model.training and torch.is_grad_enabled() and schema.targets is not None):
            return self.method(*args, **kwargs)
        check_inputs(batch)
        self.fixed.see(schema)
        count = count_micro_batches(self.plan, schema.rows, self.dp)
        pieces = Pieces(schema.row_counts(count), keeps=self.keeps_logits, mean=self.loss.mean)
        # num_items_in_batch counts the whole batch, so the divisors are computed before the batch is split.
        counts, num_items = self.loss.counts(batch), batch.get("num_items_in_batch")
        with self.loss.mean.over_micro_batches(counts, num_items, count):
            output = self._run(schema.split(count), pieces)
        self.loss.mean.check_counts()
        return output

    def _run(self, batches: list[dict[str, object]], pieces: Pieces) -> Any:
        *inner, last = batches
        whole = all(sync.reduction.can_wait for sync in self.syncs)
        gradients = _WholeGradients(self.model, self.syncs) if whole else _ReducedGradients(self.syncs)
        total: Tensor | None = None
        scale: Tensor | float | None = None
        self.writes.start()
        spans = [range(high - rows, high) for rows, high in zip(pieces.rows, accumulate(pieces.rows), strict=True)]
        for batch, rows in zip(inner, spans, strict=False):
            self.draws.begin_slice(rows)
            with cut(is_filler=not rows):
                output = self._forward(batch)
                pieces.add(output)
                loss = loss_of(output)
                assert loss is not None
                scale = self.scale.of(loss.device) if total is None else scale
                gradients.add_from(loss if scale is None else loss * scale)
            total = loss.detach() if total is None else total + loss.detach()
            del output, loss
        self.draws.begin_slice(spans[-1])
        with cut():  # the last one has a row of the batch
            output = self._forward(last)
        self.writes.finish()
        if total is None:
            return output
        loss = loss_of(output)
        if scale is None:
            return pieces.whole(output, gradients.attach(loss, total))
        assert loss is not None
        return pieces.whole(output, gradients.attach(loss * scale, total * scale) / scale)

    def _forward(self, batch: dict[str, object]) -> object:
        output = self.method(**batch)
        self.writes.look()
        return self.loss.of_output(batch, output)


def count_micro_batches(plan: ParallelPlan, rows: int, dp: Axis) -> int:
    """Return the number of micro-batches of a batch: the same on all ranks of dp, so that their collectives match."""
    count = plan.count_micro_batches(rows)
    return count if plan.micro_batch_size is None else largest(count, dp)


def check_inputs(batch: Batch) -> None:
    """Raise if an input requires a gradient, which a plan with micro-batches does not compute."""
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.requires_grad:
            raise ValueError(
                f"{name} requires a gradient, but a plan with micro-batches computes gradients of the model's "
                "parameters only. Set ParallelPlan(gradient_accumulation_steps=1, micro_batch_size=None, pp=1), or "
                f"pass {name}.detach()"
            )


class _WholeGradients:
    """The sum of the inner micro-batches' whole gradients, which autograd passes to the parameters."""

    def __init__(self, model: nn.Module, syncs: list[GradientSync]):
        self.sums = SummedGradients((p for p in model.parameters() if p.requires_grad), syncs)

    def add_from(self, loss: Tensor) -> None:
        self.sums.add(self.sums.parameters, self.sums.gradients_of(loss))

    def attach(self, loss: Tensor | None, other: Tensor) -> Tensor:
        return self.sums.attach(loss, other)


class _ReducedGradients:
    """This rank's shard of the sum of the inner micro-batches' gradients."""

    def __init__(self, syncs: list[GradientSync]):
        (self.reduction,) = {sync.reduction for sync in syncs}
        self.first = syncs[0]
        self.sums: dict[int, Tensor] | None = {}

    def add_from(self, loss: Tensor) -> None:
        assert self.sums is not None
        with self.reduction.aside(self.sums), self.first.hooks.off():
            loss.backward()

    def attach(self, loss: Tensor | None, other: Tensor) -> Tensor:
        total: Tensor = _AddReduced.apply(loss, other, self)
        return total

    def add(self, factor: Tensor) -> None:
        sums = self.sums
        if sums is None:
            raise RuntimeError(TWICE)
        self.sums = {key: x if is_stand_in(x) else x.clone() for key, x in sums.items()} if keeps_graph() else None
        if self.first.hooks.are_any:
            self.first.begin()  # the sums are a part of what hooks see
        self.reduction.add(sums, factor)


class _AddReduced(TensorFunction):
    """Adds to a loss a number whose gradients are already reduced."""

    instead = UNSPLIT

    @staticmethod
    def forward(ctx: Any, loss: Tensor, other: Tensor, gradients: _ReducedGradients) -> Tensor:
        ctx.gradients = gradients
        return loss + other

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ctx.gradients.add(grad)
        return grad, None, None
