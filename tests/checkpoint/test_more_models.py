"""Models with towers or mixers: built by slices, saved, exported and resumed under another plan, bit for bit.

Everything is compared bitwise, since nothing is computed but the steps before a checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig

import meshwright as mw
import meshwright_hf
from meshwright_tools.checkpoints.inspect_checkpoint import inspect_checkpoint
from support import hybrid_models, vision_models
from support.construction import assert_equal
from support.tiers import crossings

MODELS = ("qwen3_vl", "gemma3", "llava", "qwen3_5_text", "mamba2")
PLANS = ("tp2+sp", "dp2 zero3", "pp2 mb1")


def factory(family: str) -> Any:
    sees_images = family in vision_models.FAMILIES
    return transformers.AutoModelForImageTextToText if sees_images else transformers.AutoModelForCausalLM


def build(family: str) -> Any:
    module: Any = vision_models if family in vision_models.FAMILIES else hybrid_models
    return module.build(family).float()


def step(model: Any, optimizer: Any, family: str) -> None:
    """One step on a batch of the family; gradients differ from weights by more than rounding."""
    if family in vision_models.FAMILIES:
        batch = vision_models.collate(family, vision_models.samples(family, (1, 1)))
        batch = {name: x.float() if x.is_floating_point() else x for name, x in batch.items()}
    else:
        batch = next(iter(hybrid_models.loader(rows=2)))
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def load_and_save(family: str, plan: str, how: str, folder: Path, out: Path) -> dict[str, torch.Tensor]:
    """Load a published checkpoint by slices, save it again, and return the whole weights."""
    if how == "from_pretrained":
        meshwright_hf.register()
        try:
            model = factory(family).from_pretrained(folder, distributed_config=plan)
        finally:
            meshwright_hf.unregister()
    else:
        with torch.device("meta"):
            model = factory(family).from_config(AutoConfig.from_pretrained(folder))
        model = mw.to_distributed(model, config=mw.ToDistributedConfig(plan=plan, weights=folder))[0]
    model.save_pretrained(out)
    return mw.full_state_dict(model)


CASES = [(family, plan, how) for family in MODELS for plan in PLANS for how in ("from_pretrained", "meta")]


@pytest.mark.parametrize(
    ("family", "plan", "how"),
    crossings(CASES, but=[("qwen3_vl", "tp2+sp", "from_pretrained"), ("qwen3_5_text", "tp2+sp", "meta")]),
)
def test_a_published_checkpoint_is_read_by_slices_and_written_back(
    family: str, plan: str, how: str, pool2: Any, tmp_path: Path
) -> None:
    """The files have the names in which the family is published, such as language_model.model for Llava."""
    stock = build(family)
    stock.save_pretrained(tmp_path / "stock")
    weights = pool2.run(load_and_save, family, plan, how, tmp_path / "stock", tmp_path / "ours")[0]
    assert_equal(weights, dict(factory(family).from_pretrained(tmp_path / "stock").state_dict()))
    [file] = (tmp_path / "stock").glob("*.safetensors")
    assert_equal(load_file(tmp_path / "ours" / file.name), load_file(file))


def save(family: str, plan: str, folder: Path) -> dict[str, torch.Tensor]:
    model = build(family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, _ = mw.to_distributed(model, optimizer, plan=plan)
    step(model, optimizer, family)
    mw.save_checkpoint(folder, model, optimizer, step=1)
    return mw.full_state_dict(model)


def resume(family: str, plan: str, folder: Path) -> dict[str, torch.Tensor]:
    model = build(family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, _ = mw.to_distributed(model, optimizer, plan=plan)
    mw.load_checkpoint(folder, model, optimizer)
    return mw.full_state_dict(model)


@pytest.mark.parametrize("family", crossings(MODELS, but=["qwen3_5_text"]))
def test_a_run_resumes_under_another_plan(family: str, pool2: Any, tmp_path: Path) -> None:
    saved = pool2.run(save, family, "tp2+sp", tmp_path)
    for plan in ("dp2 zero3", "pp2 mb1"):
        assert_equal(pool2.run(resume, family, plan, tmp_path)[0], saved[0])
    held = inspect_checkpoint(tmp_path)
    assert not held.damages
