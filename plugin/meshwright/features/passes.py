"""Installs what watches each pass of the model, and the hooks at the borders of its blocks."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from meshwright.compiling import leave_out_of_graphs
from meshwright.context.region import ContextRegion
from meshwright.features.decision import Build, Call, Refusal
from meshwright.parallel.batch.document_rows import keep_documents_apart
from meshwright.parallel.batch.items import BatchFormat
from meshwright.parallel.batch.longest_position import LongestPosition
from meshwright.parallel.batch.mixed_rows import EMBEDDING, SET_OFF, BatchStatistics, mixed_rows, split_embedding
from meshwright.parallel.experts.load_balancing import ExpertCounts
from meshwright.parallel.experts.slices import OutputBiasOnce, SlicedExperts
from meshwright.parallel.experts.token_dispatchers import ExpertDispatch, dispatchers
from meshwright.parallel.forward.compiled_layers import CompilableLayers, layers_of
from meshwright.parallel.forward.generate import GenerateTogether
from meshwright.parallel.forward.state import EnteredForward, ForwardState
from meshwright.parallel.forward.uneven_batches import UnevenBatches
from meshwright.parallel.forward.user_hooks import HookedModules, WholeHooks
from meshwright.parallel.method_chain import add_step
from meshwright.parallel.replicas.comparison import ReplicaComparison
from meshwright.parallel.replicas.replicate_model import ModuleTensors
from meshwright.parallel.tensor_parallel.apply import install_tensor_parallel
from meshwright.parallel.tensor_parallel.float8 import Float8Layers
from meshwright.plan.schedule import SPLIT_BACKWARD
from meshwright.roles.blocks.experts import (
    check_adapted_experts,
    expert_layouts,
    experts_of_own_code,
    has_experts,
    has_output_bias,
    is_experts,
    keep_local_adapters,
)

Fields = Mapping[str, object]


def compare_replicas(build: Build) -> None:
    """Compare what several ranks hold every few steps and before a save."""
    runtime, plan, every = build.runtime, build.plan, build.config.check_replicas_every
    if runtime.guard is None:
        return
    if every is None:
        # In ZeRO stages 1 and 2 the next step overwrites all copies of a weight with the owner's, even if faulty.
        slices = max(runtime.mesh.tokens.size, runtime.mesh.copies.size)
        every = 1 if plan.zero_stage in (1, 2) and slices > 1 else 50
    runtime.comparison = ReplicaComparison(
        build.facts.named_parameters(),
        mesh=runtime.mesh,
        guard=runtime.guard,
        every=every,
        every_state=build.config.check_replicas_every or 50,
        has_weights=runtime.weights is None and runtime.engine is None,
        tensors=ModuleTensors(build.facts, () if build.cut is None else build.cut.layers),
        draws=runtime.draws,
    )


def watch_passes(build: Build) -> None:
    """Add the hooks around the decoder that compare inputs, count rows and set the random streams."""
    runtime, plan = build.runtime, build.plan
    uneven = runtime.features.add(UnevenBatches(runtime.mesh.tokens, runtime.mesh.tp))
    hooked = HookedModules(
        build.of_decoder,
        is_split=build.is_split,
        is_staged=plan.pp > 1,
        is_shared=build.runtime.mesh.tokens.size > 1,
        parted=None if build.context is None else build.structure,
    )
    leave_out_of_graphs()
    inner = [getattr(build.decoder, "base_model", None), None if build.structure is None else build.structure.model]
    forward = ForwardState(
        facts=build.of_decoder,
        inner=[module for module in inner if isinstance(module, nn.Module)],
        draws=runtime.draws,
        mesh=runtime.mesh,
        guard=runtime.guard,
        comparison=runtime.comparison,
        losses=runtime.loss_gradients,
        has_sharded_loss=build.has_sharded_loss,
        has_head_loss=build.has_head_loss,
        has_known_loss=build.loss is not None,
        uneven=uneven,
        hooked=runtime.features.add(hooked),
        statistics=BatchStatistics(build.of_decoder, lambda: runtime.plan),
        shares_weights=runtime.weights is not None,
        gather=(lambda: None) if runtime.weights is None else runtime.weights.keep_apart,
        shares_tokens=plan.spreads_experts_over_dp,
        towers_differ=runtime.leave_towers_out if plan.zero_stage and build.towers else None,
        is_split=build.is_split,
        format=runtime.features.get(BatchFormat),
        longest=LongestPosition(build.of_decoder, runtime.mesh.tokens, is_split=build.is_split),
        layers=runtime.features.add(_compilable_layers(build)),
        follow=runtime.gradients.follow,
    )
    runtime.features.add(forward)
    if build.structure is not None:  # dynamo may trace the forward of a model of which nothing is cut
        add_step(build.decoder, EnteredForward(forward))
    keep_documents_apart(build.of_decoder)


def _compilable_layers(build: Build) -> CompilableLayers:
    found = layers_of(build.decoder, build.structure)
    refusal = next(filter(None, (row.reason(build) for row in UNCOMPILABLE)), None)
    is_whole = build.structure is None and (refusal is None or not found)
    return CompilableLayers(found, refusal=refusal, is_model_traceable=is_whole)


def scale_float8(build: Build) -> None:
    """Give float8 layers the scales of the whole tensors, of which ranks have parts."""
    if build.runtime.mesh.size > 1:
        weights = build.runtime.weights
        reader_of = (lambda _: None) if weights is None else weights.reader_of_float8
        layers = build.runtime.features.add(Float8Layers(build.facts, build.runtime.mesh, reader_of))
        forward = build.runtime.features.get(ForwardState)
        forward.check_layers = layers.check
        forward.shares_tokens |= layers.waits_for_tokens


def cut_blocks(build: Build) -> None:
    """Add the hooks of tensor and sequence parallelism at the borders of the decoder's blocks."""
    if build.tensor_structure is None:
        return
    features = build.runtime.features
    blocks, region = install_tensor_parallel(
        build.tensor_structure,
        build.runtime.mesh.tp,
        streams=build.runtime.streams,
        keep_logits_sharded=features.get(ForwardState).keep_logits_sharded,
        is_staged=build.cut is not None,
    )
    features.get(CompilableLayers).blocks = blocks
    features.get(HookedModules).whole = WholeHooks(build.tensor_structure, build.runtime.mesh.tp, region)
    if region is not None:
        features.add(region)


def spread_experts(build: Build) -> None:
    """Let experts that are spread over ranks get the tokens that are routed to them."""
    ep, etp = build.runtime.mesh.ep, build.runtime.mesh.etp
    keep_local_adapters(build.of_decoder, ep.size)
    for experts in filter(is_experts, build.of_decoder.names):
        if etp.size > 1 and has_output_bias(experts):
            add_step(experts, OutputBiasOnce(experts, etp))
        if ep.size > 1:
            add_step(experts, ExpertDispatch(experts, ep, build.config.token_dispatcher))
        if etp.size > 1:
            add_step(experts, SlicedExperts(etp))


def count_experts(build: Build) -> None:
    """Let the tokens of each expert be counted, if somebody asks for them."""
    if has_experts(build.of_decoder):
        region = build.runtime.features.find(ContextRegion)
        counts = ExpertCounts(build.decoder, mesh=build.runtime.mesh, region=region)
        add_step(build.decoder, build.runtime.features.add(counts))


def generate_alike(build: Build) -> None:
    """Let all ranks take part in ``generate`` alike, and refuse it where they have parts of a pass."""
    runtime, spreads = build.runtime, build.plan.spreads_experts_over_dp
    float8 = runtime.features.find(Float8Layers)
    gathers = runtime.weights is not None or (float8 is not None and float8.waits_for_tokens)
    if runtime.mesh.row_copies == 1 and not (gathers or spreads or build.draws_as_one_device):
        return
    for part in build.owners:
        if callable(getattr(part, "generate", None)):
            step = GenerateTogether(
                part, runtime.mesh, runtime.guard, runtime.draws, spreads_experts=spreads, gathers=gathers
            )
            add_step(part, step, "generate")


SPLIT_ROWS = (
    Refusal("any plan", lambda call: split_embedding(call.facts, call.plan, call.config.engine),
            f"the plan {{plan}} splits {{split}}, but {EMBEDDING}", f"{SET_OFF}, or use one device"),
    Refusal("any plan", lambda call: mixed_rows(call.facts, call.plan),
            "the plan {plan} splits the batch over {axes}, but {name} is a {kind}, which {reason}",
            "Use dp=1 without micro-batches, for example plan='pp2'"),
)  # fmt: skip


def _own_code(call: Call) -> Fields | None:
    if (name := experts_of_own_code(call.of_decoder)) is None:
        return None
    fields = "ParallelPlan.ep" + (" and etp" if call.plan.etp > 1 else "")
    kind = type(call.decoder.get_submodule(name)).__name__
    return {"name": name, "kind": kind, "fields": fields, "ranks": call.plan.ep * call.plan.etp}


def _too_few_experts(call: Call) -> Fields | None:
    counts = [{p.shape[0] for p in module.parameters()} for module in call.of_decoder.names if is_experts(module)]
    if _own_code(call) or (counts and not any(len(sizes) > 1 or min(sizes) < call.plan.ep for sizes in counts)):
        return None
    have = f"{', '.join(map(str, sorted(set.union(*counts))))} experts in a layer" if counts else "no experts"
    return {"experts": have, "ranks": call.plan.ep * call.plan.etp}


def _slice(call: Call) -> None:
    """Raise if etp cannot slice the weights of experts, or does not divide their channels."""
    if not (_own_code(call) or _too_few_experts(call)):
        expert_layouts(call.of_decoder, ep=call.plan.ep, etp=call.plan.etp)


def _dispatcher(call: Call) -> Fields:
    return {"name": call.config.token_dispatcher, "known": ", ".join(map(repr, dispatchers()))}


EXPERTS = (
    Refusal("ep, etp", _own_code, "{name} is a {kind}, which {model} calls with code of its own instead of "
            "transformers' interface for experts, so {ranks} ranks cannot share them",
            "Set {fields} to 1: each rank then has whole experts"),
    Refusal("ep, etp", _too_few_experts, "{model} has {experts}, so {ranks} ranks cannot share them",
            "Set ParallelPlan.ep to at most the number of experts of each layer, or ep and etp to 1"),
    Refusal.by("ep, etp", _slice, lambda call: (call,), "Set etp to a divisor, or to 1, and ep for more ranks"),
    Refusal.by("any plan", check_adapted_experts,
               lambda call: (call.of_decoder, call.plan.ep, call.plan.etp, call.plan.zero_stage),
               "Use zero_stage=2, etp=1, and an ep that divides the number of experts"),
    Refusal("any plan", lambda call: call.config.token_dispatcher not in dispatchers() and _dispatcher(call),
            "ToDistributedConfig.token_dispatcher={name!r} is not registered; use one of {known}, or register it on "
            "every rank", "meshwright.register_dispatcher({name!r}, MyDispatcher)"),
    Refusal("any plan", lambda call: (
                call.plan.ep == 1 and call.config.token_dispatcher in dispatchers()[1:] and _dispatcher(call)),
            "ToDistributedConfig.token_dispatcher={name!r} is for experts that ranks share, but ep=1",
            "set ParallelPlan.ep, or leave token_dispatcher out"),
)  # fmt: skip

UNCOMPILABLE = (
    Refusal("compile", lambda decision: not layers_of(decision.decoder, decision.structure),
            "the model has no nn.ModuleList, whose members would be the layers of compile='layers'",
            "leave compile out, and call torch.compile(model) after to_distributed", after_cut=True),
    Refusal("compile", lambda call: call.plan.zero_stage == 3 and call.plan.dp > 1,
            "ParallelPlan.zero_stage=3 gathers each layer's weights while it runs, by hooks on the modules inside, so "
            "compile='layers' would leave graphs of single operations", "set zero_stage=2, or leave compile out"),
    Refusal("compile", lambda call: call.plan.pp > 1 and call.plan.schedule in SPLIT_BACKWARD,
            "ParallelPlan.schedule={schedule!r} computes the gradients of weights apart, which the one backward of a "
            "compiled layer cannot do", "set schedule='1f1b', or leave compile out"),
    Refusal("compile", lambda call: call.plan.ep * call.plan.etp > 1,
            "ParallelPlan.ep={ep} and etp={etp} make the host read how many tokens travel inside each layer, so "
            "compile='layers' would leave pieces of graphs", "set ep=1 and etp=1, or leave compile out"),
    Refusal("compile", lambda call: call.config.engine is not None,
            "{engine} adds its own hooks to the layers' modules, so compile='layers' is not available", "leave it out"),
)  # fmt: skip
