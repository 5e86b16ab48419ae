"""Installs what training needs: the optimizer's shards, the gradients, the loss, recomputation and compiled layers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from meshwright.context.region import ContextRegion
from meshwright.facts import Facts
from meshwright.features.decision import Build, Call, Refusal
from meshwright.layout.tensor_layout import is_held
from meshwright.optim.attach_gradients import install_gradient_sync, leave_gradients_to_engine
from meshwright.optim.elementwise import check_reads, declared, whole_groups
from meshwright.optim.state_dicts import shard_state
from meshwright.optim.steps import watch_steps
from meshwright.parallel.batch.document_rows import RowDocuments
from meshwright.parallel.batch.items import BatchFormat
from meshwright.parallel.batch.mean_over_ranks import GlobalMean
from meshwright.parallel.experts.load_balancing import LoadBalancing
from meshwright.parallel.experts.routers import OPTION, ReplayedBlock, forward_with_router_loss
from meshwright.parallel.forward.compiled_layers import CompilableLayers, check_compile_options
from meshwright.parallel.forward.coupled_rows import CoupledRows
from meshwright.parallel.forward.recompute import check_recompute, recompute_layers, recompute_switch
from meshwright.parallel.forward.state import ForwardState
from meshwright.parallel.losses.causal_lm import BatchLoss, CallsLossFunction, CausalLMLoss, TokenLoss, replacement_of
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
        format, warns = build.runtime.features.get(BatchFormat), build.runtime.mesh.is_first
        is_alike = build.draws_as_one_device
        coupled = CoupledRows(build.decoder, build.plan, format, warns=warns, draws_alike=is_alike)
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


STEPS = (
    Refusal.by("an optimizer", check_reads, lambda call: (call.optimizer, declared(call.config), call.plan),
               "Pass ToDistributedConfig(optimizer_reads='element') if it reads each element alone, or use a plan that "
               "leaves tensors whole"),
)  # fmt: skip


def _shared_memory(facts: Facts) -> dict[str, str] | None:
    """Return the names of two parameters that are views of the same elements, of which a step changes both."""
    storages: dict[int, list[tuple[str, nn.Parameter]]] = {}
    firsts = {x: name for name, x in reversed(facts.parameters.items())}
    for x, name in reversed(firsts.items()):
        if type(x) is nn.Parameter and x.numel() and not x.is_meta and x.layout is torch.strided:
            storages.setdefault(x.untyped_storage()._cdata, []).append((name, x))
    pairs = (pair for views in storages.values() for pair in _overlapping(views))
    return next(({"parameter": one, "other": other} for one, other in pairs), None)


def _overlapping(views: Sequence[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, str]]:
    """Yield the names of two parameters of one storage that have an element in common, unless both are frozen."""
    extents = [_extent(x) for _, x in views]
    order = sorted(range(len(views)), key=extents.__getitem__)
    for place, first in enumerate(order):
        for second in order[place + 1 :]:
            if extents[second][0] >= extents[first][1]:
                break  # nor does a later one reach into the first
            (one, x), (other, y) = views[min(first, second)], views[max(first, second)]
            memory = np.empty(max(extents[first][1], extents[second][1]), np.uint8)  # never written, so it takes none
            if (x.requires_grad or y.requires_grad) and np.shares_memory(_bytes(x, memory), _bytes(y, memory)):
                yield one, other


def _bytes(x: Tensor, memory: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the bytes that a tensor has of a storage, as a view of a memory like it: views may interleave."""
    size = x.element_size()
    strides = (*(n * size for n in x.stride()), 1)
    return np.lib.stride_tricks.as_strided(memory[x.storage_offset() * size :], (*x.shape, size), strides)


def _extent(x: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the end of the last."""
    start, last = int(x.storage_offset()), sum((size - 1) * n for size, n in zip(x.shape, x.stride(), strict=True))
    return start * x.element_size(), (start + last + 1) * x.element_size()


MEMORY = (
    Refusal("cut weights, ZeRO", lambda call: _shared_memory(call.of_decoder),
            "{parameter} and {other} are two parameters of one memory, of which a step on one device changes both by "
            "the gradient of each, and the plan gives each a memory of its own",
            "Make them one parameter, a.weight = b.weight, or two, b.weight.data = b.weight.data.clone(); or use "
            "ParallelPlan(dp=...) alone"),
)  # fmt: skip


def _sent_in_16_bits(call: Call) -> dict[str, str] | None:
    trained = [p for p in call.of_decoder.parameters.values() if p.requires_grad and p.is_floating_point()]
    is_asked = call.plan.reduce_dtype and call.plan.zero_stage == 0
    if not (is_asked and trained and all(p.element_size() <= 2 for p in trained)):
        return None
    return {"dtype": str(trained[0].dtype).removeprefix("torch.")}


_ALONE = "or train without the engine: to_distributed(model, optimizer, loader)"
_OWN = "leave it out, and set the engine's own option (in DeepSpeed's config, "
GRADIENTS = (
    Refusal("an engine", lambda call: call.plan.pp > 1, "ParallelPlan.pp={pp} with {engine}: its engine runs the "
            "backward pass of the whole model, and a pipeline runs its own", f"use pp=1, {_ALONE}"),
    Refusal("an engine", lambda call: call.plan.cp > 1, "ParallelPlan.cp={cp} with {engine}: its engine averages "
            "gradients over dp alone, and each rank of cp has those of its own tokens", f"use cp=1, {_ALONE}"),
    Refusal("an engine", lambda call: call.plan.ep * call.plan.etp > 1, "ParallelPlan.ep={ep} and etp={etp} with "
            "{engine}, which was not compared with one device", f"use ep=1 and etp=1, {_ALONE}"),
    Refusal("an engine", lambda call: call.plan.reduce_dtype, "ParallelPlan.reduce_dtype={reduce_dtype!r} with "
            "{engine}, which reduces the gradients itself", f"{_OWN}communication_data_type)"),
    Refusal("an engine", lambda call: call.plan.offload, "ParallelPlan.offload={offload!r} with {engine}, which keeps "
            "the optimizer itself", f"{_OWN}zero_optimization.offload_optimizer)"),
    Refusal("any plan", _sent_in_16_bits, "ParallelPlan.reduce_dtype={reduce_dtype!r} saves nothing: with "
            "zero_stage=0 the gradients of {dtype} weights travel in 16 bits already", "leave it out"),
)  # fmt: skip


def _adds_router_loss(call: Call) -> bool:
    plan, loss, model = call.plan, call.loss, call.decoder
    has_parts = plan.dp * plan.cp * plan.pp > 1 or plan.has_micro_batches
    is_wanted = getattr(getattr(model, "config", None), OPTION, False)
    is_function = isinstance(loss, BatchLoss) or (loss is not None and loss.is_function)
    return has_parts and is_wanted and not is_function and OPTION in inspect.signature(model.forward).parameters


LOSS = (
    Refusal("any plan", _adds_router_loss, f"model.config.{OPTION}=True: {{model}} adds a load-balancing loss to its "
            "loss, which is a product of means over all tokens of the batch, and computes it from the tokens that it "
            "has", f"Set model.config.{OPTION} = False, or use dp=1, cp=1 and pp=1 without micro-batches"),
)  # fmt: skip

RECOMPUTE = (
    Refusal.by("recompute", check_recompute, lambda call: (call.decoder, call.plan.recomputed_layers),
               "Leave recompute out, or recomputed_layers"),
)  # fmt: skip

COMPILE = (
    Refusal.by("compile", check_compile_options, lambda call: (call.config.compile_options or {}, call.plan.tp > 1),
               "Leave the option out"),
)  # fmt: skip
