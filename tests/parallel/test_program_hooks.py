"""Hooks of the program on gradients see what one device has, and shapes of parameters are those of the whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from support.exact import Float64
from support.models import build
from support.short_programs import Plan, batches, distribute, weights_of, worst

pytestmark = pytest.mark.quick

Numbers = list[tuple[str, float]]
SP = {"tp": 2, "sequence_parallel": True}


def clip_and_mask(log: Numbers, name: str) -> Callable[[Tensor], Tensor]:
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


def hooked(plan: Plan) -> tuple[dict[str, Tensor], Numbers]:
    """Hooks of each kind before the call and after it, one of which is removed, in passes that accumulate."""
    log: Numbers = []

    def note(name: str) -> Callable[[Any], None]:
        return lambda grads: log.append((name, sum(x.norm().item() for x in grads)))

    with Float64():
        model: Any = build("llama", tie_word_embeddings=True).double()
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "norm" in name:
                parameter.register_hook(clip_and_mask(log, name))
                parameter.register_post_accumulate_grad_hook(double(log, name))
        removed = model.model.norm.weight.register_hook(lambda grad: grad * 0)
        torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), note("before the call"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, loader = distribute(plan, model, optimizer, batches(2))
        removed.remove()
        for name, parameter in model.named_parameters():
            if "down_proj" in name or "v_proj" in name or "embed" in name:
                parameter.register_hook(clip_and_mask(log, name))
                parameter.register_hook(lambda grad, p=parameter: grad + 0.1 * p.detach())
                parameter.register_post_accumulate_grad_hook(double(log, name))
        torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), note("after the call"))
        for batch in loader:
            model(**batch).loss.backward()
        optimizer.step()
    return weights_of(model, plan), log


@functools.cache
def of_one_device() -> tuple[dict[str, Tensor], Numbers]:
    return hooked(None)


def check_hooked(plan: dict[str, Any], pool: Any) -> None:
    """1e-9 in float64: the plans differ in the order of sums only. Parameters of a block may come in another order."""
    expected, numbers = of_one_device()
    for rank, (weights, log) in enumerate(pool.run(hooked, plan)):
        assert rank or worst(weights, expected) < 1e-9
        log, numbers = sorted(log, key=lambda x: x[0]), sorted(numbers, key=lambda x: x[0])
        assert [name for name, _ in log] == [name for name, _ in numbers]
        assert [value for _, value in log] == pytest.approx([value for _, value in numbers], rel=1e-9, abs=1e-12)


TWO = [
    {"dp": 2},
    {**SP, "gradient_accumulation_steps": 2},
    {"dp": 2, "zero_stage": 1},
    {"dp": 2, "zero_stage": 3, "gradient_accumulation_steps": 2},
    {"pp": 2, "micro_batch_size": 2},
]


@pytest.mark.parametrize("plan", TWO, ids=str)
def test_hooks_see_whole_reduced_gradients(plan: dict[str, Any], pool2: Any) -> None:
    check_hooked(plan, pool2)


def test_hooks_see_whole_reduced_gradients_on_two_axes(pool4: Any) -> None:
    check_hooked({"dp": 2, **SP, "zero_stage": 1}, pool4)


def shapes(plan: Plan) -> list[object]:
    """Rates by fan-in after the call, and values and gradients that the program gives as wholes."""
    with Float64():
        model: Any = build("llama").double()
        model, _, (batch,) = distribute(plan, model, None, batches(1))
        found: list[object] = [
            (*p.shape, p.size(-1), p.ndim, p.dim(), len(p), p.numel(), p.nelement(), p.stride(), p.nbytes, p.data.shape)
            for p in model.parameters()
        ]
        groups = [{"params": [p], "lr": 0.2 * 32 / p.shape[-1]} for p in model.parameters()]
        optimizer = None if plan is not None and plan.get("zero_stage") else torch.optim.SGD(groups)
        weight = model.model.layers[0].mlp.down_proj.weight
        weight.data = torch.linspace(-0.1, 0.1, weight.numel()).view(weight.shape).double()
        model(**batch).loss.backward()
        found += [p.grad.shape for p in model.parameters()]
        weight.grad = torch.ones(weight.shape).double()
        if optimizer is not None:
            optimizer.step()
    return [found, weights_of(model, plan) if optimizer is not None else {}]


@pytest.mark.parametrize("plan", [SP, {"dp": 2, "zero_stage": 3}], ids=str)
def test_the_shape_of_a_parameter_is_that_of_the_whole(plan: dict[str, Any], pool2: Any) -> None:
    found, weights = shapes(None)
    for rank, (theirs, stepped) in enumerate(pool2.run(shapes, plan)):
        assert theirs == found
        assert rank or not stepped or worst(stepped, weights) < 1e-9


def refused(plan: Plan, case: str) -> None:
    model: Any = build("llama")
    model, _, (batch,) = distribute(plan, model, None, batches(1))
    weight = model.model.norm.weight
    if case == "in a window":
        with mw.no_sync(model):
            model(**batch).loss.backward()
        weight.register_hook(lambda grad: None)
    elif case == "in a pass":
        model.model.layers[0].register_full_backward_hook(lambda *_: weight.register_hook(lambda grad: None) and None)
        model(**batch).loss.backward()
    elif case == "in parts":
        weight.register_hook(lambda grad: None)
        x = torch.ones(2, requires_grad=True)
        parts = [checkpoint(lambda x: (x.sum() * weight).sum(), x, use_reentrant=True) for _ in range(2)]
        (parts[0] + parts[1] + model.lm_head.weight.sum()).backward()
    else:
        if torch.distributed.get_rank() == 0:
            weight.register_hook(lambda grad: None)
        model(**batch).loss.backward()


@pytest.mark.parametrize(
    ("case", "cure"),
    [
        ("in a window", "Make it before the first pass of the accumulation window"),
        ("in a pass", "Make it before the pass: parameter.register_hook"),
        ("in parts", "use_reentrant=False"),
        ("on one rank", "hooks on gradients"),
    ],
)
def test_a_hook_that_would_see_something_else_is_refused(case: str, cure: str, pool2: Any) -> None:
    for _, message in pool2.run_expecting_error(refused, {"dp": 2}, case):
        assert cure in message, message
