"""The inputs and model options of real scripts, at tp=2 with sequence parallelism, equal one process.

Tolerance 1e-10 in float64: only the order of sums differs (about 1e-15 measured).
"""

from __future__ import annotations

from typing import Any

import pytest

from support.exact import relative_difference
from support.scenarios import SCENARIOS, Step, one_step

TOLERANCE = 1e-10
SP = {"tp": 2, "sequence_parallel": True}


def assert_equal_steps(actual: Step, expected: Step, tolerance: float = TOLERANCE) -> None:
    assert abs(actual.loss - expected.loss) <= tolerance * abs(expected.loss)
    assert actual.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        # The gradient of a key bias, or of the queries of a lone target, is zero in exact arithmetic: what is left is
        # rounding.
        floor = 1e-12 if name.endswith("k_proj.bias") else 1e-17
        largest = max(gradient.abs().max(), actual.gradients[name].abs().max())
        difference = relative_difference(actual.gradients[name], gradient)
        assert difference <= tolerance or largest <= floor, (name, difference)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_inputs(family: str, scenario: str, pool2: Any) -> None:
    assert_equal_steps(pool2.run(one_step, family, scenario, SP)[0], one_step(family, scenario))


@pytest.mark.parametrize("scenario", ["plain", "left padding", "num_items_in_batch", "an odd length"])
def test_inputs_split_over_data_parallel_ranks(scenario: str, pool2: Any) -> None:
    # "an odd length" has 3 rows: one rank gets 1, the other 2.
    config = {"num_items_in_batch": "global"}
    ranks = pool2.run(one_step, "llama", scenario, {"dp": 2}, config=config)
    assert_equal_steps(ranks[0], one_step("llama", scenario))


OPTIONS: dict[str, dict[str, Any]] = {
    "eager attention": {"attn_implementation": "eager"},
    "tied embeddings": {"tie_word_embeddings": True},
    "one kv head": {"num_key_value_heads": 1},
    "kv heads that do not divide": {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 36},
    "no grouping": {"num_key_value_heads": 8},
    "a vocabulary that divides": {"vocab_size": 98},
    "gradient checkpointing": {"checkpointing": True},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "olmo2", "phi3"])
def test_options(family: str, option: str, pool2: Any) -> None:
    options = OPTIONS[option]
    ranks = pool2.run(one_step, family, "plain", SP, **options)
    assert_equal_steps(ranks[0], one_step(family, "plain", **options))


@pytest.mark.parametrize("family", ["llama", "olmo2", "phi3"])
def test_one_kv_head_without_sequence_parallelism(family: str, pool2: Any) -> None:
    ranks = pool2.run(one_step, family, "plain", {"tp": 2}, num_key_value_heads=1)
    assert_equal_steps(ranks[0], one_step(family, "plain", num_key_value_heads=1))


def test_gradient_checkpointing_with_odd_length_and_padding(pool2: Any) -> None:
    for scenario in ("an odd length", "left padding"):
        ranks = pool2.run(one_step, "qwen3", scenario, SP, checkpointing=True)
        assert_equal_steps(ranks[0], one_step("qwen3", scenario))


def test_recompute_in_the_plan_is_gradient_checkpointing(pool2: Any) -> None:
    ranks = pool2.run(one_step, "llama", "plain", {**SP, "recompute": "full"})
    assert_equal_steps(ranks[0], one_step("llama", "plain"))


@pytest.mark.parametrize("option", ["one kv head", "kv heads that do not divide"])
def test_replicated_kv_heads_over_four_ranks(option: str, pool4: Any) -> None:
    options = {"num_attention_heads": 8, "num_key_value_heads": 1}
    if option != "one kv head":
        options = {"num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 4}
    ranks = pool4.run(one_step, "qwen3", "plain", {"tp": 4, "sequence_parallel": True}, **options)
    assert_equal_steps(ranks[0], one_step("qwen3", "plain", **options))


@pytest.mark.parametrize(
    "split", [{"gradient_accumulation_steps": 2}, {"micro_batch_size": 1}, {"gradient_accumulation_steps": 3}]
)
@pytest.mark.parametrize("plan", [SP, {"dp": 2}, {"dp": 2, "zero_stage": 1}])
def test_micro_batches_within_the_call(plan: dict[str, Any], split: dict[str, int], pool2: Any) -> None:
    ranks = pool2.run(one_step, "qwen3", "plain", {**plan, **split})
    assert_equal_steps(ranks[0], one_step("qwen3", "plain"))
