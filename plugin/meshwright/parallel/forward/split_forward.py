"""Runs one batch as several micro-batches inside ``model(**batch)``: the passes, the joined output, and the refusal of
hooks that belong to the whole call.

All but the last micro-batch run forward and backward inside the call, and their gradients are summed
separately. The call returns the loss of the whole batch. The backward of this loss runs the backward of
the last micro-batch and adds the summed gradients, so reduction still overlaps with computation and
happens once. Without ``backward()``, no gradients stay behind. Under ZeRO stages 2 and 3, each micro-batch's
gradients are reduced as they arrive, and each rank keeps its shard of their sum.

Such a hook has what the wrapper made of the whole rows, as PEFT's aLoRA counts the tokens from where an adapter begins.

The user's loop does not change. ``BatchSchema`` (``parallel/batch/schema.py``) says which part of each argument belongs
to which row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from meshwright.autograd import Node, TensorFunction, keeps_graph
from meshwright.containers import rebuilt
from meshwright.errors import PlanError, UnreadableTensorError
from meshwright.facts import Facts
from meshwright.faults.guard import Guard
from meshwright.mesh.axes import Axis
from meshwright.parallel.autograd_graph import loss_of
from meshwright.parallel.batch.items import BatchFormat
from meshwright.parallel.batch.mean_over_ranks import GlobalMean
from meshwright.parallel.batch.mixed_rows import FixedInputs
from meshwright.parallel.batch.schema import Batch, BatchSchema
from meshwright.parallel.batch.share import cut
from meshwright.parallel.collectives import largest
from meshwright.parallel.draws.device_draws import DeviceDraws
from meshwright.parallel.experts.load_balancing import PartedRouterLogits
from meshwright.parallel.foreign_hooks import origin
from meshwright.parallel.forward.writes import WritesPerPiece
from meshwright.parallel.gradients.summed import TWICE, UNSPLIT, LossScale, SummedGradients
from meshwright.parallel.gradients.sync import GradientSync
from meshwright.parallel.losses.causal_lm import BatchLoss
from meshwright.parallel.method_chain import BatchStep, ChainStep, StepOrder
from meshwright.parallel.shards.stand_in import ShardedLogits, StandIn, is_stand_in
from meshwright.plan.config import ParallelPlan
from meshwright.temporarily import temporarily

_Join = Callable[[Tensor, list[Any]], Tensor]  # a tensor of the last output, and its counterparts


class Pieces:
    """Collects the outputs of one batch's micro-batches.

    Args:
        rows: the number of rows of each micro-batch; 0 for a micro-batch that only keeps this rank in step.
        keeps: whether the output tensors of all micro-batches are kept (``ToDistributedConfig.gather_logits``).
        mean: the mean that the model's loss is, which knows what the forward has added to it.
    """

    def __init__(self, rows: list[int], *, keeps: bool, mean: GlobalMean):
        self.rows, self.keeps, self.mean = rows, keeps, mean
        self._outputs: list[object] = []

    def add(self, output: object) -> None:
        """Add the output of the next micro-batch. The output of the last one goes to :meth:`whole`."""
        if self.keeps:
            self._outputs.append(_mapped(output, lambda x, _: x.detach(), []))

    def whole(self, last: object, loss: Tensor) -> object:
        """Return the output of the batch, given the output of its last micro-batch and the batch's loss."""
        if len(self.rows) == 1:
            return last
        return _mapped(last, self._whole, self._outputs, loss)

    def _whole(self, last: Tensor, before: list[Tensor]) -> Tensor:
        if last is self.mean.last_added:
            return read_only(self.mean.all_added)
        if not last.ndim:
            return UnaddedNumber.of_shape((), last.dtype, last.device)
        of_batch = (sum(self.rows), *last.shape[1:])
        if not self.keeps:
            return UnkeptOutput.of_shape(of_batch, last.dtype, last.device)
        outputs = [*before, last.detach()]
        if any(len(x) != max(rows, 1) for x, rows in zip(outputs, self.rows, strict=True)):  # it has no dim of rows
            return UnkeptOutput.of_shape(last.shape, last.dtype, last.device)
        return read_only(torch.cat([x[:rows] for x, rows in zip(outputs, self.rows, strict=True)]))


def _mapped(output: object, join: _Join, before: list[Any], loss: Tensor | None = None) -> object:
    """Return an output in which ``join(tensor, [its counterparts in before])`` replaces each tensor but the loss."""

    if isinstance(output, Tensor):
        return output if loss is None else loss
    if isinstance(output, tuple | list):
        rest = [_joined(x, [other[i] for other in before], join) for i, x in enumerate(output) if i]
        return rebuilt(output, [output[0] if loss is None else loss, *rest])
    names = list(output) if isinstance(output, MutableMapping) else list(vars(output))
    others = {n: [getattr(other, n) for other in before] for n in names}
    named = {n: _joined(getattr(output, n), others[n], join) for n in names if n != "loss"}
    named["loss"] = getattr(output, "loss", None) if loss is None else loss
    if isinstance(output, MutableMapping):
        return type(output)(**named)
    new = copy.copy(output)
    vars(new).update(named)
    return new


# Not a closure: one that calls itself is a reference cycle, which would hold the outputs until the next collection.
def _joined(value: object, others: list[Any], join: _Join) -> object:
    if isinstance(value, ShardedLogits | PartedRouterLogits):  # these already raise when they are read
        return value
    if isinstance(value, Tensor):
        return join(value, others)
    if isinstance(value, tuple | list):
        return tuple(_joined(x, [other[i] for other in others], join) for i, x in enumerate(value))
    return None  # drop a cache, which training does not use


def read_only(logits: Tensor) -> Tensor:
    """Return logits that can be read, but raise in the backward pass of a loss that the program computes of them."""
    return _Read.apply(logits.requires_grad_())


class _Read(TensorFunction):
    """Allows reading joined outputs, and raises in backward, since most micro-batches' backward passes are over."""

    has_graph = True  # backward always raises an error of its own

    @staticmethod
    def forward(ctx: Node, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Node, grad: Tensor) -> Tensor:
        raise UnreadableTensorError(
            "a second loss on outputs.logits, or on another output, would not reach the parameters: the plan runs this "
            "batch as micro-batches, whose backward passes are over when the output is read. Set "
            "ParallelPlan(gradient_accumulation_steps=1, micro_batch_size=None, pp=1) and accumulate in the loop. For "
            "a metric, read outputs.logits.detach()"
        )


class UnkeptOutput(StandIn):
    """Stands in for an output of the whole batch that was not kept; reading it raises."""

    MESSAGE = (
        "this output was not kept: the plan runs the batch as micro-batches and keeps only their loss, so that "
        "their outputs need not fit in memory together. To read outputs.logits of the batch, pass "
        "ToDistributedConfig(gather_logits=True), or call the model in eval mode or without labels"
    )


class UnaddedNumber(StandIn):
    """Stands in for a number of the whole batch that does not follow from the numbers of its micro-batches."""

    MESSAGE = (
        "the plan runs the batch as micro-batches, each of which has a number of its own here, and the number of the "
        "whole batch is unknown. Set ParallelPlan(gradient_accumulation_steps=1, micro_batch_size=None) "
        "and accumulate in the loop, or call the model in eval mode or without labels"
    )


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
        facts: Facts,
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
        super().__init__(facts.model)
        self.plan, self.dp, self.syncs, self.loss, self.format = plan, dp, syncs, loss, format
        self.scale, self.draws, self.keeps_logits = scale, draws, keeps_logits
        self.writes, self.fixed = WritesPerPiece(facts, guard), FixedInputs("Each micro-batch")

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


class WrapperCall(ChainStep):
    """A step of a wrapper's forward that notes which hooks there are before the wrapper adds its own.

    Args:
        wrapper: the wrapper.
    """

    order = StepOrder.CALL_HOOKS

    def __init__(self, wrapper: nn.Module) -> None:
        self.library = _library(type(wrapper).__module__)
        self.first, self.is_running = RemovableHandle.next_id, False

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.first = RemovableHandle.next_id  # the numbers of hooks ascend
        with temporarily(self, is_running=True):
            return self.method(*args, **kwargs)


class RefusesCallHooks(BatchStep):
    """A step of the model inside of wrappers that looks for hooks of this call.

    Args:
        model: the model.
        call: the step of the outermost wrapper.
        plan: the plan, which has cp or micro-batches.
        dp: the axis over which the batch is already split.
    """

    order = StepOrder.CALL_HOOKS

    def __init__(self, model: nn.Module, call: WrapperCall, plan: ParallelPlan, dp: Axis):
        super().__init__(model)
        self.call, self.plan, self.dp = call, plan, dp
        self.modules = list(model.named_modules())

    def __call__(self, *args: object, **kwargs: object) -> object:
        for name, module in self.modules:
            hooks = module._forward_pre_hooks
            last = next(reversed(hooks), -1)
            if last >= self.call.first and self._is_of_call(hooks[last]):
                self._check(name, hooks[last], self.batch_of(args, kwargs))
                break
        return self.method(*args, **kwargs)

    def _is_of_call(self, hook: object) -> bool:
        """Return whether a hook is of one call: outside of the wrapper's forward, as in its generate, its own alone."""
        library = _library(origin(hook))
        return library == self.call.library or (self.call.is_running and library != "meshwright")

    def _check(self, name: str, hook: object, batch: dict[str, object]) -> None:
        schema = BatchSchema(batch)
        trains = self.model.training and torch.is_grad_enabled() and schema.targets is not None
        count = count_micro_batches(self.plan, schema.rows, self.dp) if trains else 1
        if self.plan.cp == 1 and count == 1:
            return
        part, cure = f"cp={self.plan.cp} gives it some tokens of each row", "cp=1"
        if self.plan.cp == 1:
            part = f"a pass has one of {count} micro-batches"
            cure = "gradient_accumulation_steps=1, micro_batch_size=None"
        raise PlanError(
            f"{name} has a hook for this call alone ({origin(hook)}), made for the whole rows of the batch, as aLoRA's "
            f"is, but {part}, so it would act on other tokens than on one device. Use ParallelPlan({cure})"
        )


def _library(name: str) -> str:
    return name.partition(".")[0]
