"""Which plans cannot have compiled layers, and what to write instead."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from meshwright.config import ParallelPlan
from meshwright.pipeline.schedule import SPLIT_BACKWARD


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
    if engine is not None:
        return f"{engine} adds its own hooks to the layers' modules, so compile='layers' is not available; leave it out"
    return None
