"""Hooks on gradients see whole, reduced gradients under every plan, and a parameter's shape is that of the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from support.exact import Float64
from support.models import build
from support.short_programs import Plan, batches, distribute, weights_of

pytestmark = pytest.mark.quick

Numbers = list[tuple[str, float]]
SP = {"tp": 2, "sequence_parallel": True}


def halve_large(log: Numbers, name: str) -> Callable[[Tensor], Tensor]:
    """A nonlinear hook, which depends on the norm of the whole gradient and on places in it."""

    def hook(grad: Tensor) -> Tensor:
        log.append((name, grad.norm().item()))
        clipped = grad * min(1.0, 0.02 / grad.norm().item())
        clipped[: len(clipped) // 3] = 0
        return clipped

    return hook


def double(log: Numbers, name: str) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None and parameter.grad.shape == parameter.shape
        log.append((f"sum of {name}", parameter.grad.square().sum().item()))
        parameter.grad.clamp_(-0.01, 0.01).mul_(2)

    return hook


def program(plan: Plan, accumulates: bool = False, whole: bool = True) -> tuple[dict[str, Tensor], Numbers]:
    """Hooks of each kind before the call and after it, one of which removes itself, on accumulated gradients."""
    log: Numbers = []
    with Float64():
        model: Any = build("llama", tie_word_embeddings=accumulates).double()
        named = dict(model.named_parameters())
        for name, parameter in named.items():
            if "q_proj" in name or "norm" in name:
                parameter.register_hook(halve_large(log, name))
                parameter.register_post_accumulate_grad_hook(double(log, name))
        removed = named["model.norm.weight"].register_hook(lambda grad: grad * 0)
        torch.autograd.graph.register_multi_grad_hook(
            list(model.parameters()), lambda grads: log.append(("before", sum(x.norm().item() for x in grads)))
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, loader = distribute(plan, model, optimizer, batches(4))
        removed.remove()
        for name, parameter in model.named_parameters():
            if "down_proj" in name or "k_proj" in name or "embed" in name:
                parameter.register_hook(halve_large(log, name))
                parameter.register_hook(lambda grad: grad + 1e-3)
                parameter.register_post_accumulate_grad_hook(double(log, name))
        torch.autograd.graph.register_multi_grad_hook(
            list(model.parameters()), lambda grads: log.append(("after", sum(x.norm().item() for x in grads)))
        )
        first = [x for x in model.parameters() if x.ndim == 2]
        torch.autograd.graph.register_multi_grad_hook(
            first, lambda grad: log.append(("any", grad.norm().item())), mode="any"
        )
        for step, batch in enumerate(loader):
            model(**batch).loss.backward()
            if not accumulates or step % 2:
                optimizer.step()
                optimizer.zero_grad()
    return weights_of(model, plan), log
