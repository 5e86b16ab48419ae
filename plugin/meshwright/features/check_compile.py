"""Finds plans that cannot have compiled layers, and says what to write instead."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from meshwright.parallel.forward.compiled_layers import outermost_layers
from meshwright.plan.config import ParallelPlan
from meshwright.plan.schedule import SPLIT_BACKWARD
from meshwright.roles import Decoder


def layers_of(decoder: nn.Module, structure: Decoder | None) -> list[nn.Module]:
    """Return the layers of a decoder, which ``compile="layers"`` compiles one by one."""
    return list(outermost_layers(decoder) if structure is None else structure.layers)


def why_not_compiled(layers: Sequence[nn.Module], plan: ParallelPlan, engine: str | None = None) -> str | None:
    """Return why the layers of a model cannot be compiled under a plan, with the cure; None if they can."""
    reasons = (
        (not layers, "the model has no nn.ModuleList, whose members would be the layers of compile='layers'; leave "
         "compile out, and call torch.compile(model) after to_distributed"),
        (plan.zero_stage == 3 and plan.dp > 1, "ParallelPlan.zero_stage=3 gathers each layer's weights while it runs, "
         "by hooks on the modules inside, so compile='layers' would leave graphs of single operations; set "
         "zero_stage=2, or leave compile out"),
        (plan.pp > 1 and plan.schedule in SPLIT_BACKWARD, f"ParallelPlan.schedule={plan.schedule!r} computes the "
         "gradients of weights apart, which the one backward of a compiled layer cannot do; set schedule='1f1b', or "
         "leave compile out"),
        (plan.ep * plan.etp > 1, f"ParallelPlan.ep={plan.ep} and etp={plan.etp} make the host read how many tokens "
         "travel inside each layer, so compile='layers' would leave pieces of graphs; set ep=1 and etp=1, or leave "
         "compile out"),
        (engine is not None, f"{engine} adds its own hooks to the layers' modules, so compile='layers' is not "
         "available; leave it out"),
    )  # fmt: skip
    return next((reason for is_so, reason in reasons if is_so), None)
