"""Parameters that a program adds to a distributed model: an error with the cure under every plan, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import meshwright as mw
from support.adapters import CAN_ADD_ADAPTERS
from support.models import build, labels_for, tokens

CONFIG = LoraConfig(r=2, target_modules=["q_proj", "down_proj"])


def wrapped(model: Any) -> Any:
    return get_peft_model(model, CONFIG)


def with_adapter(model: Any) -> Any:
    model.add_adapter(CONFIG)
    return model


def with_layer(model: Any) -> Any:
    model.model.layers[-1].extra = nn.Linear(2, 2)
    return model


def with_scale(model: Any) -> Any:
    model.model.layers[-1].scale = nn.Parameter(model.model.layers[-1].input_layernorm.weight.detach().clone())
    return model


def replaced(model: Any) -> Any:
    norm = model.model.layers[-1].input_layernorm
    norm.weight = nn.Parameter(norm.weight.detach().clone())
    return model


PLANS = ["dp1", "tp2", "dp2", "dp2 zero1", "pp2 mb2"]
ADDITIONS = {
    "get_peft_model": (wrapped, "lora_A"),
    **({"add_adapter": (with_adapter, "lora_A")} if CAN_ADD_ADAPTERS else {}),
    "a layer": (with_layer, "layers.1.extra.weight and 1 more"),
    "a parameter": (with_scale, "layers.1.scale: added"),
    "another parameter": (replaced, "layers.1.input_layernorm.weight: added"),
}


def outcomes(plan: str, names: list[str]) -> list[str]:
    """What a training step raises after each of the changes, each made to a model of its own."""
    return [outcome(plan, ADDITIONS[name][0]) for name in names]


def outcome(plan: str, add: Callable[[Any], Any]) -> str:
    ids = tokens(4, 8)
    batches: Any = [{"input_ids": ids, "labels": labels_for(ids)}]
    model: Any = build("llama")
    optimizer: Any = torch.optim.AdamW(model.parameters())
    model, optimizer, batches = mw.to_distributed(model, optimizer, batches, plan=plan)
    (batch,) = batches
    model(**batch).loss.backward()
    optimizer.step()
    nn.Linear(2, 2)  # a module outside the model is no concern
    model(**batch).loss.backward()
    try:
        add(model)(**batch)
    except Exception as error:  # any other error fails the test
        return f"{type(error).__name__}: {error}"
    return "trains"


@pytest.mark.parametrize("plan", PLANS)
def test_added_parameters_are_an_error(plan: str, pool2: Any) -> None:
    # Under pp a rank has no modules of the other stage, so that only adapters of all layers are added on each rank.
    names = [name for name, (_, added) in ADDITIONS.items() if "pp" not in plan or added == "lora_A"]
    ranks = [outcomes(plan, names)] if plan == "dp1" else pool2.run(outcomes, plan, names)
    for found in ranks:
        for name, said in zip(names, found, strict=True):
            assert said.startswith("PlanError: ") and ADDITIONS[name][1] in said, (name, said)
            assert "model = get_peft_model(model, config); model, optimizer, loader = to_distributed(" in said


def test_parameters_of_a_functional_call_are_not_added() -> None:
    model, _, _ = mw.to_distributed(build("llama"), plan="dp1")
    own = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}
    nn.Linear(2, 2)
    ids = tokens(4, 8)
    torch.func.functional_call(model, own, (), {"input_ids": ids, "labels": ids}).loss.backward()
    assert all(p.grad is not None for p in own.values())
