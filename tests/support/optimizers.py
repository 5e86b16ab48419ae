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


class Lamb(torch.optim.Optimizer):
    """Adam's direction with weight decay, as long as the parameter (You et al., 2020)."""

    def __init__(self, params: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["step"] = count = state.get("step", 0) + 1
                mean = state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 1 - first)
                square = state.setdefault("square", torch.zeros_like(p)).lerp_(p.grad**2, 1 - second)
                update = mean / (1 - first**count) / ((square / (1 - second**count)).sqrt() + 1e-6)
                update += group["decay"] * p
                ratio = p.norm() / update.norm()
                p.sub_(update * group["lr"] * (ratio if 0 < ratio < torch.inf else 1.0))


class HeadMuon(torch.optim.Optimizer):
    """Muon that orthogonalises the rows of each attention head by themselves, in the parameter's own precision."""

    def __init__(self, params: Any, lr: float = 1e-2, rows: int = 1 << 30):
        super().__init__(params, {"lr": lr, "rows": rows})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                kept = self.state[p].setdefault("momentum", torch.zeros_like(p)).lerp_(p.grad, 0.05)
                for head, rows in zip(p.split(group["rows"]), kept.split(group["rows"]), strict=True):
                    x = rows / rows.norm().clamp(min=1e-7)
                    for _ in range(5):
                        gram = x @ x.T
                        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
                    head.sub_(group["lr"] * x)


class Shampoo(torch.optim.Optimizer):
    """A gradient between the inverse roots of the sums of its products over each dim (Gupta et al., 2018)."""

    def __init__(self, params: Any, lr: float = 1e-2, eps: float = 1e-3):
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                update = p.grad
                for dim, size in enumerate(p.shape):
                    rows = p.grad.movedim(dim, 0).reshape(size, -1)
                    start = group["eps"] * torch.eye(size, dtype=p.dtype)
                    total = self.state[p].setdefault(f"products of dim {dim}", start).add_(rows @ rows.T)
                    values, vectors = torch.linalg.eigh(total)
                    root = vectors * values.clamp(min=group["eps"]) ** (-0.5 / p.ndim) @ vectors.T
                    update = torch.tensordot(root, update.movedim(dim, 0), 1).movedim(0, dim)
                p.sub_(group["lr"] * update)
