"""Decides what a plan does to one model: its weights over tp, its layers over pp, its tokens over cp, or a refusal.

A decision follows from facts, plan and options, without a process group and without a change of anything, so a refusal
comes before the ranks meet. The traces and the fake ranks carry out the same decision.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.choose.runnable_plans import RunnablePlans
from meshwright.context.check_method import check_method
from meshwright.context.record import LENGTHS, ContextRecord, check_token_wise, record_context
from meshwright.context.recorded_pass import ROWS, SOURCE, ContextWatcher
from meshwright.distribute.check_arguments import explained
from meshwright.distribute.installation import REFUSALS
from meshwright.errors import PlanError
from meshwright.facts import Facts
from meshwright.faults.guard import Guard
from meshwright.features.decision import Build, Call, Decision, refuse
from meshwright.features.passes import EXPERTS
from meshwright.mesh.axes import Mesh
from meshwright.optim.runtime import Runtime, find_runtime
from meshwright.parallel.losses.causal_lm import BatchLoss
from meshwright.parallel.losses.head_losses import LossKind, find_loss
from meshwright.parallel.tensor_parallel.shared_tower import shares_towers
from meshwright.parallel.tensor_parallel.structure import DecoderStructure, describe, outline
from meshwright.pipeline.cut import Cut, cut_decoder
from meshwright.pipeline.layer_order import OrderWatcher
from meshwright.plan.config import ParallelPlan, ToDistributedConfig
from meshwright.roles import Decoder, ShardingPlan, plan_for
from meshwright.roles.adapters import decoder_of
from meshwright.roles.blocks import mixers_of
from meshwright.roles.blocks.experts import is_experts


def call_of(
    model: nn.Module | Facts, config: ToDistributedConfig, optimizer: Optimizer | None, device: torch.device
) -> Call:
    """Return a call of ``to_distributed`` whose plan is not chosen yet.

    Args:
        model: the model, with wrappers around its decoder, or its facts. It is not distributed yet: the forward of a
            distributed one has the collectives of all ranks.
        config: the options of the call.
        optimizer: the optimizer over the model's parameters, if the call has one.
        device: the device on which the model will run.
    """
    facts = Facts.of(model)
    assert find_runtime(facts.model) is None
    loss = find_loss(decoder_of(facts).model, config.loss_averages_over)
    return Call(facts=facts, plan=ParallelPlan(), config=config, loss=loss, optimizer=optimizer, device=device)


def decide(call: Call) -> Decision:
    """Decide what the plan of a call does to its model, before the ranks meet; nothing is changed.

    Raises:
        PlanError: if this version cannot run the plan with the model, the optimizer and the options.
    """
    assert not isinstance(call.loss, BatchLoss)
    refuse(call, REFUSALS)
    decision = cut(call.facts, call.plan, call.config, loss=call.loss)
    refuse(decision, REFUSALS)
    return decision


def runnable_plans(call: Call) -> RunnablePlans:
    """Return which plans the runtime takes for a call."""
    return RunnablePlans(call=call, rows=REFUSALS, decide=decide)


def structure_of(
    model: nn.Module | Facts, plan: ParallelPlan, config: ToDistributedConfig, roles: ShardingPlan | None = None
) -> Decoder | None:
    """Return the parts of a decoder that a plan cuts, under tp with the layout of each weight.

    A plan with data parallelism alone cuts nothing; for such a plan, return None.

    Args:
        model: the decoder, or its facts.
        plan: the plan.
        config: the options of the call.
        roles: the roles of the decoder's modules under tp (default: the call's or the family's, or inferred ones).

    Raises:
        PlanError: if the plan cannot cut the decoder.
    """
    facts = Facts.of(model)
    refuse(Call(facts=facts, plan=plan, config=config), EXPERTS)
    axes = [axis for axis, size in plan.sizes_beside_dp.items() if size > 1]
    if not axes:
        return None
    try:
        if plan.tp > 1:
            roles = roles or config.sharding_plan or plan_for(facts)
            sp, shares = plan.sequence_parallel, shares_towers(plan, config.engine)
            found: Decoder = describe(facts, roles, tp=plan.tp, sequence_parallel=sp, shares_towers=shares)
        else:
            instead = f"ParallelPlan({', '.join(f'{axis}=1' for axis in axes)})"
            found = outline(facts, config.sharding_plan, instead=instead)
        _check_layers(found, plan)
        if plan.cp > 1:
            check_token_wise(found, config.sharding_plan)
        return found
    except PlanError as error:
        if (shown := explained(error, facts, axes)) is error:
            raise
        raise shown from error


def _check_layers(found: Decoder, plan: ParallelPlan) -> None:
    """Raise if layers have experts inside of what stays whole, or compute their gradients from two streams."""
    whole = found.whole if isinstance(found, DecoderStructure) else {}
    for name, module in whole.items() if plan.ep * plan.etp > 1 else ():
        if any(map(is_experts, found.facts.inside(module))):
            raise PlanError(
                f"{name} ({type(module).__name__}) stays whole under tp={plan.tp}, so each rank would send all tokens "
                "to the experts inside of it. Use ParallelPlan(ep=1, etp=1), or ParallelPlan(tp=1)"
            )
    layer = next((layer for layer in found.layers if callable(getattr(layer, "backward_pass", None))), None)
    options = {"sequence_parallel": (plan.sequence_parallel, False), "pp": (plan.pp > 1, 1), "cp": (plan.cp > 1, 1)}
    cure = ", ".join(f"{name}={value}" for name, (is_on, value) in options.items() if is_on)
    if layer is not None and cure:
        raise PlanError(
            f"{type(layer).__name__} is a reversible layer, which has two streams of hidden states and computes its "
            f"gradients itself (backward_pass), so neither tokens nor layers can be cut. Use ParallelPlan({cure})"
        )


def _observed(structure: Decoder | None, plan: ParallelPlan) -> tuple[Cut | None, ContextRecord | None]:
    """Return how a pipeline cuts a decoder, for the first rank of pp, and what context parallelism must know of it.

    Both are seen in the same passes without values, one for each length. Where one of them sees nothing, each has its
    own.

    Raises:
        PlanError: if the decoder cannot be cut into the plan's stages, tokens meet outside of transformers' attention
            interface, or the plan's method cannot run its attention.
    """

    @functools.cache
    def both() -> tuple[OrderWatcher, ContextWatcher] | tuple[None, None]:
        assert structure is not None
        order, context = OrderWatcher(structure, LENGTHS[0]), ContextWatcher(structure, LENGTHS[0])
        if plan.pp > 1 and plan.cp > 1:
            with contextlib.suppress(PlanError):
                order.see(context, labels=(ROWS, LENGTHS[0]), source=SOURCE)
                if not context.sees_source(SOURCE):
                    return order, context
        return None, None

    cut, record = None, None
    if structure is not None and plan.pp > 1:
        cut = cut_decoder(structure, plan, rank=0, seen=lambda: both()[0])
    if structure is not None and plan.cp > 1:
        check_method(record := record_context(structure, lambda: both()[1]), plan)
    return cut, record


def cut(
    facts: Facts,
    plan: ParallelPlan,
    config: ToDistributedConfig,
    *,
    loss: LossKind | None,
    roles: ShardingPlan | None = None,
) -> Decision:
    """Decide how a plan cuts a decoder, for the first rank of pp.

    Args:
        facts: what the model shows, with wrappers around its decoder.
        plan: the plan.
        config: the options of the call.
        loss: what the model's loss averages over; None if unknown.
        roles: as in :func:`structure_of`.

    Raises:
        PlanError: if the plan cannot cut it.
    """
    of_decoder = decoder_of(facts)
    structure = structure_of(of_decoder, plan, config, roles)
    stages, context = _observed(structure, plan)
    return Decision(
        facts=facts,
        plan=plan,
        config=config,
        loss=loss,
        structure=structure,
        mixers=mixers_of(of_decoder, structure),
        cut=stages,
        context=context,
    )


def with_roles(decision: Decision, roles: ShardingPlan) -> Decision:
    """Return the same decision with other roles of the decoder's modules under tp."""
    return cut(decision.facts, decision.plan, decision.config, loss=decision.loss, roles=roles)


def build_on_fake_rank(
    model: nn.Module,
    plan: ParallelPlan,
    *,
    config: ToDistributedConfig | None = None,
    device: str = "cpu",
    guard: Guard | None = None,
) -> Build:
    """Decide what ``to_distributed`` would decide on this rank of a fake world, in which no guard meets others."""
    # Nothing is drawn on tensors without values.
    config = dataclasses.replace(config or ToDistributedConfig(), plan=plan, draws="rank")
    facts = Facts(model)
    runtime = Runtime(mesh=Mesh.build(plan.dims, torch.device(device).type), plan=plan, guard=guard)
    return Build.of(cut(facts, plan, config, loss=find_loss(decoder_of(facts).model)), runtime, torch.device(device))
