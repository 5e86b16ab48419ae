"""Text that tensor-parallel ranks generate together: they share its rows, so they must draw the same tokens."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import nn

from meshwright.faults.guard import Guard
from meshwright.parallel.collectives import Axis, agree


def sample_together(model: nn.Module, tp: Axis, guard: Guard | None) -> None:
    """Make ``model.generate`` begin with the first rank's random state on all ranks of the TP axis.

    Seeded like one device on that rank, it gives one device's tokens; all ranks end in the same state.

    Args:
        model: a model or an adapter's wrapper around one, changed in place if it has a ``generate``.
        tp: the ranks that share rows.
        guard: compares that all of them are there.
    """
    if tp.size == 1 or not callable(getattr(model, "generate", None)):
        return
    stock: Any = type(model)
    inner = vars(model).get("generate")  # ZeRO stage 3 has one of its own

    @functools.wraps(stock.generate)
    def generate(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if guard is not None:
            guard.meet("generate", tp.group)
        _take_first_state(next(self.parameters()).device, tp)
        return inner(*args, **kwargs) if inner is not None else stock.generate(self, *args, **kwargs)

    # A method rather than a closure over the model: a copy of the model then generates by its own weights.
    object.__setattr__(model, "generate", types.MethodType(generate, model))


def _take_first_state(device: torch.device, tp: Axis) -> None:
    torch.set_rng_state(agree(torch.get_rng_state().to(device), tp).cpu())
    if device.type == "cuda":
        torch.cuda.set_rng_state(agree(torch.cuda.get_rng_state(device).to(device), tp).cpu(), device)
