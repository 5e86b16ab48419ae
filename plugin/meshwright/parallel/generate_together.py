"""Make tensor-parallel ranks draw the same tokens in ``generate``, since they process the same rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from meshwright.faults.every_rank import on_every_rank
from meshwright.faults.guard import Guard
from meshwright.mesh.axes import Axis
from meshwright.parallel.collectives import agree
from meshwright.parallel.method_override import MethodOverride


def sample_together(model: nn.Module, tp: Axis, guard: Guard | None) -> None:
    """Make ``model.generate`` begin with the first rank's random state on all ranks of the TP axis.

    If the first rank has the seed of a one-device run, the ranks draw that run's tokens. All ranks end in the same
    random state.

    Args:
        model: a model or an adapter's wrapper around one, changed in place if it has a ``generate``.
        tp: the axis whose ranks process the same rows.
        guard: the guard that checks that all ranks of the axis call ``generate``; None on one process.
    """
    if tp.size == 1 or not callable(getattr(model, "generate", None)):
        return
    override: Any = _SampleTogether(model, tp, guard)
    object.__setattr__(model, "generate", override)


class _SampleTogether(MethodOverride):
    """Replaces a model's ``generate``; see ``sample_together``."""

    def __init__(self, model: Any, tp: Axis, guard: Guard | None):
        super().__init__(model.generate)
        self.model, self.tp, self.guard = model, tp, guard

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.generate(*args, **kwargs)

    @on_every_rank
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate tokens; every rank must make the call."""
        if self.guard is not None:
            self.guard.meet("generate", self.tp.group)
        _take_first_state(next(self.model.parameters()).device, self.tp)
        return self.method(*args, **kwargs)


def _take_first_state(device: torch.device, tp: Axis) -> None:
    torch.set_rng_state(agree(torch.get_rng_state().to(device), tp).cpu())
    if device.type == "cuda":
        torch.cuda.set_rng_state(agree(torch.cuda.get_rng_state(device).to(device), tp).cpu(), device)
