"""A decision and the objects that carry it out, which the parts of a plan read when they are installed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.features.decision import Decision
from meshwright.optim.runtime import Runtime


@dataclass(frozen=True, kw_only=True)
class Build(Decision):
    """What was decided about one model, and the objects that carry it out.

    Args:
        runtime: the state that the model will carry; it holds this rank's axes.
        device: the device of this rank's weights.
        optimizer: the optimizer over the model's parameters, if the call has one.
        wholes: for the modules that tp lets read the sizes of a rank's part: what they had read of the whole.
    """

    runtime: Runtime
    device: torch.device
    optimizer: Optimizer | None = None
    wholes: dict[nn.Module, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, decision: Decision, runtime: Runtime, device: torch.device) -> Build:
        """Return a decision for this rank of pp, with the objects that carry it out."""
        return cls(**vars(decision.of_rank(runtime.mesh.pp.rank)), runtime=runtime, device=device)

    def with_optimizer(self, optimizer: Optimizer | None) -> Build:
        """Return the same for a call with an optimizer."""
        return dataclasses.replace(self, optimizer=optimizer)
