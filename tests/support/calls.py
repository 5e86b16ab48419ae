"""Calls of ``to_distributed`` as their refusals see them."""

from __future__ import annotations

from typing import Any

from torch import nn

import meshwright as mw
from meshwright.facts import Facts
from meshwright.features.decision import Call


def call_of(model: nn.Module, loss: Any = None, config: dict[str, Any] | None = None, **plan: Any) -> Call:
    """Return a call with a plan of these fields and these options."""
    options = mw.ToDistributedConfig(**config or {})
    return Call(facts=Facts(model), plan=mw.ParallelPlan(**plan), config=options, loss=loss)
