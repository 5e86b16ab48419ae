"""TRL's trainers under plans: what they log is what the stock trainer logs on one process, or they are refused.

Tolerance 1e-5 relative: float32, and sums in another order (see test_trainer.py). The losses here differ from the
trainer's own by 1e-2 and more where one rank's words, rows or completions stand for all.
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from torch.utils.data import DataLoader

from meshwright_hf.trainer.trl_trainers import check_last_batch
from support.parity import pool_for
from support.preference import columns, evaluate, make, run
from support.tiers import crossing, quick
from support.trainers import fresh_accelerate

pytest.importorskip("trl", reason="the environment of the oldest versions has no TRL")

TP2_SP, DP2, ZERO3 = {"tp": 2, "sequence_parallel": True}, {"dp": 2}, {"dp": 2, "zero_stage": 3}
ALL = {"dp": 2, "tp": 2, "sequence_parallel": True, "zero_stage": 3}
PAIRS = {"max_length": 32}
ONLINE = {"num_generations": 2, "max_completion_length": 6, "beta": 0.0}
OPTIONS: dict[str, dict[str, Any]] = {
    "sft": {"max_length": 16, "gradient_checkpointing": True},
    "dpo": PAIRS,
    "kto": PAIRS,
    "reward": PAIRS,
    "grpo": ONLINE,
    "rloo": ONLINE,
}
COMPARED = {
    "sft": ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens"),
    "dpo": ("loss", "grad_norm", "entropy", "num_tokens", "logps/chosen", "rewards/accuracies"),
    "kto": ("loss", "grad_norm", "kl", "num_tokens", "logps/chosen"),
    "reward": ("loss", "grad_norm", "num_tokens", "mean_reward", "accuracy"),
    "grpo": ("grad_norm", "reward", "reward_std", "entropy", "num_tokens"),  # its loss is 0 but for rounding
    "rloo": ("grad_norm", "reward", "reward_std", "entropy", "num_tokens"),
}


@functools.cache
def reference(kind: str, folder: Path) -> list[dict[str, float]]:
    return run(kind, folder, None, **OPTIONS[kind])


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("one")


def number_of_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        crossing("sft", {"cp": 2, "context": "ring"}),
        crossing("dpo", {"cp": 2}),
        crossing("kto", {"cp": 2}),
        crossing("reward", {"cp": 2}),
        ("sft", ALL),
        quick("dpo", ZERO3),
        ("kto", TP2_SP),
        crossing("kto", ZERO3),
        ("reward", ZERO3),
        crossing("grpo", ZERO3),
        crossing("rloo", DP2),
    ],
    ids=str,
)
def test_a_trainer_equals_one_process(
    kind: str, plan: dict[str, Any], one: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The fused head reads the head's weight, which is sharded; KTO pairs a batch's rows; GRPO (row 25) gathers."""
    expected = reference(kind, one)
    assert len({logs["grad_norm"] for logs in expected}) == len(expected) == 4
    pool = pool_for(plan, request)
    before = pool.run(number_of_threads)
    for logs in pool.run(run, kind, tmp_path, plan, **OPTIONS[kind], timeout=280):
        for actual, wanted in zip(logs, expected, strict=True):
            for key in COMPARED[kind]:
                assert actual[key] == pytest.approx(wanted[key], rel=1e-5, abs=1e-7), key
    # Each process group has three threads; those of a model that is kept alive, here 13, wake until the process ends.
    # The first run of a process starts 9 others.
    after = pool.run(number_of_threads)
    assert all(now <= earlier + 12 for now, earlier in zip(after, before, strict=True)), (before, after)


def test_a_packed_run_equals_one_process_under_context_parallelism(pool2: Any, tmp_path: Path) -> None:
    """Documents must not see each other, although their parts lie on several ranks."""
    options = {**OPTIONS["sft"], "packing": True, "max_length": 48}
    expected = run("sft", tmp_path / "one", None, **options)
    for logs in pool2.run(run, "sft", tmp_path, {"cp": 2, "context": "ring"}, **options, timeout=280):
        for actual, wanted in zip(logs, expected, strict=True):
            for key in COMPARED["sft"]:
                assert actual[key] == pytest.approx(wanted[key], rel=1e-5, abs=1e-7), key


def test_the_auxiliary_loss_that_trl_turns_on_equals_one_process(pool2: Any, tmp_path: Path) -> None:
    """SFTTrainer computes it by Mixtral's function and adds it to a loss of its own, divided by accumulated passes."""
    options = {"max_length": 16, "experts": {"router_aux_loss_coef": 1.0}}
    expected = run("sft", tmp_path / "one", None, **options)
    without = run("sft", tmp_path / "two", None, **options, router_aux_loss_coef=0.0)
    assert abs(without[0]["grad_norm"] / expected[0]["grad_norm"] - 1) > 1e-3
    for logs in pool2.run(run, "sft", tmp_path, DP2, **options, timeout=280):
        for actual, wanted in zip(logs, expected, strict=True):
            for key in (*COMPARED["sft"], "aux_loss"):
                assert actual[key] == pytest.approx(wanted[key], rel=1e-5, abs=1e-7), key


EVALUATED = {
    "sft": ("loss", "entropy", "mean_token_accuracy"),
    "dpo": ("loss", "entropy", "mean_token_accuracy"),
    "kto": ("loss", "entropy"),
    "reward": ("loss", "min_reward", "max_reward", "mean_reward"),
}


@pytest.mark.parametrize("kind", EVALUATED)
def test_a_last_batch_of_unlike_ranks_is_evaluated_as_on_one_process(kind: str, pool2: Any, tmp_path: Path) -> None:
    """7 rows in batches of 4: at last 2 rows on one rank and 1 on the other, each of another length."""
    expected = evaluate(kind, tmp_path / "one", None, **OPTIONS[kind])
    for found in pool2.run(evaluate, kind, tmp_path, DP2, **OPTIONS[kind], timeout=200):
        for key in EVALUATED[kind]:
            assert found[f"eval_{key}"] == pytest.approx(expected[f"eval_{key}"], rel=1e-5), key


def build(kind: str, output_dir: Path, plan: dict[str, Any] | None, **options: Any) -> None:
    with fresh_accelerate():
        make(kind, output_dir, plan, **options)


@pytest.mark.parametrize(
    ("kind", "plan", "options", "message"),
    [
        ("grpo", {"tp": 2}, {}, "PlannedGRPOTrainer generates what it trains on, but the plan has tp=2"),
        ("rloo", {"tp": 2}, {}, "PlannedRLOOTrainer generates what it trains on, but the plan has tp=2"),
        ("sft", {"pp": 2}, {}, "PlannedSFTTrainer computes its loss from the model's hidden states"),
        ("dpo", ZERO3, {"sync_ref_model": True}, "with zero_stage=3 a rank holds a part of them"),
        ("kto", {}, {}, "pass one: meshwright=ParallelPlan"),
    ],
)
def test_what_a_plan_would_get_wrong_is_refused_when_the_trainer_is_made(
    kind: str, plan: dict[str, Any], options: dict[str, Any], message: str, pool2: Any, tmp_path: Path
) -> None:
    """Row 25, its half in TRL: ranks that share a prompt would train on different completions."""
    for error, text in pool2.run_expecting_error(build, kind, tmp_path, plan, **OPTIONS[kind], **options):
        assert error == "PlanError"
        assert message in text


def run_precomputed(output_dir: Path, plan: dict[str, Any]) -> Any:
    return run("dpo", output_dir, plan, folder=output_dir / "data", precompute_ref_log_probs=True, **PAIRS)


def test_reference_log_probabilities_are_computed_before_the_model_is_sharded(
    one: Path, pool2: Any, tmp_path: Path
) -> None:
    Dataset.from_dict(columns("dpo")).save_to_disk(str(tmp_path / "data"))  # TRL's ranks meet in the data's folder
    expected = reference("dpo", one)  # where the reference runs along
    for logs in pool2.run(run_precomputed, tmp_path, TP2_SP):
        for actual, wanted in zip(logs, expected, strict=True):
            assert actual["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
            assert actual["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)


@pytest.mark.parametrize(
    ("module", "rows", "dp", "is_training", "max_steps", "expected"),
    [
        ("kto_trainer", 7, 2, True, -1, "raises"),
        ("kto_trainer", 7, 2, True, 2, "raises"),
        ("kto_trainer", 7, 2, True, 1, "passes"),
        ("kto_trainer", 7, 2, False, -1, "warns"),
        ("reward_trainer", 7, 2, True, -1, "warns"),
        ("kto_trainer", 6, 2, True, -1, "passes"),
        ("kto_trainer", 7, 1, True, -1, "passes"),
        ("dpo_trainer", 7, 2, True, -1, "passes"),
    ],
)
def test_a_mean_of_the_ranks_means_is_named(
    module: str, rows: int, dp: int, is_training: bool, max_steps: int, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    """7 rows in batches of 2 on each of 2 ranks: at last 2 rows on one rank and 1 on the other."""
    trainer = type("KTOTrainer", (), {"__module__": f"trl.trainer.{module}"})()
    trainer.args = SimpleNamespace(max_steps=max_steps, gradient_accumulation_steps=1)  # type: ignore[attr-defined]
    loader: DataLoader[Any] = DataLoader(range(rows), batch_size=2)  # type: ignore[arg-type]
    raised = pytest.raises(ValueError, match="the last 3 are not divisible by dp=2") if expected == "raises" else None
    with raised or contextlib.nullcontext():
        check_last_batch(trainer, loader, dp, is_training=is_training)
    assert ("dataloader_drop_last=True" in caplog.text) is (expected == "warns")
