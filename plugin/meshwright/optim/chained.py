"""Several optimizers as one, such as Muon for the matrices of a model and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class ChainedOptimizer(Optimizer):
    """Several optimizers that step one after the other, as one optimizer for the whole model.

    It has the groups and the state of all of them, so a scheduler, a scaler, ``zero_grad`` and a checkpoint reach each.
    Nothing is copied: a group of the chain is the group of its optimizer.

    Args:
        optimizers: the optimizers, each of other parameters, in the order in which they step.

    Raises:
        ValueError: without optimizers, or if two of them have the same parameter.

    Example::

        matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "head" not in n]
        others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
        optimizer = mw.ChainedOptimizer(torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-3))
        model, optimizer, loader = mw.to_distributed(model, optimizer, loader)
    """

    def __init__(self, *optimizers: Optimizer):
        if not optimizers or not all(isinstance(each, Optimizer) for each in optimizers):
            raise ValueError("ChainedOptimizer takes torch optimizers: ChainedOptimizer(Muon(...), AdamW(...))")
        self.optimizers = optimizers
        super().__init__([group for each in optimizers for group in each.param_groups], {})
        for each in optimizers:
            self.state.update(each.state)
        self._share()

    def _share(self) -> None:
        """Let the optimizers have the groups and the state of the chain."""
        groups = list(self.param_groups)
        for each in self.optimizers:
            count = len(each.param_groups)
            each.param_groups, groups = groups[:count], groups[count:]
            each.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step each optimizer; a closure is evaluated once, before the first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for each in self.optimizers:
            each.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise, except for the groups that the optimizers already have: add others to an optimizer before."""
        if not any(param_group is group for each in self.optimizers for group in each.param_groups):
            raise ValueError("add the group to one of the optimizers before they are chained")
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()
        for each in self.optimizers:
            each.__setstate__({"state": self.state, "param_groups": each.param_groups})


def members(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Return the optimizers of a chain, or the optimizer itself."""
    return optimizer.optimizers if isinstance(optimizer, ChainedOptimizer) else (optimizer,)
