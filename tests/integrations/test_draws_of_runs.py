"""Runs with dropout are those of the stock Trainer on one process, also if they resume in mid-epoch under another plan.

Another mask changes a loss by a hundredth. TRL computes its loss in float32, so sums in another order differ by 1e-6.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright_hf import MeshwrightTrainer
from support.exact import Float64
from support.models import build
from support.trainers import Rows, arguments, fresh_accelerate

STEPS, SAVED = 5, 2  # of which three are an epoch
TP2_SP, ZERO3 = {"tp": 2, "sequence_parallel": True}, {"dp": 2, "zero_stage": 3}


def logged_by(kind: str, folder: Path, plan: dict[str, Any] | None, *, resumes: bool = False) -> list[float]:
    """The loss and the norm of each step of a run by MeshwrightTrainer or the stock one, or by TRL's with adapters."""
    with fresh_accelerate(), contextlib.nullcontext() if kind == "sft" else Float64():
        dp = (plan or {}).get("dp", 1)
        model = build("llama", attention_dropout=0.1)
        given: dict[str, Any] = {"model": model if kind == "sft" else model.double()}
        options: dict[str, Any] = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": SAVED}
        if kind == "sft":
            from datasets import Dataset
            from peft import LoraConfig
            from trl import SFTConfig, SFTTrainer

            import meshwright_hf.trl
            from support.words import texts, tokenizer

            stock, planned = SFTTrainer, meshwright_hf.trl.SFTTrainer
            args = arguments(folder, dp, SFTConfig, bf16=False, max_length=16, **options)
            given |= {"train_dataset": Dataset.from_dict({"text": texts(24)}), "processing_class": tokenizer()}
            given["peft_config"] = LoraConfig(lora_dropout=0.05, target_modules=["q_proj", "down_proj"])
        else:
            from transformers import Trainer

            stock, planned = Trainer, MeshwrightTrainer
            args = arguments(folder, dp, **options)
            given["train_dataset"] = Rows(24)
        if plan is None:
            trainer: Any = stock(args=args, **given)
        else:
            trainer = planned(args=args, **given, meshwright=mw.ParallelPlan(**plan))
        trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED}") if resumes else None)
        found = [entry for entry in trainer.state.log_history if "loss" in entry]
        return [value for entry in found for value in (entry["loss"], entry["grad_norm"])]


def runs(kind: str, folder: Path) -> list[list[float]]:
    """What a run logs under a plan, and what it logs if it goes on under another one."""
    return [logged_by(kind, folder, ZERO3), logged_by(kind, folder, TP2_SP, resumes=True)]


@pytest.mark.parametrize("kind", ["trainer", "sft"])
def test_a_run_with_dropout_equals_one_process_whatever_the_plan(kind: str, pool2: Any, tmp_path: Path) -> None:
    if kind == "sft":
        pytest.importorskip("trl", reason="the environment of the oldest versions has no TRL")
    expected = logged_by(kind, tmp_path / "one", None)
    assert len(set(expected)) == 2 * STEPS
    for found in pool2.run(runs, kind, tmp_path / "many", timeout=280)[0]:
        assert found == pytest.approx(expected, rel=1e-5 if kind == "sft" else 1e-9)
