"""Determines how a plan cuts one decoder: its weights over tp, its layers over pp, its tokens over cp."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from meshwright.context.check_method import check_method
from meshwright.context.record import ContextRecord, record_context
from meshwright.context.token_wise import check_token_wise
from meshwright.distribute.check_arguments import explained
from meshwright.errors import PlanError
from meshwright.faults.guard import Guard
from meshwright.features.build import Build
from meshwright.mesh.axes import Mesh
from meshwright.optim.runtime import Runtime
from meshwright.parallel.experts.token_dispatchers import check_dispatcher
from meshwright.parallel.losses.head_losses import find_loss
from meshwright.parallel.tensor_parallel.shared_tower import shares_towers
from meshwright.parallel.tensor_parallel.structure import DecoderStructure, describe, outline
from meshwright.pipeline.cut import Cut, cut_decoder
from meshwright.plan.config import ParallelPlan, ToDistributedConfig
from meshwright.roles import Decoder, ShardingPlan, plan_for
from meshwright.roles.adapters import without_wrappers
from meshwright.roles.blocks import mixers_of
from meshwright.roles.blocks.adapted_experts import check_adapted_experts
from meshwright.roles.blocks.experts import check_experts, is_experts


def structure_of(
    decoder: nn.Module, plan: ParallelPlan, config: ToDistributedConfig, roles: ShardingPlan | None = None
) -> Decoder | None:
    """Return the parts of a decoder that a plan cuts, under tp with the layout of each weight.

    A plan with data parallelism alone cuts nothing; for such a plan, return None.

    Args:
        decoder: the decoder.
        plan: the plan.
        config: the options of the call.
        roles: the roles of the decoder's modules under tp (default: the call's or the family's, or inferred ones).

    Raises:
        PlanError: if the plan cannot cut the decoder.
    """
    check_experts(decoder, ep=plan.ep, etp=plan.etp)
    check_adapted_experts(decoder, ep=plan.ep, etp=plan.etp, zero_stage=plan.zero_stage)
    check_dispatcher(config.token_dispatcher, plan.ep)
    axes = [axis for axis, size in plan.sizes_beside_dp.items() if size > 1]
    if not axes:
        return None
    try:
        if plan.tp > 1:
            roles = roles or config.sharding_plan or plan_for(decoder)
            sp, shares = plan.sequence_parallel, shares_towers(plan, config.engine)
            found: Decoder = describe(decoder, roles, tp=plan.tp, sequence_parallel=sp, shares_towers=shares)
        else:
            instead = f"ParallelPlan({', '.join(f'{axis}=1' for axis in axes)})"
            found = outline(decoder, config.sharding_plan, instead=instead)
        _check_layers(found, plan)
        if plan.cp > 1:
            check_token_wise(found, config.sharding_plan)
        return found
    except PlanError as error:
        if (shown := explained(error, decoder, axes)) is error:
            raise
        raise shown from error


def _check_layers(found: Decoder, plan: ParallelPlan) -> None:
    """Raise if layers have experts inside of what stays whole, or compute their gradients from two streams."""
    whole = found.whole if isinstance(found, DecoderStructure) else {}
    for name, module in whole.items() if plan.ep * plan.etp > 1 else ():
        if any(map(is_experts, module.modules())):
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


def cut_of(decoder: nn.Module, structure: Decoder | None, plan: ParallelPlan, rank: int) -> Cut | None:
    """Return how the plan's pipeline cuts a decoder, for this rank of pp; None without a pipeline.

    Raises:
        PlanError: if the decoder cannot be cut into the plan's stages.
    """
    if plan.pp == 1:
        return None
    assert structure is not None
    return cut_decoder(decoder, structure, plan, rank=rank)


def context_of(structure: Decoder | None, plan: ParallelPlan) -> ContextRecord | None:
    """Return what context parallelism needs to know of a decoder; None without context parallelism.

    Raises:
        PlanError: if tokens meet outside of transformers' attention interface, or the plan's method cannot run its
            attention.
    """
    if plan.cp == 1:
        return None
    assert structure is not None
    record = record_context(structure)
    check_method(record, plan)
    return record


@dataclass(frozen=True, kw_only=True)
class Cuts:
    """How a plan cuts one decoder: the fields of the same names of a :class:`Build`."""

    structure: Decoder | None
    mixers: Mapping[str, nn.Module]
    cut: Cut | None
    context: ContextRecord | None

    @classmethod
    def of(
        cls,
        decoder: nn.Module,
        plan: ParallelPlan,
        config: ToDistributedConfig,
        *,
        rank: int = 0,
        roles: ShardingPlan | None = None,
    ) -> Cuts:
        """Decide how a plan cuts a decoder, for a rank of pp; ``roles`` as in :func:`structure_of`.

        Raises:
            PlanError: if the plan cannot cut it.
        """
        structure = structure_of(decoder, plan, config, roles)
        return cls(
            structure=structure,
            mixers=mixers_of(decoder, structure),
            cut=cut_of(decoder, structure, plan, rank),
            context=context_of(structure, plan),
        )

    def of_rank(self, rank: int) -> Cuts:
        """Return the same for another rank of pp."""
        return self if self.cut is None else dataclasses.replace(self, cut=dataclasses.replace(self.cut, rank=rank))


def build_on_fake_rank(
    model: nn.Module,
    plan: ParallelPlan,
    *,
    config: ToDistributedConfig | None = None,
    device: str = "cpu",
    guard: Guard | None = None,
) -> Build:
    """Decide what ``to_distributed`` would decide on this rank of a fake world, in which no guard meets others."""
    decoder = without_wrappers(model)[1]
    # Nothing is drawn on tensors without values.
    config = dataclasses.replace(config or ToDistributedConfig(), plan=plan, draws="rank")
    mesh = Mesh.build(plan.dims, torch.device(device).type)
    return Build(
        model=model,
        plan=plan,
        config=config,
        loss=find_loss(decoder),
        runtime=Runtime(mesh=mesh, plan=plan, guard=guard),
        device=torch.device(device),
        **vars(Cuts.of(decoder, plan, config, rank=mesh.pp.rank)),
    )
