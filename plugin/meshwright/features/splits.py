"""Installs what runs a batch in parts: its tokens over cp, its micro-batches through the stages of pp or in turn."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Set

from meshwright.context.attention import ContextAttention, attach_attention, context_axes
from meshwright.context.handed_states import part_mixers
from meshwright.context.record import make_whole
from meshwright.context.region import ContextForward, ContextRegion
from meshwright.facts import Facts
from meshwright.faults.collective_log import set_timeouts
from meshwright.features.decision import Build, Refusal
from meshwright.optim.runtime import Runtime
from meshwright.parallel.batch.document_rows import RowDocuments
from meshwright.parallel.batch.flash_rows import FlashRows
from meshwright.parallel.batch.items import BatchFormat
from meshwright.parallel.batch.mixed_rows import POSITIONS, PositionsOfRows, splits_rows
from meshwright.parallel.forward.split_forward import RefusesCallHooks, SplitForward, WrapperCall
from meshwright.parallel.gradients.summed import LossScale
from meshwright.parallel.losses.causal_lm import BatchLoss
from meshwright.parallel.method_chain import add_step
from meshwright.parallel.tensor_parallel.apply import SequenceRegion
from meshwright.parallel.tensor_parallel.float8 import float8_layers
from meshwright.parallel.tensor_parallel.second_inputs import PER_TOKEN, TowerFeatures
from meshwright.parallel.tensor_parallel.shared_tower import SharedTower, shares_towers
from meshwright.pipeline.pipeline_forward import Pipeline, PipelineForward
from meshwright.pipeline.stage_outputs import StageOutputs
from meshwright.plan.config import ParallelPlan
from meshwright.roles.decoder import embeds_tokens


def part_tokens(build: Build) -> None:
    """Cut the tokens of the layers over cp, and let attention reach all of them."""
    if build.context is None:
        return
    assert build.structure is not None
    runtime = build.runtime
    attention = ContextAttention(context_axes(build.plan, runtime.mesh.cp), build.plan.context)
    _set_timeouts(build)
    attach_attention(build.structure, attention, {site.module: site.kind for site in build.context.sites})
    is_staged = build.cut is not None  # a pipeline gives logits in evaluation only on request
    # Under ulysses each rank has all tokens of some heads. The stages of a pipeline know the length of what they
    # receive before they see the documents of a row, features of towers are cut before the first layer, and a mixer
    # that backward runs again does not see the row's mask.
    balances = build.plan.context != "ulysses" and not (is_staged or build.towers or build.mixers)
    region = ContextRegion(build.structure, build.context, attention.parts, runtime.streams, balances=balances)
    runtime.draws.parted = region
    make_whole(site.module for site in build.context.sites if not site.kind.is_across)
    region.takes_padding = not any(float8_layers(build.facts))
    part_mixers(build.mixers, attention.parts, runtime.streams, runtime.features.find(RowDocuments))
    step = ContextForward(
        build.decoder,
        runtime.features.add(region),
        has_token_loss=build.is_causal_lm,
        joins_logits=lambda trains: (
            runtime.logits.in_training or (not trains and (not is_staged or runtime.logits.in_evaluation))
        ),
    )
    add_step(build.decoder, step)


def check_positions(build: Build) -> None:
    """Refuse positions that depend on other rows, where a pass has some of the rows of a batch."""
    if not splits_rows(build.plan):
        return
    for module in build.of_decoder.names:
        if callable(getattr(module, POSITIONS, None)):
            add_step(module, PositionsOfRows(module, build.plan), POSITIONS)


def watch_wrappers(build: Build) -> None:
    """Refuse hooks that a wrapper of the model adds in a call for whole rows, where the modules get parts of these."""
    if build.model is build.decoder or not (build.plan.cp > 1 or build.plan.has_micro_batches):
        return
    call = WrapperCall(build.model)
    add_step(build.model, call)
    add_step(build.decoder, RefusesCallHooks(build.decoder, call, build.plan, build.runtime.mesh.tokens))


def separate_documents(build: Build) -> None:
    """Run mixers on each document of a packed row as a row of its own, and tell flash kernels where documents begin."""
    documents = RowDocuments.over(build.decoder, build.mixers, logs=build.runtime.mesh.is_first)
    if documents is not None:
        build.runtime.features.add(documents)
    logs, parts_tokens = build.runtime.mesh.is_first, build.context is not None
    FlashRows.over(build.of_decoder, build.towers, logs=logs, parts_tokens=parts_tokens)


def part_features(build: Build) -> None:
    """Cut features of towers that enter between the layers, where a rank has some of the tokens or layers."""
    plan, features = build.plan, build.runtime.features
    axis = next(
        (axis for axis in ("pp", "cp") if getattr(plan, axis) > 1), "tp" if build.is_sequence_parallel else None
    )
    if axis is None or build.structure is None or not build.towers:
        return
    sequenced = features.find(SequenceRegion)
    of_layers: Set[str] = frozenset()
    if build.cut is not None:  # it crosses the stages (BesideInputs)
        of_layers = build.cut.order.given
    elif build.context is not None:
        of_layers = build.context.of_layers
    elif axis == "tp":  # the ranks share it (SecondInputs)
        of_layers = inspect.signature(build.structure.layers[0].forward).parameters.keys()
        of_layers |= {f"{name}s" for name in PER_TOKEN & of_layers}  # those of all layers
    tower_features = TowerFeatures(
        build.structure,
        axis=axis,
        sequence=None if sequenced is None else sequenced.sequence,
        region=features.find(ContextRegion),
        is_staged=build.cut is not None,
        of_layers=of_layers,
    )
    features.add(tower_features)


def share_towers(build: Build) -> None:
    """Let the ranks of tp, and those of cp, share the images of each tower."""
    if build.structure is None or not shares_towers(build.plan, build.config.engine):
        return
    embedding = build.structure.embedding
    towers = [tower for tower in build.towers if not embeds_tokens(tower, embedding)]
    tp, cp = build.runtime.mesh.tp, build.runtime.mesh.cp
    for tower, axis in itertools.product(towers, (tp, cp)):
        if axis.size > 1:
            add_step(tower, SharedTower(tower, axis, (tp, cp), has_own_tokens=axis is cp))


def run_in_parts(build: Build) -> None:
    """Run the micro-batches of each batch, through the stages of a pipeline if the plan has one."""
    if build.loss is None:
        return
    if build.cut is None:
        if build.plan.has_micro_batches:
            split_batches(build.of_decoder, build.runtime, build.plan)
        return
    runtime = build.runtime
    runtime.features.add(LossScale(build.of_decoder))
    pipeline = Pipeline.open(build.cut, build.plan, runtime.mesh.pp, build.device)
    _set_timeouts(build)
    outputs = StageOutputs(
        kind=build.cut.order.output_kind, pp=runtime.mesh.pp, last=build.cut.last_rank, device=build.device
    )
    region = runtime.features.find(SequenceRegion)
    add_step(build.decoder, PipelineForward(build.of_decoder, pipeline, runtime, outputs, region))


def split_batches(facts: Facts, runtime: Runtime, plan: ParallelPlan) -> None:
    """Make the decoder's forward run its batch as the plan's micro-batches."""
    step = SplitForward(
        facts,
        plan=plan,
        dp=runtime.mesh.tokens,
        syncs=runtime.gradients.syncs,
        loss=runtime.features.get(BatchLoss),
        guard=runtime.guard,
        scale=runtime.features.add(LossScale(facts)),
        format=runtime.features.get(BatchFormat),
        draws=runtime.draws,
        keeps_logits=runtime.logits.in_training,
    )
    add_step(facts.model, step)


def _set_timeouts(build: Build) -> None:
    """Give the groups that were just made the timeout of the call."""
    if build.runtime.guard is not None:
        set_timeouts(build.config.timeout_s)


_COUNTED = "Set ToDistributedConfig(loss_averages_over='rows'), 'labels' or a callable that counts in a batch; or"

PARTS = (
    Refusal("pp", lambda call: call.loss is None, "ParallelPlan.pp={pp} runs the backward pass inside the model's "
            "forward, but what the loss of {model} averages over is not known", f"{_COUNTED} use pp=1"),
    Refusal("micro-batches", lambda call: call.loss is None and call.plan.pp == 1,
            "the plan splits the batch into micro-batches, but what the loss of {model} averages over is not known, so "
            "the losses of the micro-batches cannot be combined",
            f"{_COUNTED} set gradient_accumulation_steps=1 and micro_batch_size=None"),
)  # fmt: skip
