"""Carries out what was decided about one model: its weights, its hooks, its gradients and its loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.checkpoint.one_device.save_pretrained import export_with_full_weights
from meshwright.compiling import leave_out_of_graphs
from meshwright.construct.initial_weights import NewTensors
from meshwright.context.attention import ContextAttention, attach_attention, context_axes
from meshwright.context.context_forward import ContextForward, check_parted, refuse_generating_parts
from meshwright.context.record import ContextRecord
from meshwright.context.region import ContextRegion
from meshwright.distribute.check_compile import layers_of, why_not_compiled
from meshwright.distribute.check_launch import build_axes
from meshwright.distribute.copy_model import make_copyable
from meshwright.distribute.cuts import context_of, cut_of, structure_of
from meshwright.faults.group_timeouts import set_timeouts
from meshwright.faults.together import succeed_together
from meshwright.optim.attach_gradients import install_gradient_sync, leave_gradients_to_engine
from meshwright.optim.runtime import Runtime, attach
from meshwright.optim.shard_state import shard_state
from meshwright.optim.state_dicts import guard_model
from meshwright.optim.step_watch import watch_steps
from meshwright.optim.zero3_layers import ShardedWeights
from meshwright.parallel.collectives import agree
from meshwright.parallel.compiled_layers import CompilableLayers
from meshwright.parallel.deferred_logits import Deferral, DeferringHead
from meshwright.parallel.document_masks import keep_documents_apart
from meshwright.parallel.dropout_streams import DropoutStreams, dropout_seed
from meshwright.parallel.forward_state import ForwardState
from meshwright.parallel.generate_together import sample_together
from meshwright.parallel.head_losses import LossKind, find_loss, install_loss
from meshwright.parallel.longest_position import LongestPosition
from meshwright.parallel.mean_over_ranks import GlobalMean
from meshwright.parallel.mixed_rows import BatchStatistics
from meshwright.parallel.recompute import recompute_layers
from meshwright.parallel.replica_comparison import ReplicaComparison
from meshwright.parallel.replicated_state import ModuleTensors
from meshwright.parallel.row_layout import is_held
from meshwright.parallel.split_forward import SplitForward
from meshwright.parallel.structure import DecoderStructure, ParameterLayout
from meshwright.parallel.tensor_guards import refuse_wrapping
from meshwright.parallel.tensor_parallel import (
    SequenceRegion,
    guard_shards,
    install_tensor_parallel,
    shard_shape,
    share_partial_gradients,
)
from meshwright.parallel.token_loss import TokenLoss, calls_cross_entropy
from meshwright.parallel.uneven_batches import UnevenBatches
from meshwright.parallel.user_hooks import HookedModules
from meshwright.pipeline.cut import Cut, with_stages
from meshwright.pipeline.pipeline_forward import Pipeline, PipelineForward
from meshwright.pipeline.refusals import refuse_copying, refuse_generating
from meshwright.pipeline.stage_outputs import StageOutputs
from meshwright.plan.config import ParallelPlan, ToDistributedConfig
from meshwright.roles.adapters import refuse_merging, refuse_resizing, refuse_unloading, without_wrappers


@dataclass(frozen=True, kw_only=True)
class Installation:
    """One model and everything that was decided about it; the methods carry the decisions out.

    ``to_distributed`` calls ``distribute``. The traced step and the static check have no other ranks, so they call
    ``make_weights`` and ``install`` directly.

    Args:
        model: the user's model, with adapters and other wrappers around its decoder.
        plan: the plan to carry out.
        config: the options of the call.
        structure: how the plan cuts the decoder; None if the plan does not cut it.
        cut: which layers and weights this rank's pipeline stages hold; None without a pipeline.
        context: what the layers and attentions of the decoder are given; None without context parallelism.
        loss: what the model's loss averages over; None if unknown.
        runtime: the state that the model will carry; it holds this rank's axes.
        device: the device of this rank's weights.
    """

    model: Any
    plan: ParallelPlan
    config: ToDistributedConfig
    structure: DecoderStructure | None
    loss: LossKind | None
    runtime: Runtime
    device: torch.device
    cut: Cut | None = None
    context: ContextRecord | None = None

    @classmethod
    def on_fake_rank(
        cls,
        model: Any,
        plan: ParallelPlan,
        *,
        config: ToDistributedConfig | None = None,
        device: str = "cpu",
        guard: Any = None,
    ) -> Installation:
        """Decide what ``to_distributed`` would decide on this rank of a fake world, in which no guard meets others."""
        decoder = without_wrappers(model)[1]
        config = dataclasses.replace(config or ToDistributedConfig(), plan=plan)
        axes = build_axes(plan, torch.device(device))
        structure = structure_of(decoder, plan, config)
        return cls(
            model=model,
            plan=plan,
            config=config,
            structure=structure,
            loss=find_loss(decoder),
            runtime=Runtime(axes=axes, parameters=[], plan=plan, guard=guard),
            device=torch.device(device),
            context=context_of(decoder, structure, plan),
            cut=cut_of(decoder, structure, plan, axes.pp.rank),
        )

    @property
    def decoder(self) -> Any:
        return without_wrappers(self.model)[1]

    @property
    def layouts(self) -> dict[str, ParameterLayout]:
        """The layout of each parameter that the structure describes, by the parameter's name in the whole model."""
        if self.structure is None or not self._cuts_weights:
            return {}
        prefix = without_wrappers(self.model)[0]
        structure = self.structure if self.cut is None else with_stages(self.structure, self.cut)
        return {prefix + name: layout for name, layout in structure.parameters.items()}

    @property
    def _cuts_weights(self) -> bool:
        """Whether a rank may hold a part of a weight, or none of it, because of tensor or pipeline parallelism."""
        return self.plan.tp > 1 or self.plan.pp > 1

    @property
    def tensor_structure(self) -> DecoderStructure | None:
        """The structure, if the plan has tensor parallelism."""
        return self.structure if self.plan.tp > 1 else None

    def distribute(self, optimizer: Optimizer | None, make: Callable[..., NewTensors]) -> None:
        """Give the model its shards and its hooks, and make operations raise that would read a shard as the whole.

        Args:
            optimizer: the optimizer over the model's parameters, if the call has one.
            make: the function that computes this rank's shards; see ``make_weights``.
        """
        model, decoder, runtime = self.model, self.decoder, self.runtime
        succeed_together(lambda: self.make_weights(make)).attach(model)
        model.to(self.device)
        axes = runtime.axes
        seed = int(agree(torch.tensor([dropout_seed()], device=self.device), axes.tp, axes.dp, axes.pp))
        self.install(optimizer, seed=seed)
        if runtime.engine is None:
            self.guard_shards()
        guard_model(model, runtime)
        # With adapters, the model wraps the decoder, and a user may save either.
        for part in {id(x): x for x in (model, decoder)}.values():
            export_with_full_weights(part)
            attach(part, runtime)
            if self.cut is not None:
                refuse_copying(part)
            elif runtime.engine is None:
                make_copyable(part, model, runtime)
        if self._cuts_weights:
            refuse_unloading(model, " and ".join(axis for axis in ("tp", "pp") if getattr(self.plan, axis) > 1))
        if runtime.weights is not None:
            refuse_merging(model)
        refuse_wrapping(model)
        refuse_resizing(model)

    def make_weights(self, make: Callable[..., NewTensors]) -> NewTensors:
        """Return the weights that this rank will hold, without changing the model.

        Under ZeRO stage 3, this rank's part of each shard goes to ``runtime.weights``.

        Args:
            make: a function of the model, its layouts, the TP axis, the device and, under stage 3, a function that
                keeps this rank's part of a shard.
        """
        if self.plan.zero_stage < 3 or self.runtime.dp.size == 1:
            return make(self.model, self.layouts, self.runtime.tp, self.device)
        layouts = self.layouts
        sharded = ShardedWeights(
            self.model, lambda name, p: shard_shape(p, layouts.get(name)), self.runtime.dp, self.device
        )
        made = make(self.model, layouts, self.runtime.tp, self.device, sharded.keep)
        self.runtime.weights = sharded
        return made

    def install(self, optimizer: Optimizer | None, *, seed: int) -> None:
        """Add hooks, gradient synchronisation and loss to a model whose parameters are shards, without communication.

        Args:
            optimizer: the optimizer over the model's parameters, if the call has one.
            seed: the seed of the dropout streams, the same on all ranks.
        """
        runtime, decoder = self.runtime, self.decoder
        if optimizer is not None:
            shard_state(optimizer)
        if runtime.weights is not None:
            runtime.weights.attach(self.model)
        runtime.streams = DropoutStreams(axes=runtime.axes, seed=seed)
        if runtime.guard is not None:
            runtime.comparison = self._comparison()
        layers, region, forward = self._install_forward(runtime.streams)
        if self.context is not None:
            self._install_context(self.context, runtime.streams)
        if runtime.engine is not None:
            leave_gradients_to_engine(runtime, self.model)
        else:
            bucket_bytes = int(self.config.bucket_size_mb * 2**20)
            install_gradient_sync(
                runtime, self.model, optimizer, zero_stage=self.plan.zero_stage, bucket_bytes=bucket_bytes
            )
            watch_steps(runtime, is_trusted=self.config.optimizer_is_elementwise)
        if self.loss is not None:
            mean = GlobalMean(
                runtime.dp,
                self.config.num_items_in_batch,
                parts=runtime.cp.size,
                gradients=runtime.loss_gradients,
            )
            runtime.loss = install_loss(decoder, self.loss, mean, tp=runtime.tp, vocab_size=self._sharded_words)
            if self.loss.is_causal_lm:
                runtime.loss.region = runtime.region  # type: ignore[attr-defined]
            if self.cut is not None:
                self._install_pipeline(self.cut, region)
            elif self.plan.has_micro_batches:
                split_batches(decoder, runtime, self.plan)
        for part in {id(x): x for x in (self.model, decoder)}.values():
            if self.cut is not None:
                refuse_generating(part)
            if self.context is not None:
                refuse_generating_parts(part)
            sample_together(part, runtime.tp, runtime.guard)
        if self.plan.recompute == "full":
            own = None if self.cut is None else [self.cut.layers[index] for index in sorted(self.cut.own_layers)]
            recompute_layers(decoder, self.plan.recomputed_layers, own)
        self._defer_logits(forward)
        if self.config.compile == "layers":
            layers.compile(**(self.config.compile_options or {}))

    def _compilable_layers(self) -> CompilableLayers:
        found = layers_of(self.decoder, self.structure)
        refusal = why_not_compiled(found, self.plan, self.config.engine)
        is_whole = self.structure is None and (refusal is None or not found)
        return CompilableLayers(found, refusal=refusal, is_model_traceable=is_whole)

    def _install_pipeline(self, cut: Cut, region: SequenceRegion | None) -> None:
        runtime = self.runtime
        pipeline = Pipeline.open(cut, self.plan, runtime.pp, self.device)
        if runtime.guard is not None:
            set_timeouts(self.config.timeout_s)  # also for the groups just made
        outputs = StageOutputs(
            kind=cut.order.output_kind,
            pp=runtime.pp,
            last=cut.last_rank,
            device=self.device,
        )
        checks = {} if self.context is None else {"check": check_parted}
        self.decoder.forward = PipelineForward(self.decoder, pipeline, runtime, outputs, region, **checks)

    def _install_context(self, record: ContextRecord, streams: DropoutStreams) -> None:
        """Cut the tokens of the layers over cp, and let attention reach all of them."""
        assert self.structure is not None
        runtime = self.runtime
        attention = ContextAttention(context_axes(self.plan, runtime.cp), self.plan.context)
        if runtime.guard is not None:
            set_timeouts(self.config.timeout_s)  # also for the groups just made
        attach_attention(self.decoder, attention)
        is_staged = self.cut is not None  # a pipeline gives logits in evaluation only on request
        # Under ulysses each rank has all tokens of some heads. The stages of a pipeline know the length of what they
        # receive before they see the documents of a row.
        balances = self.plan.context != "ulysses" and not is_staged
        region = runtime.region = ContextRegion(self.structure, record, attention.parts, streams, balances=balances)
        self.decoder.forward = ContextForward(
            self.decoder,
            region,
            has_token_loss=self.loss is not None and self.loss.is_causal_lm,
            joins_logits=lambda trains: (
                runtime.gathers_logits or (not trains and (not is_staged or runtime.gathers_evaluated_logits))
            ),
        )

    def _install_forward(self, streams: DropoutStreams) -> tuple[CompilableLayers, SequenceRegion | None, ForwardState]:
        """Add the hooks of the forward pass: around the decoder, and at the borders of its blocks."""
        runtime, structure, plan = self.runtime, self.tensor_structure, self.plan
        uneven = runtime.uneven = UnevenBatches(runtime.dp, runtime.tp)
        hooked = runtime.hooked = HookedModules(
            self.decoder,
            structure,
            sequence_parallel=plan.sequence_parallel,
            is_split=plan.has_micro_batches or plan.pp > 1,
            is_staged=plan.pp > 1,
            parted=None if self.context is None else self.structure,
        )
        leave_out_of_graphs()
        layers = runtime.layers = self._compilable_layers()
        forward = ForwardState(
            model=self.decoder,
            inner=self._callable_alone(),
            streams=streams,
            axes=runtime.axes,
            guard=runtime.guard,
            comparison=runtime.comparison,
            has_sharded_loss=self._has_sharded_loss,
            has_head_loss=self._has_head_loss,
            has_known_loss=self.loss is not None,
            uneven=uneven,
            hooked=hooked,
            statistics=BatchStatistics(self.decoder, lambda: runtime.plan),
            refuses_internals=structure is not None or self.context is not None,
            shares_weights=runtime.weights is not None,
            longest=LongestPosition(self.decoder, runtime.dp, is_split=plan.has_micro_batches or plan.pp > 1),
            layers=layers,
            follow=runtime.follow,
        )
        keep_documents_apart(self.decoder)
        if structure is None:
            return layers, None, forward
        layers.blocks, region = install_tensor_parallel(
            structure,
            runtime.tp,
            sequence_parallel=plan.sequence_parallel,
            streams=streams,
            keep_logits_sharded=forward.keep_logits_sharded,
            is_staged=self.cut is not None,
        )
        return layers, region, forward

    def _defer_logits(self, forward: ForwardState) -> None:
        """Let the loss compute the logits in chunks, where the head allows it."""
        runtime, head = self.runtime, self._head
        if not self._has_head_loss or not DeferringHead.is_deferrable(head) or not is_held(head.weight):
            return
        deferral = Deferral(
            is_wanted=forward.defers_logits,
            is_sharded=self.tensor_structure is not None,
            count_steps=runtime.count_sharded_steps,
            has_values=runtime.has_values,
            token_loss=None if self._is_causal_lm else TokenLoss(vocab_size=self._sharded_words, tp=runtime.tp),
        )
        head.forward = DeferringHead(head, deferral)

    @property
    def _head(self) -> Any:
        if self.structure is not None:
            return self.structure.head
        find = getattr(self.decoder, "get_output_embeddings", None)
        return find() if callable(find) else None

    @property
    def _sharded_words(self) -> int:
        """The number of words in the full vocabulary if tp shards it, and otherwise 0."""
        return self.tensor_structure.vocab_size if self.tensor_structure else 0

    @property
    def _is_causal_lm(self) -> bool:
        return self.loss is not None and self.loss.is_causal_lm

    @property
    def _has_sharded_loss(self) -> bool:
        return self._is_causal_lm and not self.config.gather_logits and self.tensor_structure is not None

    @property
    def _has_head_loss(self) -> bool:
        """Whether training with labels needs no logits but for the loss, which can compute them in chunks."""
        # An engine gathers weights by hooks of its own. Under gpipe the last stage would hold the gradient of the
        # head's weight once for each micro-batch.
        is_single = self.cut is None or self.cut.schedule != "gpipe"
        # A loss that the forward itself computes is of the labels of all tokens, and a rank of cp has some of them.
        is_known = self._is_causal_lm or (self.context is None and calls_cross_entropy(self.decoder))
        return is_known and not self.config.gather_logits and self.runtime.engine is None and is_single

    def _comparison(self) -> ReplicaComparison:
        runtime, plan = self.runtime, self.plan
        assert runtime.guard is not None
        every = self.config.check_replicas_every
        if every is None:
            # In ZeRO stages 1 and 2 the next step overwrites all copies of a weight with the owner's, even if faulty.
            every = 1 if plan.zero_stage in (1, 2) and runtime.dp.size > 1 else 50
        return ReplicaComparison(
            self.model,
            tp=runtime.tp,
            dp=runtime.dp,
            pp=runtime.pp,
            guard=runtime.guard,
            every=every,
            every_state=self.config.check_replicas_every or 50,
            has_weights=runtime.weights is None and runtime.engine is None,
            tensors=ModuleTensors(self.model, () if self.cut is None else self.cut.layers),
            streams=runtime.streams,
        )

    def guard_shards(self) -> None:
        """Make operations raise that would read a shard as the whole."""
        if self.structure is not None and self._cuts_weights:
            guard_shards(self.model, self.structure)
        if self.runtime.weights is not None:
            self.runtime.weights.guard()
        elif self.tensor_structure is not None:
            share_partial_gradients(self.model, self.decoder, self.tensor_structure)

    def _callable_alone(self) -> list[nn.Module]:
        """Return the modules that programs may call directly: transformers' base model, and the owner of the layers."""
        inner = [getattr(self.decoder, "base_model", None), None if self.structure is None else self.structure.model]
        return [module for module in inner if isinstance(module, nn.Module)]


def split_batches(decoder: Any, runtime: Runtime, plan: ParallelPlan) -> None:
    """Make the decoder's forward run its batch as the plan's micro-batches."""
    assert runtime.loss is not None
    decoder.forward = SplitForward(
        decoder,
        plan=plan,
        dp=runtime.dp,
        syncs=runtime.syncs,
        loss=runtime.loss,
        guard=runtime.guard,
        keeps_logits=runtime.gathers_logits,
    )
