"""Adapters beside experts and on them: equal to one process, under ep too.

1e-10 as for other models: only the order of sums differs.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

import meshwright as mw
from meshwright.facts import Facts
from meshwright.parallel.experts.routers import ReplayedBlock
from meshwright.parallel.method_chain import find_step
from meshwright.plan.text import parse_plan
from meshwright.roles.adapters import without_wrappers
from meshwright.roles.blocks.experts import check_adapted_experts
from support.anatomies import build, loader
from support.exact import Float64
from support.tiers import crossings
from support.whole_runs import assert_equals_one_process, train_whole

TARGETS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "o_proj"]},
    "experts": {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
}
PLANS = ["dp2", "dp2 zero1", "dp2 zero3", "pp2", "tp2", "tp2+sp", "dp2 ep2", "dp2 ep2 zero1", "tp2+sp ep2"]


def adapted(kind: str, name: str = "mixtral") -> Any:
    model = build(name)
    torch.manual_seed(3)
    model = get_peft_model(model, LoraConfig(r=3, **TARGETS[kind]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.double().train()


def train(plan: str | None, kind: str) -> dict[str, Tensor]:
    with Float64():
        return train_whole(adapted(kind), plan and parse_plan(plan), functools.partial(loader, "mixtral"))


reference = functools.cache(functools.partial(train, None))


@pytest.mark.parametrize(
    ("kind", "plan"),
    crossings(
        [(kind, plan) for kind in TARGETS for plan in PLANS if (kind, plan) != ("experts", "dp2 zero3")],
        but=[("attention", "dp2 ep2"), ("experts", "tp2+sp ep2"), ("experts", "dp2 ep2 zero1")],
    ),
)
def test_adapters_equal_one_process(kind: str, plan: str, pool2: Any) -> None:
    assert_equals_one_process(pool2.run(train, plan, kind), reference(kind))


def test_what_calls_adapted_experts_makes_the_choices_of_forward_again() -> None:
    model, _, _ = mw.to_distributed(adapted("experts"), plan="dp1 recompute=full")
    replaying = [name for name, module in model.named_modules() if find_step(module, ReplayedBlock)]
    assert replaying and all(name.endswith(".mlp") for name in replaying)


def test_adapters_of_experts_that_a_plan_cannot_run_are_refused(pool2: Any) -> None:
    decoder = without_wrappers(adapted("experts", "qwen3_moe"))[1]
    with pytest.raises(mw.PlanError, match=r"adapters .* of 5 experts, which 2 ranks cannot share evenly"):
        check_adapted_experts(Facts(decoder), ep=2, etp=1, zero_stage=0)
    with pytest.raises(mw.PlanError, match=r"adapters .* of whole experts.*set etp=1"):
        check_adapted_experts(Facts(decoder), ep=1, etp=2, zero_stage=0)
    for kind, message in pool2.run_expecting_error(train, "dp2 zero3", "experts"):
        assert kind == "PlanError" and "experts' has adapters" in message and "Use zero_stage=2" in message
