"""Models that see images of which the program trains or recomputes a part: frozen towers, LoRA, checkpointed towers.

Tolerance 1e-10 of a tensor's largest value, as in ``test_vision.py``.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from meshwright.roles.adapters import without_wrappers
from meshwright.roles.decoder import towers_of
from support.exact import Float64
from support.tiers import crossings
from support.vision_models import build, loader
from support.whole_runs import assert_equals_one_process, train_whole

FAMILIES = ("llava", "gemma3", "qwen3_vl")
PLANS: dict[str, dict[str, Any]] = {
    "dp2 zero3": {"dp": 2, "zero_stage": 3},
    "tp2+sp": {"tp": 2, "sequence_parallel": True},
    "pp2 mb1": {"pp": 2, "micro_batch_size": 1},
    "cp2": {"cp": 2},
}
OF_TOWERS = r".*vis.*\.(q_proj|fc1|qkv|linear_fc2)"
OF_DECODER = r".*language_model.*\.(q_proj|o_proj|down_proj)"
PARTS = ("frozen tower", "LoRA on the tower", "LoRA on the decoder", "recomputed tower", "recomputed decoder")
MAIN = [
    ("qwen3_vl", "LoRA on the tower", "pp2 mb1"),
    ("gemma3", "LoRA on the decoder", "cp2"),
    ("gemma3", "frozen tower", "dp2 zero3"),
    ("llava", "recomputed tower", "tp2+sp"),
]


def prepared(family: str, part: str) -> Any:
    model = build(family, freezes_tower=part == "frozen tower")
    if part.startswith("LoRA"):
        torch.manual_seed(3)
        targets = OF_TOWERS if part.endswith("tower") else OF_DECODER
        model = get_peft_model(model, LoraConfig(r=3, target_modules=targets))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # PEFT starts with zeros, where the first factor has no gradient
                torch.nn.init.normal_(parameter, std=0.1)
    if part.startswith("recomputed"):
        decoder = without_wrappers(model)[1]
        of_towers = {module for tower in towers_of(decoder) for module in tower.modules()}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for module in model.modules():
            if hasattr(module, "gradient_checkpointing") and (module in of_towers) != (part == "recomputed tower"):
                module.gradient_checkpointing = False
    return model.double().train()


def train(plan: dict[str, Any] | None, family: str, part: str) -> dict[str, Tensor]:
    with Float64():
        counts = [(1, 1), (1, 1), (1, 1)]
        return train_whole(prepared(family, part), plan, functools.partial(loader, family, counts))


@functools.cache
def reference(family: str, part: str) -> dict[str, Tensor]:
    found = train(None, family, part)
    gradients = [name for name in found if name.startswith("gradient of")]
    assert gradients and all(("lora" in name) == part.startswith("LoRA") for name in gradients)
    return found


@pytest.mark.parametrize(
    ("family", "part", "plan_name"), crossings(itertools.product(FAMILIES, PARTS, PLANS), but=MAIN)
)
def test_equals_one_process(family: str, part: str, plan_name: str, pool2: Any) -> None:
    assert_equals_one_process(pool2.run(train, PLANS[plan_name], family, part), reference(family, part))
