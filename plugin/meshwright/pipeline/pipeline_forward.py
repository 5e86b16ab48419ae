"""The ``forward`` of a decoder whose layers are spread over the ranks of pp."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.errors import PlanError
from meshwright.facts import Facts
from meshwright.faults.interpose import own_collectives
from meshwright.faults.memory_digest import has_values
from meshwright.faults.together import exchange_together, raise_if_any
from meshwright.layout.tensor_layout import layout_of
from meshwright.mesh.axes import Axis
from meshwright.mesh.host_wire import waiting_for_the_gpu
from meshwright.mesh.process_group import wire_device
from meshwright.parallel.async_numbers import is_deferred, read_later
from meshwright.parallel.batch.items import BatchFormat
from meshwright.parallel.batch.mixed_rows import FixedInputs
from meshwright.parallel.batch.schema import Batch, BatchSchema, leaves
from meshwright.parallel.batch.share import cut
from meshwright.parallel.collectives import all_reduce
from meshwright.parallel.draws.stage_states import StageStates
from meshwright.parallel.dropout_streams import Rates
from meshwright.parallel.experts.load_balancing import LoadBalancing
from meshwright.parallel.experts.routers import RouterRecord
from meshwright.parallel.forward.split_forward import check_inputs, count_micro_batches
from meshwright.parallel.forward.user_hooks import HookedModules
from meshwright.parallel.forward.writes import WritesPerPiece
from meshwright.parallel.gradients.summed import LossScale, SummedGradients
from meshwright.parallel.losses.causal_lm import BatchLoss
from meshwright.parallel.method_chain import BatchStep, StepOrder, find_step
from meshwright.parallel.shards.stand_in import own_shape, reading_shards
from meshwright.parallel.tensor_parallel.apply import SequenceRegion
from meshwright.parallel.tensor_parallel.second_inputs import TowerFeatures
from meshwright.pipeline.cut import Cut
from meshwright.pipeline.executor import Boundaries, Step, WeightGradients, run_evaluation, run_training
from meshwright.pipeline.links import DTYPES, Format, Links, pipeline_groups
from meshwright.pipeline.stage_outputs import StageOutputs
from meshwright.pipeline.stages import BesideInputs, Stages
from meshwright.plan.config import ParallelPlan
from meshwright.plan.parts import local_tokens
from meshwright.plan.schedule import SPLIT_BACKWARD, Operation, rank_operations, receiving_stage

# The dtype of the first parameter, that of autocast, and that of the tokens, which may be embeddings.
_Precision = tuple[torch.dtype, torch.dtype | None, torch.dtype]
# The name and dtype of each argument. The loss uses num_items_in_batch for all batches of a kind or for none.
_Kind = frozenset[tuple[str, torch.dtype | None]]
_MOST_FORMATS = 4096  # batches of different shapes whose formats are kept


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """This rank's place in a pipeline.

    Args:
        cut: the decoder's cut into stages.
        tie: the axis of the ranks that hold one tied weight on two stages; of size 1 elsewhere.
        links: the channels between the ranks.
    """

    cut: Cut
    tie: Axis
    links: Links

    @staticmethod
    def open(cut: Cut, plan: ParallelPlan, pp: Axis, device: torch.device) -> Pipeline:
        """Make the channels and groups; every rank of the world must make the call.

        Args:
            cut: the decoder's cut into stages.
            plan: the plan, which says which ranks of the world form a pipeline.
            pp: the pipeline's axis.
            device: the device of the tensors.
        """
        count = len(cut.spans)
        pairs = set()
        for operations in rank_operations(cut.schedule, cut.size, count // cut.size, 4 * cut.size):
            for operation in operations:
                if (stage := receiving_stage(operation, count)) is not None:
                    pair = cut.rank_of(operation.stage), cut.rank_of(stage)
                    if pair[0] != pair[1]:
                        pairs.add(pair)
        pipelines = plan.dims.groups("pp")
        groups = {
            (sender, receiver): pipeline_groups(pp, pipelines, (sender, receiver), f"pp{sender} to pp{receiver}")
            for sender, receiver in sorted(pairs)
        }
        return Pipeline(cut=cut, tie=_tie_axis(cut, pp, pipelines), links=Links(pp, groups, device))


def _tie_axis(cut: Cut, pp: Axis, pipelines: list[tuple[int, ...]]) -> Axis:
    """Return the axis of the ranks that share a tied weight; of size 1 if this rank shares none."""
    shared = {holders for name in cut.stages_of if len(holders := cut.holders(name)) > 1}
    assert len(shared) <= 1, "only the first and the last stage hold weights outside of layers"
    for holders in shared:
        group = pipeline_groups(pp, pipelines, holders, "tie")
        if cut.rank in holders:
            return Axis("tie", size=len(holders), rank=holders.index(cut.rank), group=group)
    return Axis("tie")


class PipelineForward(BatchStep):
    """Runs a batch's micro-batches through the stages; in training, forward and backward.

    The loss is returned on every rank. Its ``backward()`` gives the gradients, which are computed in the call, to the
    parameters.

    Args:
        facts: what the decoder shows, to whose forward this step is added.
        pipeline: this rank's place in the pipeline.
        runtime: the model's runtime, with its loss and the hooks that it watches.
        outputs: makes what the call returns.
        region: the region of sequence parallelism, if there is one.
    """

    order = StepOrder.MICRO_BATCHES
    has_whole_cache = False

    def __init__(
        self, facts: Facts, pipeline: Pipeline, runtime: Any, outputs: StageOutputs, region: SequenceRegion | None
    ):
        super().__init__(facts.model)
        self.pipeline, self.runtime, self.outputs = pipeline, runtime, outputs
        self.loss, self.hooked = runtime.features.find(BatchLoss), runtime.features.find(HookedModules)
        cut, self.format = pipeline.cut, runtime.features.get(BatchFormat)
        self.balancing = find_step(facts.model, LoadBalancing)
        towers = runtime.features.find(TowerFeatures)
        self.region = region
        self.stages = Stages(facts, cut, self, region, self.balancing, towers, beside=BesideInputs(cut, region))
        splits = cut.schedule in SPLIT_BACKWARD
        self.later = WeightGradients(_own_modules(facts, cut) if splits else ())
        self.draws = StageStates(runtime.draws, Rates(facts, facts.model))
        self._waits_in_stages = runtime.weights is not None or runtime.plan.spreads_experts_over_dp
        self._boundary_dtypes: dict[_Precision, dict[int, torch.dtype]] = {}
        self._formats: dict[Hashable, dict[int, Format]] = {}
        self.writes = WritesPerPiece(facts, runtime.guard, pipeline.cut.layers)
        self.fixed = FixedInputs("Each micro-batch")
        self._loss_dtypes: dict[_Precision, torch.dtype] = {}
        self._uses_items: dict[_Kind, bool] = {}
        if runtime.comparison is not None:
            runtime.comparison.tie = pipeline.tie
        named = facts.parameters.items()
        self._stages_of = {id(p): [s for s in cut.stages_of[name] if s in cut.own] for name, p in named}

    def foresee(self, batch: dict[str, object], *, hidden: torch.dtype, loss: torch.dtype) -> None:
        """Set the dtypes of a batch's hidden states and loss, so that no rank has to announce them."""
        if not self.pipeline.cut.order.is_plain:
            raise PlanError(
                f"{type(self.model).__name__} gives its layers more than hidden states of [rows, tokens, channels], "
                "and only a run shows the shapes of what crosses its stages. Trace it with ParallelPlan(pp=1)"
            )
        key = self._precision(batch)
        self._boundary_dtypes[key] = dict.fromkeys(range(1, len(self.pipeline.cut.spans)), hidden)
        self._loss_dtypes[key] = loss

    # A compiled model runs its stages uncompiled, since they send and receive.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: object, **kwargs: object) -> object:
        batch = self.batch_of(args, kwargs)
        targets = BatchSchema(batch).targets
        trains = torch.is_grad_enabled() and (self.model.training or self._may_train_in_eval(batch, targets))
        self._check(batch, has_targets=targets is not None, trains=trains)
        if trains:
            assert targets is not None
            return self._train(batch, targets)
        return self._evaluate(batch, has_targets=targets is not None)

    def _may_train_in_eval(self, batch: dict[str, object], targets: Tensor | None) -> bool:
        """Return whether the loss of a batch in eval mode gets gradients; the program may only evaluate."""
        is_trainable = any(p.requires_grad for p in self.model.parameters())
        return targets is not None and is_trainable and torch.float16 not in self._precision(batch)

    def _check(self, batch: dict[str, object], *, has_targets: bool, trains: bool) -> None:
        if trains and not has_targets:
            raise PlanError(
                "under ParallelPlan.pp > 1 the backward pass runs inside the model's forward, so the loss must be the "
                "model's own: pass labels, as in model(**batch, labels=labels).loss. For a loss of your own, use "
                "pp=1; to read outputs without training, call the model under torch.no_grad()"
            )
        if not trains:
            return
        check_inputs(batch)
        if self.pipeline.cut.schedule in SPLIT_BACKWARD and self.stages.is_checkpointed:
            raise PlanError(
                f"gradient checkpointing is on, and schedule={self.pipeline.cut.schedule!r} computes the gradients of "
                "weights after a layer that was recomputed is freed. Call model.gradient_checkpointing_disable(), or "
                "use ParallelPlan(schedule='1f1b')"
            )
        if self.stages.is_reentrant:
            raise PlanError(
                "gradient checkpointing is on with use_reentrant=True, and a stage computes its gradients by "
                "torch.autograd.grad(), which reentrant checkpoints refuse. Write "
                "model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})"
            )

    def _train(self, batch: dict[str, Any], targets: Tensor) -> object:
        runtime, loss = self.runtime, self.loss
        count = count_micro_batches(runtime.plan, targets.shape[0], runtime.mesh.tokens)
        try:
            operations = self._operations(count)
        except PlanError:
            if self.model.training:
                raise
            return self._evaluate(batch, has_targets=True)
        with reading_shards():  # reading a guarded parameter's property takes microseconds
            trained = [p for p in self.model.parameters() if p.requires_grad]
        parameters = [p for p in trained if layout_of(p).is_held]
        sums = SummedGradients(parameters, runtime.gradients.syncs)
        self.outputs.start(
            gathers_logits=runtime.logits.in_training or (runtime.logits.in_evaluation and not self.model.training),
            routers=self._routers_of(batch),
        )
        of_stages = {s: [p for p in parameters if s in self._stages_of[id(p)]] for s in self.pipeline.cut.own}
        counts, num_items = loss.counts(batch), batch.get("num_items_in_batch")
        schema = BatchSchema(batch, self.format)
        self.fixed.see(schema)
        row_counts = schema.row_counts(count)
        step = self._step(batch, schema.split(count), loss, operations, of_stages, row_counts)
        step.scale = scale = runtime.features.get(LossScale).of(targets.device)
        step.fillers = frozenset(i for i, held in enumerate(row_counts) if held == 0)
        self.writes.start()
        with loss.mean.over_micro_batches(counts, num_items, count), cut(), self.hooked.running():
            run_training(step, sums, self.later)
        try:
            self.writes.finish()
        except PlanError as error:  # a failure of a stage may follow from what forward has written
            step.failure = error
        step.share_states()
        total, balance, shown = self._share_losses(step, [sums.of(p) is not None for p in trained])
        sums.elsewhere = [
            (p, functools.partial(_item, shown, place)) for place, p in enumerate(trained) if not layout_of(p).is_held
        ]
        self._remember(step)
        self._sum_ties(sums)
        loss.is_global()
        # A stage whose own weights are all frozen runs backward too, if another stage trains.
        root = torch.zeros_like(total, requires_grad=bool(trained))
        whole = sums.attach(root, total) if scale is None else sums.attach(root, total * scale) / scale
        return self.outputs.of_batch(loss.mean.watched(whole), balance, row_counts)

    def _operations(self, count: int) -> tuple[Operation, ...]:
        """Return what this rank does with ``count`` micro-batches, in order."""
        cut = self.pipeline.cut
        try:
            return rank_operations(cut.schedule, cut.size, len(cut.spans) // cut.size, count)[cut.rank]
        except ValueError as error:
            raise PlanError(str(error)) from None

    def _evaluate(self, batch: dict[str, Any], *, has_targets: bool) -> object:
        runtime, loss = self.runtime, self.loss
        gathers_logits = runtime.logits.in_training or runtime.logits.in_evaluation
        routers = self._routers_of(batch)
        self.outputs.start(gathers_logits=gathers_logits, routers=routers)
        step = self._step(batch, [batch], loss if has_targets else None, (), {}, [])
        with torch.no_grad():
            run_evaluation(step)
            step.share_states()
            total, balance, _ = self._share_losses(step, has_any=has_targets or routers is not None)
            self._remember(step)
            if has_targets:
                loss.is_global()
        return self.outputs.of_batch(total if has_targets else None, balance)

    def _step(
        self,
        batch: Batch,
        batches: Sequence[Batch],
        loss: BatchLoss | None,
        operations: tuple[Operation, ...],
        parameters: dict[int, list[nn.Parameter]],
        rows: Sequence[int],
    ) -> Step:
        stages, numbers = range(len(self.pipeline.cut.spans)), self._routers_of(batches[0]) is not None
        boundaries = Boundaries(
            known=[self._known(batch) for batch in batches],
            hidden=[self._shape(batch) for batch in batches],
            counts=[1 + self.stages.beside.count(stage) + numbers for stage in stages],
            seen=tuple({} for _ in batches),
        )
        spans = [range(high - own, high) for own, high in zip(rows, itertools.accumulate(rows), strict=True)]
        given = frozenset(name for name, value in batch.items() if value is not None)
        return Step(
            stages=self.stages,
            draws=self.draws.begin((self.model.training, bool(operations), given), spans or [None]),
            links=self.pipeline.links,
            operations=operations,
            batches=batches,
            boundaries=boundaries,
            parameters=parameters,
            losses=self.runtime.loss_gradients,
            leaves_at_once=self._waits_in_stages,
            finish=(lambda _, output: output) if loss is None else loss.of_output,
            look=self.writes.look if operations else lambda: None,
            keep=self.outputs.keep,
        )

    def _routers_of(self, batch: Batch) -> RouterRecord | None:
        """Return the routers of a batch's load-balancing loss; None if the batch has no such loss."""
        if self.balancing is None or not self.balancing.is_wanted(batch):
            return None
        return self.balancing.routers

    def _known(self, batch: Batch) -> dict[int, Format]:
        """Return the formats of what crosses between the stages, as far as earlier batches have shown them."""
        if (shape := self._shape(batch)) is None:
            return self._formats.get(self._shapes(batch), {})
        routers = self._routers_of(batch)
        numbers = () if routers is None else (((routers.size,), torch.float64),)
        known = self._boundary_dtypes.get(self._precision(batch), {})
        return {boundary: ((shape, dtype), *numbers) for boundary, dtype in known.items()}

    def _shape(self, batch: Batch) -> tuple[int, ...] | None:
        """Return the shape of the hidden states that cross between the stages; None if only a run shows it."""
        order = self.pipeline.cut.order
        if order.hidden_size is None or not order.is_plain:
            return None
        rows, length = BatchSchema(batch).tokens.shape[:2]
        length = local_tokens(length, self.runtime.mesh.cp.size)
        if self.region is not None:
            length = -(-length // self.runtime.mesh.tp.size)
        return rows, length, order.hidden_size

    def _remember(self, step: Step) -> None:
        """Keep the formats that a batch has shown."""
        seen = step.boundaries.seen
        if self.pipeline.cut.order.is_plain:
            dtypes = {boundary: format[0][1] for boundary, format in seen[0].items()}
            self._boundary_dtypes[self._precision(step.batches[0])] = dtypes
            return
        if len(self._formats) > _MOST_FORMATS:  # on every rank alike, since all have the same batches
            self._formats.clear()
        self._formats.update({self._shapes(batch): formats for batch, formats in zip(step.batches, seen, strict=True)})

    def _shapes(self, batch: Batch) -> Hashable:
        """Return what decides the shapes and dtypes of the activations."""
        tensors = [(name, (x.shape, x.dtype)) for name, x in leaves(batch) if isinstance(x, Tensor)]
        others = [(name, x) for name, x in leaves(batch) if isinstance(x, bool | int | float | str)]
        return self._precision(batch), self._routers_of(batch) is not None, (*tensors, *others)

    def _precision(self, batch: Batch) -> _Precision:
        """Return what decides the dtypes of the activations."""
        first = BatchSchema(batch).first
        kind = first.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return next(self.model.parameters()).dtype, autocast, first.dtype

    @own_collectives()
    def _share_losses(
        self, step: Step, has_gradients: Sequence[bool] = (), *, has_any: bool = True
    ) -> tuple[Tensor, Tensor | None, Callable[[], list[float]]]:
        """Return on every rank what the stages have found.

        It is recorded whether the loss used num_items_in_batch.

        Args:
            step: the batch on its way through the stages.
            has_gradients: whether this rank has a gradient of each trained parameter.
            has_any: whether the last stage has a loss, or one of load balancing.

        Returns:
            The last stage's loss, 0 without labels; its load-balancing loss, if it has one; and what returns the number
            of ranks that have a gradient of each trained parameter.

        Raises:
            ValueError: on every rank, if a stage has failed; on a device the other ranks see it at the next meeting.
        """
        key, pp, last = self._precision(step.batches[0]), self.runtime.mesh.pp, self.pipeline.cut.last_rank
        device = BatchSchema(step.batches[0]).first.device
        mean = self.loss.mean
        balances = self._routers_of(step.batches[0]) is not None
        kind, used = _kind_of(step.batches[0]), bool(mean.used_items)
        if kind is not None and pp.rank == last and self._uses_items.get(kind, used) != used:
            step.failure = step.failure or PlanError(
                f"the loss function of this pipeline has changed: it now {'uses' if used else 'ignores'} "
                "num_items_in_batch, unlike in earlier steps. Build the model and call to_distributed again with the "
                "new loss function"
            )
        own = torch.zeros(6 + balances + len(has_gradients), dtype=torch.float64, device=device)
        place = 6 + balances
        for has_one, alike in itertools.groupby(has_gradients):
            count = len(list(alike))
            own[place : place + count].fill_(has_one)
            place += count
        own[4].fill_(step.failure is not None)
        own[5].fill_(step.draws.are_late)
        if pp.rank == last:
            found = [(6, self.outputs.balance)] * balances + [(0, step.total)]
            for place, number in found:
                if number is not None:
                    own[place] = number
                    own[1].fill_(DTYPES.index(number.dtype))  # an assignment would copy the number from the host
            if mean.has_miscounted is not None and not step.is_over:
                own[3] = mean.has_miscounted
            own[2].fill_(used)
        with waiting_for_the_gpu():  # only if ranks share a GPU, since the wire is host memory then
            own = own.to(wire_device(device))
        dist.all_reduce(own, group=pp.group)
        self._raise_together(step, own[4])
        step.draws.see_late(own[5])
        shown = functools.lru_cache(maxsize=1)(read_later(own[6 + balances :]))
        mean.has_miscounted = own[3] != 0
        mean.check_counts()
        mean.used_items = False
        if kind is not None:
            # Read once for each kind of batch, since reading makes the host wait for the device.
            if kind not in self._uses_items:
                self._uses_items[kind] = bool(own[2])
            mean.used_items = self._uses_items[kind]
        if has_any and key not in self._loss_dtypes:
            self._loss_dtypes[key] = DTYPES[int(own[1])]
        with waiting_for_the_gpu():
            own = own.to(device, self._loss_dtypes.get(key))
        return own[0], own[6] if balances else None, shown

    def _raise_together(self, step: Step, failures: Tensor) -> None:
        """Raise on every rank if the number of ranks with a failure is not 0; on a device, which the host does not
        wait for, on these ranks alone."""
        if is_deferred(failures.device):
            raise_if_any(step.failure)
        elif has_values(failures) and failures:
            exchange_together(functools.partial(_raised, step.failure), group=self.runtime.mesh.pp.group)

    def _sum_ties(self, sums: SummedGradients) -> None:
        """Add up the gradients of a tied weight over the stages that hold it, before they are averaged over dp."""
        tie = self.pipeline.tie
        if tie.size == 1:
            return
        for parameter in sums.parameters:
            if layout_of(parameter).stage_copies > 1:
                own = sums.of(parameter)
                if own is None:
                    dtype = torch.promote_types(parameter.dtype, torch.float32)  # the dtype of the other stage's sum
                    own = torch.zeros(own_shape(parameter), dtype=dtype, device=parameter.device)
                sums.put(parameter, all_reduce(own.contiguous(), tie))


def _raised(error: Exception | None) -> tuple[None, str]:
    raise_if_any(error)
    return None, ""


def _item(read: Callable[[], list[float]], place: int) -> bool:
    return bool(read()[place])


def _kind_of(batch: Batch) -> _Kind | None:
    """Return the kind of a batch with num_items_in_batch; None for other batches."""
    if batch.get("num_items_in_batch") is None:
        return None
    given = {name: value for name, value in batch.items() if value is not None}
    return frozenset((name, getattr(value, "dtype", None)) for name, value in given.items())


def _own_modules(facts: Facts, cut: Cut) -> list[nn.Module]:
    """Return the modules that hold weights of this rank's stages."""
    found = []
    for module, name in facts.names.items():
        names = [f"{name}.{key}".lstrip(".") for key, weight in module._parameters.items() if weight is not None]
        if names and any(cut.holds(full) for full in names):
            found.append(module)
    return found
