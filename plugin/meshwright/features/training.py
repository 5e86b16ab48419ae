"""Installs what training needs: the optimizer's shards, the gradients, the loss, recomputation and compiled layers."""

from __future__ import annotations

from meshwright.context.region import ContextRegion
from meshwright.features.decision import Build
from meshwright.layout.tensor_layout import is_held
from meshwright.optim.attach_gradients import install_gradient_sync, leave_gradients_to_engine
from meshwright.optim.elementwise import declared, whole_groups
from meshwright.optim.state_dicts import shard_state
from meshwright.optim.steps import watch_steps
from meshwright.parallel.batch.document_rows import RowDocuments
from meshwright.parallel.batch.items import BatchFormat
from meshwright.parallel.batch.mean_over_ranks import GlobalMean
from meshwright.parallel.experts.load_balancing import LoadBalancing
from meshwright.parallel.experts.routers import ReplayedBlock, forward_with_router_loss
from meshwright.parallel.forward.compiled_layers import CompilableLayers
from meshwright.parallel.forward.coupled_rows import CoupledRows
from meshwright.parallel.forward.recompute import recompute_layers, recompute_switch
from meshwright.parallel.forward.state import ForwardState
from meshwright.parallel.losses.causal_lm import CallsLossFunction, CausalLMLoss, TokenLoss, replacement_of
from meshwright.parallel.losses.deferred_logits import Deferral, DeferringHead
from meshwright.parallel.losses.head_losses import install_loss
from meshwright.parallel.method_chain import add_step
from meshwright.parallel.saved_tensors import AttachesReplay, Replay
from meshwright.roles.blocks.experts import owners_of_experts


def hold_shards(build: Build) -> None:
    """Cut the optimizer's state as the parameters are cut, and gather ZeRO's weights where layers run."""
    if build.optimizer is not None:
        shard_state(build.optimizer, whole=_whole_groups(build))
    if build.runtime.weights is not None:
        build.runtime.weights.attach(build.model)


def synchronise_gradients(build: Build) -> None:
    """Reduce gradients while backward runs, and shard the optimizer; or leave both to the engine."""
    runtime, parameters = build.runtime, [parameter for _, parameter in build.facts.named_parameters()]
    if runtime.engine is not None:
        leave_gradients_to_engine(runtime, parameters)
        return
    install_gradient_sync(
        runtime,
        parameters,
        build.optimizer,
        zero_stage=build.plan.zero_stage,
        bucket_bytes=int(build.config.bucket_size_mb * 2**20),
        whole_groups=_whole_groups(build),
    )
    watch_steps(runtime, is_trusted=build.config.optimizer_is_elementwise)


def _whole_groups(build: Build) -> list[int]:
    """Return the groups of the optimizer whose parameters are stepped whole."""
    if build.optimizer is None or build.runtime.engine is not None:
        return []
    return whole_groups(build.optimizer, reads=declared(build.config), plan=build.plan)


def average_loss(build: Build) -> None:
    """Make the model's loss the mean over the global batch."""
    if build.may_couple_rows:
        format, is_told = build.runtime.features.get(BatchFormat), build.runtime.mesh.is_first
        is_alike = build.draws_as_one_device
        coupled = CoupledRows(build.decoder, build.plan, format, is_told=is_told, draws_alike=is_alike)
        add_step(build.decoder, coupled)
    if build.loss is None:
        return
    runtime = build.runtime
    mean = GlobalMean(
        runtime.mesh.tokens,
        build.config.num_items_in_batch,
        parts=runtime.mesh.cp.size,
        gradients=runtime.loss_gradients,
    )
    loss = install_loss(build.decoder, build.loss, mean, tp=runtime.mesh.tp, vocab_size=build.sharded_words)
    runtime.features.add(loss)
    if isinstance(loss, CausalLMLoss):
        loss.region = runtime.features.find(ContextRegion)
    routers = None if build.cut is None else build.cut.order.routers
    has_parts = runtime.mesh.tokens.size * runtime.mesh.tp.size > 1 or build.is_split
    replacement = replacement_of(build.decoder) if build.loss.is_causal_lm or build.loss.is_function else None
    if has_parts and replacement is not None:
        add_step(build.decoder, CallsLossFunction(build.decoder, mean, replacement))
    forward = forward_with_router_loss(build.decoder) if build.loss.is_function and has_parts else None
    if forward is not None and (build.cut is None or routers is not None):
        region = runtime.features.find(ContextRegion)
        step = LoadBalancing(build.decoder, forward, mean=mean, mesh=runtime.mesh, region=region, routers=routers)
        add_step(build.decoder, step)


def recompute(build: Build) -> None:
    """Run the layers again in backward instead of keeping their activations, if the plan says so."""
    if build.plan.recompute == "full":
        own = None if build.cut is None else [build.cut.layers[index] for index in sorted(build.cut.own_layers)]
        recompute_layers(build.decoder, build.plan.recomputed_layers, own)


def replay(build: Build) -> None:
    """Let layers that backward runs again route tokens, and part documents, as before, whoever has turned this on."""
    blocks, documents = owners_of_experts(build.of_decoder), build.runtime.features.find(RowDocuments)
    if not (blocks or documents) or build.config.compile is not None:
        return
    kept = Replay()
    if documents is not None:
        documents.replay = kept
    for block in blocks:
        add_step(block, ReplayedBlock(kept))
    kept.attach(build.decoder)
    if (name := recompute_switch(build.decoder)) is not None:
        add_step(build.decoder, AttachesReplay(build.decoder, kept), name)


def defer_logits(build: Build) -> None:
    """Let the loss compute the logits in chunks, where the head allows it."""
    runtime, head = build.runtime, build.head
    if not build.has_head_loss or not DeferringHead.is_deferrable(head) or not is_held(head.weight):
        return
    deferral = Deferral(
        is_wanted=runtime.features.get(ForwardState).defers_logits,
        is_sharded=build.tensor_structure is not None,
        count_steps=runtime.gradients.count_sharded_steps,
        has_values=runtime.has_values,
        token_loss=None if build.is_causal_lm else TokenLoss(vocab_size=build.sharded_words, tp=runtime.mesh.tp),
    )
    add_step(head, DeferringHead(head, deferral))


def compile_layers(build: Build) -> None:
    """Compile the layers one by one, if the call says so."""
    if build.config.compile == "layers":
        build.runtime.features.get(CompilableLayers).compile(**(build.config.compile_options or {}))
