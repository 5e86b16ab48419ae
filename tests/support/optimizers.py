"""Optimizers that tests pass to the library."""

from __future__ import annotations

from typing import Any

import torch


class OfOneNorm(torch.optim.Optimizer):
    """Reads all gradients to update a parameter."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            p.data.sub_(p.grad / norm)


class TrustRatio(torch.optim.Optimizer):
    """A step as long as the parameter, with a momentum of the gradient: LAMB and LARS without their other terms."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    kept = self.state[p].setdefault("momentum", torch.zeros_like(p)).lerp_(p.grad, 0.5)
                    p.sub_(kept * (group["lr"] * (1e-3 + p.norm()) / kept.norm()))
