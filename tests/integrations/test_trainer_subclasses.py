"""Other Trainers and models of the stack under a plan: adapters, torch.compile, bf16 autocast.

Tolerance 1e-5 where nothing else is said: see test_trainer.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from support.models import build
from support.tiers import crossing
from support.trainers import Run, run_trainer

TP2_SP, DP2_ZERO1 = {"tp": 2, "sequence_parallel": True}, {"dp": 2, "zero_stage": 1}
PP2 = {"pp": 2, "micro_batch_size": 1}


def largest_difference(actual: list[float], expected: list[float]) -> float:
    assert len(actual) == len(expected) > 0
    return max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(actual, expected, strict=True))


def adapted() -> Any:
    torch.manual_seed(0)
    options = {"r": 4, "target_modules": ["q_proj", "o_proj", "down_proj"], "init_lora_weights": False}
    return get_peft_model(build("llama"), LoraConfig(task_type="CAUSAL_LM", **options))


def run_adapted(output_dir: Path, plan: dict[str, Any] | None) -> tuple[Run, Run]:
    """Six steps with an adapter, and the last three again."""
    given = {"model_init": adapted}
    options: dict[str, Any] = {"max_steps": 6, "extra": given}
    whole = run_trainer(output_dir, plan, save_strategy="steps", save_steps=3, **options)
    return whole, run_trainer(output_dir, plan, resume=str(output_dir / "checkpoint-3"), **options)


@pytest.mark.parametrize("plan", [crossing(TP2_SP), crossing(DP2_ZERO1), PP2], ids=str)
def test_an_adapter_trains_and_is_resumed(plan: dict[str, Any], pool2: Any, tmp_path: Path) -> None:
    whole, resumed = pool2.run(run_adapted, tmp_path / "planned", plan, timeout=200)[0]
    expected = run_trainer(tmp_path / "one", max_steps=6, extra={"model_init": adapted})
    assert largest_difference(whole.losses, expected.losses) <= 1e-5
    assert largest_difference(whole.norms, expected.norms) <= 1e-5
    assert (resumed.losses, resumed.norms) == (whole.losses, whole.norms)


@pytest.mark.parametrize("plan", [crossing(TP2_SP), DP2_ZERO1], ids=str)
def test_a_compiled_model_keeps_the_numbers(plan: dict[str, Any], pool2: Any, tmp_path: Path) -> None:
    # The graphs are traced and differentiated ahead of time, and run without code generation, which takes minutes.
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager", "max_steps": 3, "evaluated": 5}
    run = pool2.run(run_trainer, tmp_path, plan, **options, timeout=280)[0]
    expected = run_trainer(tmp_path / "one", max_steps=3, evaluated=5)
    assert largest_difference(run.losses, expected.losses) <= 1e-5
    assert largest_difference(run.norms, expected.norms) <= 1e-5
    assert run.metrics["eval_loss"] == pytest.approx(expected.metrics["eval_loss"], rel=1e-5)


@pytest.mark.parametrize("plan", [TP2_SP, crossing(DP2_ZERO1), PP2], ids=str)
def test_bf16_autocast_is_as_close_to_one_process_as_bf16_is_exact(
    plan: dict[str, Any], pool2: Any, tmp_path: Path
) -> None:
    # bfloat16 keeps 8 bits, so that sums in another order change an activation by up to 2**-8; a mean over the 80
    # tokens of a batch keeps about a ninth of that, a norm of small gradients more. A count that is misread (see
    # test_trainer.py) is off by 0.9.
    options = {"bf16": True, "max_steps": 4, "predicted": 3}
    run = pool2.run(run_trainer, tmp_path, plan, **options, timeout=200)[0]
    expected = run_trainer(tmp_path / "one", **options)
    assert largest_difference(run.losses, expected.losses) <= 1e-3
    assert largest_difference(run.norms, expected.norms) <= 2e-2
    assert (
        run.predictions is not None and run.predictions.dtype == expected.predictions.dtype
    )  # float32, as accelerate's
