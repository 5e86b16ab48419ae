"""TRL's SFTTrainer with adapters on a quantised base, by MeshwrightTrainerMixin and stock.

Tolerance 1e-4 relative: float32, and sums in another order; bitsandbytes has no float64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from safetensors.torch import load_file

import meshwright as mw
from support.exact import relative_difference
from support.preference import TAKEN, columns
from support.trainers import arguments, fresh_accelerate
from support.words import tokenizer

pytest.importorskip("trl", reason="the environment of the oldest versions has no TRL")
pytest.importorskip("bitsandbytes", reason="the environment of the oldest versions has no bitsandbytes")


def run(folder: Path, plan: dict[str, Any] | None) -> list[dict[str, float]]:
    """Train as QLoRA scripts do; returns what the trainer logs."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from meshwright_hf.trainer import MeshwrightTrainerMixin
    from support.quantised import quantised

    class PlannedSFTTrainer(MeshwrightTrainerMixin, SFTTrainer):  # type: ignore[misc]
        pass

    with fresh_accelerate():
        defaults = arguments(folder, (plan or {}).get("dp", 1), max_steps=3)
        shared = {name: getattr(defaults, name) for name in TAKEN}
        given: dict[str, Any] = {
            "model": quantised("nf4, double"),
            "args": SFTConfig(output_dir=str(folder), bf16=False, max_length=16, gradient_checkpointing=True, **shared),
            "train_dataset": Dataset.from_dict(columns("sft")),
            "processing_class": tokenizer(),
            "peft_config": LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0),
        }
        if plan is None:
            trainer: Any = SFTTrainer(**given)
        else:
            trainer = PlannedSFTTrainer(**given, meshwright=mw.ParallelPlan(**plan))
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:  # TRL converts adapters of quantised bases to bfloat16, which would hide faults
                parameter.data = parameter.data.float()
        trainer.train()
        trainer.save_model(str(folder / "adapters"))
        return [entry for entry in trainer.state.log_history if "loss" in entry]


def test_a_run_of_one_rank_equals_the_stock_trainer(tmp_path: Path) -> None:
    """Runs of several ranks are those of test_quantised.py; here the trainer must take a quantised model at all."""
    expected, found = run(tmp_path / "one", None), run(tmp_path / "ours", {"dp": 1})
    assert len({logs["grad_norm"] for logs in expected}) == len(expected) == 3
    for actual, wanted in zip(found, expected, strict=True):
        for key in ("loss", "grad_norm", "mean_token_accuracy", "num_tokens"):
            assert actual[key] == pytest.approx(wanted[key], rel=1e-4), key
    ours, stock = (load_file(tmp_path / name / "adapters" / "adapter_model.safetensors") for name in ("ours", "one"))
    assert ours.keys() == stock.keys() and all("lora_" in name for name in ours)
    assert all(relative_difference(ours[name], x) < 1e-2 for name, x in stock.items())  # Adam divides small gradients
