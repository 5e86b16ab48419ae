"""Finds plans that cannot have compiled layers, and says what to write instead."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from meshwright.errors import PlanError
from meshwright.parallel.forward.compile_options import check_compile_options
from meshwright.parallel.forward.compiled_layers import outermost_layers
from meshwright.plan.config import ParallelPlan, ToDistributedConfig
from meshwright.plan.schedule import SPLIT_BACKWARD
from meshwright.roles import Decoder


def layers_of(decoder: nn.Module, structure: Decoder | None) -> list[nn.Module]:
    """Return the layers of a decoder, which ``compile="layers"`` compiles one by one."""
    return list(outermost_layers(decoder) if structure is None else structure.layers)


def check_compile(layers: Sequence[nn.Module], plan: ParallelPlan, config: ToDistributedConfig) -> None:
    """Raise a PlanError if a config asks for compiled layers that a model cannot have under a plan."""
    if config.compile is None:
        return
    check_compile_options(config.compile_options or {}, has_collectives=plan.tp > 1)
    if (refusal := why_not_compiled(layers, plan, config.engine)) is not None:
        raise PlanError(refusal)


def why_not_compiled(layers: Sequence[nn.Module], plan: ParallelPlan, engine: str | None = None) -> str | None:
    """Return why the layers of a model cannot be compiled under a plan, with the cure; None if they can."""
    if not layers:
        return (
            "the model has no nn.ModuleList, whose members would be the layers of compile='layers'; leave compile out, "
            "and call torch.compile(model) after to_distributed"
        )
    if plan.zero_stage == 3 and plan.dp > 1:
        return (
            "ParallelPlan.zero_stage=3 gathers each layer's weights while it runs, by hooks on the modules inside, so "
            "compile='layers' would leave graphs of single operations; set zero_stage=2, or leave compile out"
        )
    if plan.pp > 1 and plan.schedule in SPLIT_BACKWARD:
        return (
            f"ParallelPlan.schedule={plan.schedule!r} computes the gradients of weights apart, which the one backward "
            "of a compiled layer cannot do; set schedule='1f1b', or leave compile out"
        )
    if plan.ep * plan.etp > 1:
        return (
            f"ParallelPlan.ep={plan.ep} and etp={plan.etp} make the host read how many tokens travel inside each "
            "layer, so compile='layers' would leave pieces of graphs; set ep=1 and etp=1, or leave compile out"
        )
    if engine is not None:
        return f"{engine} adds its own hooks to the layers' modules, so compile='layers' is not available; leave it out"
    return None
