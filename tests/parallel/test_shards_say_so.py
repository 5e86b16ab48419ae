"""A shard says that it is one: what is exact on shards works on them, what is not raises, and names what to write."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import meshwright as mw
from support.exact import Float64, relative_difference
from support.models import build, tokens

pytestmark = pytest.mark.quick

SP2 = {"tp": 2, "sequence_parallel": True}
ZERO3 = {"dp": 2, "zero_stage": 3}
PP2 = {"pp": 2, "gradient_accumulation_steps": 2}
UP = "model.layers.0.mlp.up_proj.weight"

# What a program might do with a parameter, its gradient or the model, and what the error tells it to write.
WRONG: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "a norm": (lambda model, p: p.norm(), "full_state_dict"),
    "a mean of .data": (lambda model, p: p.data.mean(), "full_state_dict"),
    "a penalty (row 15)": (lambda model, p: sum((x**2).sum() for x in model.parameters()), "weight_decay"),
    "a row": (lambda model, p: p[0], "full_state_dict"),
    "numpy": (lambda model, p: p.detach().numpy(), "full_state_dict"),
    "a comparison": (lambda model, p: torch.equal(p, p.detach().clone()), "full_state_dict"),
    "one vector": (lambda model, p: torch.nn.utils.parameters_to_vector(model.parameters()), "full_state_dict"),
    "pickle": (lambda model, p: pickle.dumps(p), "full_state_dict"),
    "linear (row 24)": (lambda model, p: F.linear(torch.ones(1, 32), model.lm_head.weight), "model.lm_head(hidden)"),
    "matmul": (lambda model, p: torch.ones(1, 48) @ p, "call the module"),
    "embedding": (lambda model, p: F.embedding(tokens(1, 4), model.model.embed_tokens.weight), "call the module"),
    "init (row 24)": (lambda model, p: torch.nn.init.normal_(p), "initialise before to_distributed"),
    "another init": (lambda model, p: torch.nn.init.xavier_uniform_(p), "initialise before to_distributed"),
    "reset_parameters": (lambda model, p: model.lm_head.reset_parameters(), "initialise before to_distributed"),
    "resizing (row 24)": (lambda model, p: model.resize_token_embeddings(120), "before to_distributed"),
    "an average of whole weights": (lambda model, p: torch.zeros(48, 32).lerp_(p.detach(), 0.5), "ema.module"),
    "the same on lists": (lambda model, p: torch._foreach_add_([torch.zeros(48, 32)], [p.data]), "ema.module"),
    "other numbers": (lambda model, p: p.data.add_(torch.ones(24, 32)), "one-device shape"),
    "a norm of gradients": (
        lambda model, p: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        "meshwright.clip_grad_norm_(model, max_norm)",
    ),
    "a sum of squares (row 23)": (lambda model, p: (p.grad**2).sum(), "full_gradients"),
    "a dot product (row 23)": (lambda model, p: torch.dot(p.grad.flatten(), p.grad.flatten()), "full_gradients"),
}


def step_of(model: Any) -> Any:
    ids = tokens(2, 12)
    model(input_ids=ids, labels=ids).loss.backward()
    return model.get_parameter(UP)


def distribute(model: Any, plan: dict[str, Any], optimizer: Any = None) -> Any:
    return mw.to_distributed(model, optimizer, config=mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan)))[:2]


def said_to_each(plan: dict[str, Any]) -> dict[str, str]:
    model, _ = distribute(build("llama"), plan)
    parameter = step_of(model)
    said = {}
    for name, (way, _) in WRONG.items():
        try:
            said[name] = f"gave {way(model, parameter)}"
        except ValueError as error:
            said[name] = str(error)
    return said


@pytest.mark.parametrize("plan", [SP2, ZERO3], ids=str)
def test_what_reads_a_part_as_the_whole_raises(plan: dict[str, Any], pool2: Any) -> None:
    """Rows 15, 23, 24 and 31: reductions, products, draws and copies of a part."""
    for said in pool2.run(said_to_each, plan):
        for name, (_, cure) in WRONG.items():
            assert cure in said[name], name


def counted(plan: dict[str, Any] | None) -> list[int]:
    model: Any = build("llama")
    if plan is not None:
        model, _ = distribute(model, plan)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return [trained, model.num_parameters(), model.num_parameters(exclude_embeddings=True), len(repr(model)) // 10**6]


@pytest.mark.parametrize("plan", [SP2, ZERO3], ids=str)
def test_parameters_are_counted_as_on_one_device(plan: dict[str, Any], pool2: Any) -> None:
    """Row 31: ``sum(p.numel())`` and ``model.num_parameters()``."""
    assert pool2.run(counted, plan) == [counted(None)] * 2


def arithmetic(plan: dict[str, Any] | None, is_zero: bool) -> dict[str, Tensor]:
    """A program that works on weights and gradients element by element, by hand."""
    with Float64():
        model: Any = build("llama").double()
        whole = {name: x.clone() for name, x in model.state_dict().items()}
        if plan is not None:
            model, _ = distribute(model, plan)
        anchor = {name: p.detach().clone() for name, p in model.named_parameters()}
        average = copy.deepcopy(model)
        noise = {name: torch.randn(x.shape, generator=torch.Generator().manual_seed(3)) for name, x in whole.items()}
        for _ in range(2):
            if not is_zero:
                parameter = step_of(model)
                parameter.grad.clamp_(-1e-3, 1e-3)
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.5 * p.grad
                        p.data.add_(p.grad, alpha=-0.1)
                model.zero_grad()
            else:  # under ZeRO gradients are not in .grad
                with torch.no_grad():
                    torch._foreach_mul_([p.data for p in model.parameters()], 0.9)
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.add_(noise[name].double(), alpha=0.01)  # of a whole tensor each rank takes its rows
                    p.clamp_(-1, 1)
                    p.lerp_(anchor[name], 0.1)
                    p.copy_(torch.where(p > 0, p, p * 0.5))
                for a, p in zip(average.parameters(), model.parameters(), strict=True):
                    a.mul_(0.7).add_(p.data, alpha=0.3)
        model.lm_head.weight.data.copy_(whole["lm_head.weight"])
        torch.nn.init.ones_(model.get_parameter("model.layers.1.mlp.down_proj.weight"))
        ids = tokens(2, 12)
        loss = model(input_ids=ids, labels=ids).loss.detach()
        averaged = {f"average of {name}": x for name, x in mw.full_state_dict(average).items()}
        return {**mw.full_state_dict(model), **averaged, "loss": loss}


@pytest.mark.parametrize("plan", [SP2, ZERO3], ids=str)
def test_arithmetic_by_element_is_that_of_one_device(plan: dict[str, Any], pool2: Any) -> None:
    expected, actual = arithmetic(None, plan == ZERO3), pool2.run(arithmetic, plan, plan == ZERO3)[0]
    for name, value in expected.items():  # 1e-9 in float64: the order of sums
        assert "k_proj.bias" in name or relative_difference(actual[name], value) < 1e-9, name


def steps_by_hand(plan: dict[str, Any] | None) -> tuple[list[bool], dict[str, Tensor]]:
    """Whether weights have gradients, as a loop sees it that steps by hand, and what the weights become."""
    with Float64():
        model: Any = build("llama").double()
        if plan is not None:
            model, _ = distribute(model, plan)
        said = []
        for step in range(3):
            said += [p.grad is None for p in model.parameters()]
            ids = tokens(4, 12, seed=step)
            model(input_ids=ids, labels=ids).loss.backward()
            for p in model.parameters():
                if plan is not None:
                    with pytest.raises(mw.UnreadableTensorError, match=r"full_gradients\(model\)"):
                        p.grad.norm()
                p.grad = p.grad * 0.5 + torch.full_like(p, 1e-3)
                with torch.no_grad():
                    p -= 0.1 * p.grad
            model.zero_grad(set_to_none=step == 0)
        return said, mw.full_state_dict(model) if plan is not None else model.state_dict()


def test_gradients_of_other_stages_are_like_those_of_this_one(pool2: Any) -> None:
    (said, expected), found = steps_by_hand(None), pool2.run(steps_by_hand, PP2)
    assert [of_rank for of_rank, _ in found] == [said, said]
    assert all(
        relative_difference(found[0][1][name], x) < 1e-9 for name, x in expected.items() if ".k_proj" not in name
    )


def kernels(plan: dict[str, Any]) -> list[str]:
    """The classes that an optimizer sees while it steps, and afterwards."""
    model = build("llama")
    seen: list[str] = []

    class Spy(torch.optim.AdamW):
        def _init_group(self, group: Any, *args: Any) -> Any:
            seen.extend(f"{type(p).__name__} {type(p.grad).__name__}" for p in group["params"] if p.grad is not None)
            return super()._init_group(group, *args)

    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan), optimizer_is_elementwise=True)
    model, optimizer, _ = mw.to_distributed(model, Spy(model.parameters()), config=config)
    step_of(model)
    optimizer.step()
    inside = sorted(set(seen))
    return [*inside, type(model.get_parameter(UP)).__name__]


@pytest.mark.parametrize("plan", [SP2, {**ZERO3, "zero_stage": 1}, ZERO3], ids=str)
def test_optimizers_choose_their_kernels_as_for_plain_parameters(plan: dict[str, Any], pool2: Any) -> None:
    """torch steps parameters of another class one by one."""
    outside = "Parameter" if plan.get("zero_stage") == 1 else "ShardedParameter"
    assert pool2.run(kernels, plan) == [["Parameter Tensor", outside]] * 2


def step_with_a_closure(plan: dict[str, Any], fails_before: bool) -> None:
    """The penalty comes first, before the model's forward pass."""
    model = build("llama")
    model, optimizer = distribute(model, plan, torch.optim.SGD(model.parameters(), lr=1e-3))

    def closure() -> Tensor:
        penalty = sum((p**2).sum() for p in model.parameters())
        ids = tokens(2, 12)
        return model(input_ids=ids, labels=ids).loss + penalty

    if fails_before:
        with pytest.raises(ZeroDivisionError):
            optimizer.step(lambda: 1 // 0)
        model.get_parameter(UP).norm()
        return
    optimizer.step(closure)


@pytest.mark.parametrize(("fails_before", "advice"), [(False, "weight_decay"), (True, "full_state_dict")])
def test_a_closure_sees_shards(fails_before: bool, advice: str, pool2: Any) -> None:
    """While the optimizer steps, its parameters are plain ones; not in the program's closure, nor after it failed."""
    for kind, message in pool2.run_expecting_error(step_with_a_closure, SP2, fails_before):
        assert kind == "UnreadableTensorError" and advice in message
