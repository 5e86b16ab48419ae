"""DeepSpeed's engine over our tensor and sequence parallelism equals one process.

Tolerance 1e-5, relative, in float32 over 6 steps of 2 micro-batches with clipping: sums in another order differ by
1e-7, and so few steps at this learning rate do not amplify that (2e-7 measured). DeepSpeed casts some of its sums to
float32, so float64 would not tell more. A norm that leaves out or doubles one kind of parameter is off by 1e-3 at
least, and through clipping so are the losses (see the last test of the first section).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from transformers import AutoModelForCausalLM

from examples import deepspeed_zero3
from harness import WorkerPool
from harness.programs import run_program
from support import engine_hosts, engines
from support.reference import Result, train_family
from support.tiers import crossings

TOLERANCE = 1e-5
TP2_SP_DP2 = {"tp": 2, "sequence_parallel": True, "dp": 2}


@pytest.fixture(scope="module")
def pool4() -> Iterator[WorkerPool]:
    """Four ranks of this file's own: DeepSpeed keeps three groups of each engine, and their threads, to the end."""
    pool = WorkerPool(4)
    yield pool
    pool.close()


@functools.cache
def reference(*, family: str = "qwen3", **overrides: Any) -> Result:
    return train_family(
        family, torch.float32, None, steps=engines.STEPS, lr=engines.LR, **{**engines.TRAITS, **overrides}
    )


def differences(curve: engines.Curve, expected: Result, part: str = "all") -> tuple[float, float]:
    """The largest relative difference of the losses, and of the norms."""
    micro_batches = {"all": slice(None), "first": engines.FIRST_HALF, "second": engines.SECOND_HALF}[part]
    steps = {"all": slice(None), "first": slice(engines.HALF), "second": slice(engines.HALF, None)}[part]

    def largest(found: list[float], wanted: list[float]) -> float:
        return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))

    return largest(curve[0], expected.losses[micro_batches]), largest(curve[1], expected.norms[steps])


# Each stage goes on by another plan, so that every direction is there: tp to dp, tp to more tp, and both kept.
OTHER_PLANS = {1: {"dp": 2, "tp": 2}, 2: {"tp": 4, "sequence_parallel": True}, 3: {"dp": 4}}


@pytest.mark.parametrize("stage", crossings(OTHER_PLANS, but=[3]))
def test_a_stage_equals_one_process_and_its_checkpoints_resume(stage: int, pool4: Any, tmp_path: Path) -> None:
    ranks = pool4.run(engines.run_with_checkpoints, TP2_SP_DP2, OTHER_PLANS[stage], stage, str(tmp_path), timeout=250)
    found = ranks[0]
    assert max(differences(found["first half"], reference(), "first")) <= TOLERANCE
    assert max(differences(found["second half"], reference(), "second")) <= TOLERANCE
    assert all(rank["first half"] == found["first half"] for rank in ranks)
    # The same plan goes on as if it had never stopped; another one sums in another order.
    assert found["resumed"] == found["second half"]
    assert max(differences(found["moved"], reference(), "second")) <= TOLERANCE
    # The merged checkpoint is the model, to the bit.
    weights = found["weights"]
    assert set(weights) == set(reference().weights)
    for name, value in weights.items():
        assert torch.equal(engines.merged(tmp_path, name).view(value.shape), value), name
    # zero_to_fp32 knows dp only: it says so rather than write half a model.
    with pytest.raises(ValueError, match="Expected"):
        get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), tag="half")
    if "tp" not in OTHER_PLANS[stage]:
        converted = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), tag="end")
        assert converted.keys() == found["end weights"].keys()
        assert all(torch.equal(converted[name], value) for name, value in found["end weights"].items())


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
VARIANTS: dict[str, tuple[dict[str, Any], int, dict[str, Any], dict[str, Any]]] = {
    # DeepSpeed would compile its own Adam for offloading; torch's is as good where the optimizer's device is a CPU.
    "stage 2, optimizer offloaded": (TP2_SP_DP2, 2, {"zero": OFFLOAD, "zero_force_ds_cpu_optimizer": False}, {}),
    "stage 3, everything offloaded, the configuration's AdamW": (
        TP2_SP_DP2,
        3,
        {
            "zero": {**OFFLOAD, "offload_param": {"device": "cpu"}},
            "optimizer": {"type": "AdamW", "params": {"lr": engines.LR}},
        },
        {},
    ),
    "stage 2, key/value heads that two ranks hold": (
        {"tp": 4, "sequence_parallel": True},
        2,
        {},
        {"num_key_value_heads": 2},
    ),
    "stage 3, biases, tied, no sequence parallelism": (
        {"tp": 2, "dp": 2},
        3,
        {},
        {"family": "llama", "mlp_bias": True, "tie_word_embeddings": True},
    ),
}


@pytest.mark.parametrize("name", crossings(VARIANTS, but=["stage 3, everything offloaded, the configuration's AdamW"]))
def test_equals_one_process_with(name: str, pool4: Any) -> None:
    plan, stage, config, model = VARIANTS[name]
    settings = engines.config_for(stage, plan.get("dp", 1), **config)
    curve, weights = pool4.run(engines.run_plan, plan, settings, timeout=200, **model)[0]
    assert max(differences(curve, reference(**model))) <= TOLERANCE
    assert {n: w.shape for n, w in weights.items()} == {n: w.shape for n, w in reference(**model).weights.items()}


def test_unmarked_shards_would_be_caught(pool4: Any) -> None:
    curve = pool4.run(engines.run_without_marks, TP2_SP_DP2, engines.config_for(2, 2), timeout=200)[0]
    assert differences(curve, reference())[1] > 1000 * TOLERANCE


def test_bfloat16_is_within_its_rounding(pool4: Any) -> None:
    # bf16 rounds at 4e-3, and a loss is a mean over errors of that size, of both signs.
    config = engines.config_for(2, 2, bf16={"enabled": True})
    (losses, _), weights = pool4.run(engines.run_plan, TP2_SP_DP2, config, timeout=200)[0]
    assert max(abs(a - b) / b for a, b in zip(losses, reference().losses, strict=True)) <= 4e-3
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}


def test_loaders_give_ranks_of_tp_equal_rows(pool4: Any) -> None:
    ranks = pool4.run(engines.run_loaders, engines.config_for(1, 2), TP2_SP_DP2, timeout=200)
    assert max(differences(ranks[0]["curve"], reference())) <= TOLERANCE
    for name in ("dataloader", "training_data"):
        batches = [rank[name] for rank in ranks]  # ranks 0 and 1 share rows, and so do 2 and 3
        assert all(len(rank) == engines.STEPS * engines.ACCUMULATION for rank in batches)
        for first, second, third, fourth in zip(*batches, strict=True):
            assert torch.equal(first, second) and torch.equal(third, fourth)
            assert len(first) == 2 and not torch.equal(first, third)


def test_what_deepspeed_does_is_refused_by_name(pool4: Any, tmp_path: Path) -> None:
    wanted = (
        "gradient_clipping",
        "gradient_accumulation_steps",
        "full_gradients",
        "load_weights",
        *["engine.save_checkpoint"] * 5,
        "save_pretrained",
        "",
    )
    for messages in pool4.run(engines.run_refusals, str(tmp_path), timeout=200):
        assert all(part in message and message != "no error" for part, message in zip(wanted, messages, strict=True))
    assert not list(tmp_path.iterdir())


def test_accelerate(pool4: Any, tmp_path: Path) -> None:
    found = pool4.run(engine_hosts.run_accelerate, TP2_SP_DP2, 2, str(tmp_path), timeout=200)[0]
    assert max(differences(found["curve"], reference())) <= TOLERANCE
    assert found["is restored"]
    assert_saved(tmp_path, found["weights"])


def test_trainer_with_resume(pool4: Any, tmp_path: Path) -> None:
    losses, norms, evaluated = engine_hosts.run_like_trainer()
    whole = pool4.run(engine_hosts.run_trainer, TP2_SP_DP2, 3, str(tmp_path), timeout=200)[0]
    assert_saved(tmp_path, whole["weights"])
    resumed = pool4.run(
        engine_hosts.run_trainer, TP2_SP_DP2, 3, str(tmp_path), str(tmp_path / "checkpoint-3"), timeout=200
    )[0]
    for found in (whole, resumed):
        assert max(abs(a - b) / b for a, b in zip(found["curve"][0], losses, strict=True)) <= TOLERANCE
        assert max(abs(a - b) / b for a, b in zip(found["curve"][1], norms, strict=True)) <= TOLERANCE
        assert abs(found["evaluated"] - evaluated) / evaluated <= TOLERANCE


def assert_saved(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """from_pretrained reads these weights, to the bit."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loaded = model.state_dict()
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)


def run_example(folder: str) -> None:
    sys.argv[1:] = ["--steps", "3", "--output", folder]
    deepspeed_zero3.main()


@pytest.mark.crossing
def test_the_example_runs_and_ends_well(tmp_path: Path) -> None:
    outcomes = run_program(run_example, 2, str(tmp_path), timeout=200)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes[0].output
    assert sum(line.startswith("step") for line in outcomes[0].output.splitlines()) == 3
    assert (tmp_path / "checkpoint" / "latest").read_text().startswith("global_step3")
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")
