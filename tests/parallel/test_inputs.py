"""The inputs and model options of real scripts, at tp=2 with sequence parallelism, equal one process.

Tolerance 1e-10 in float64: only the order of sums differs (about 1e-15 measured).
"""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForSequenceClassification

import meshwright as mw
from support.exact import Float64, relative_difference
from support.logs import logged
from support.models import SIZES, build, tokens
from support.scenarios import SCENARIOS, Step, one_step
from support.short_programs import gradients_of
from support.tiers import crossings

TOLERANCE = 1e-10
SP = {"tp": 2, "sequence_parallel": True}
PLANS: list[dict[str, Any]] = [{"tp": 2}, SP, {"dp": 2}, {"dp": 2, "zero_stage": 1}, {"dp": 2, "zero_stage": 3}]
SPLITS = [{"gradient_accumulation_steps": 2}, {"micro_batch_size": 1}, {"gradient_accumulation_steps": 3}]


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


@pytest.mark.parametrize(
    ("family", "scenario"),
    crossings(
        itertools.product(["llama", "gemma2"], SCENARIOS),
        only=[("gemma2", name) for name in SCENARIOS if name not in ("left padding", "packed sequences")],
    ),
)
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


@pytest.mark.parametrize(
    ("family", "option"),
    crossings(
        itertools.product(["llama", "qwen3", "olmo2", "phi3"], OPTIONS),
        but=[
            ("llama", "eager attention"),
            ("llama", "tied embeddings"),
            ("llama", "a vocabulary that divides"),
            ("llama", "gradient checkpointing"),
            ("qwen3", "no grouping"),
            ("qwen3", "gradient checkpointing"),
            ("olmo2", "one kv head"),
            ("olmo2", "kv heads that do not divide"),
            ("phi3", "one kv head"),
            ("phi3", "kv heads that do not divide"),
            ("phi3", "no grouping"),
        ],
    ),
)
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
    for layers in (None, 1):
        ranks = pool2.run(one_step, "llama", "plain", {**SP, "recompute": "full", "recomputed_layers": layers})
        assert_equal_steps(ranks[0], one_step("llama", "plain"))


@pytest.mark.parametrize("option", ["one kv head", "kv heads that do not divide"])
def test_replicated_kv_heads_over_four_ranks(option: str, pool4: Any) -> None:
    options = {"num_attention_heads": 8, "num_key_value_heads": 1}
    if option != "one kv head":
        options = {"num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 4}
    ranks = pool4.run(one_step, "qwen3", "plain", {"tp": 4, "sequence_parallel": True}, **options)
    assert_equal_steps(ranks[0], one_step("qwen3", "plain", **options))


@pytest.mark.parametrize(
    ("plan", "split"),
    crossings(itertools.product(PLANS[1:4], SPLITS), but=zip(PLANS[1:4], reversed(SPLITS), strict=True)),
    ids=str,
)
def test_micro_batches_within_the_call(plan: dict[str, Any], split: dict[str, int], pool2: Any) -> None:
    ranks = pool2.run(one_step, "qwen3", "plain", {**plan, **split})
    assert_equal_steps(ranks[0], one_step("qwen3", "plain"))


def gradient_of_inputs(plan: dict[str, Any], loss_of: str, is_computed: bool, how: str) -> dict[str, Tensor]:
    """Of embeddings that the program passes: of all rows in one process, of this rank's under a plan.

    The embeddings are a leaf, or computed from the model's weights. A penalty on their gradient is trained: the result
    is then the gradient of the weights.
    """
    with Float64():
        torch.manual_seed(0)
        config = LlamaConfig(**SIZES, num_labels=3, attn_implementation="eager")
        model: Any = LlamaForSequenceClassification(config).double().train()
        if plan:
            model = mw.to_distributed(model, config=mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan)))[0]
        dp = plan.get("dp", 1)
        rank = dist.get_rank() % dp if plan else 0
        own = slice(rank * 4 // dp, (rank + 1) * 4 // dp)
        ids, labels = tokens(4, 12)[own], torch.tensor([0, -100, 2, 1])[own]
        embeds = model.get_input_embeddings()(ids)
        embeds = embeds if is_computed else embeds.detach().requires_grad_()
        if loss_of == "the model":
            loss = model(inputs_embeds=embeds, labels=labels).loss
        else:
            loss = F.cross_entropy(model(inputs_embeds=embeds).logits, labels)
            loss = mw.global_mean(model, loss, (labels != -100).sum()) if plan else loss
        if how == "backward":
            loss.backward()
            assert embeds.grad is not None
            return {"input": embeds.grad}
        if how == "of weights alone":
            loss.backward(inputs=list(model.model.layers.parameters()))
            return gradients_of(model, plan or None)
        (gradient,) = torch.autograd.grad(loss, embeds, create_graph=how == "penalty")
        if how == "returned":
            return {"input": gradient}
        penalty = 100 * gradient.square().sum((1, 2)).mean()
        (loss + (mw.global_mean(model, penalty, len(ids)) if plan else penalty)).backward()
        return gradients_of(model, plan or None)


OF_INPUTS = [
    *itertools.product(["the model", "the program"], [False, True], ["returned", "penalty"]),
    *itertools.product(["the model", "the program"], [False], ["backward", "of weights alone"]),
]


def possible(plan: dict[str, Any]) -> list[tuple[str, bool, str]]:
    """The cases that a plan runs: a penalty passes no collective of tp, and weights can be named if they are whole."""
    without = {"penalty"} if "tp" in plan else set()
    if "tp" in plan or plan.get("zero_stage") == 3:
        without.add("of weights alone")
    return [case for case in OF_INPUTS if case[2] not in without]


def gradients_of_inputs(plan: dict[str, Any]) -> list[dict[str, Tensor]]:
    return [gradient_of_inputs(plan, *case) for case in possible(plan)]


@pytest.mark.parametrize("plan", crossings(PLANS, but=PLANS[:4]), ids=str)
def test_gradients_of_inputs(plan: dict[str, Any], pool2: Any) -> None:
    """Row 21, as for a saliency: with the factor that losses carry over dp, they are twice those of one device."""
    ranks = pool2.run(gradients_of_inputs, plan)
    for case, *actual in zip(possible(plan), *ranks, strict=True):
        for name, value in gradient_of_inputs({}, *case).items():
            of_ranks = [of_rank.get(name) for of_rank in actual]
            found = torch.cat(of_ranks) if name == "input" and "dp" in plan else of_ranks[0]
            assert relative_difference(found, value) < TOLERANCE, (case, name)


def gradient_of_one_ranks_loss(plan: dict[str, Any]) -> list[str]:
    with Float64(), logged(level=logging.WARNING) as said:
        model = mw.to_distributed(build("llama").double(), config=mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan)))[
            0
        ]
        embeds = model.get_input_embeddings()(tokens(2, 12))
        torch.autograd.grad(model(inputs_embeds=embeds).logits.mean(), embeds)
    return said


def test_a_mean_that_is_not_of_the_global_batch_is_told(pool2: Any) -> None:
    for said in pool2.run(gradient_of_one_ranks_loss, {"dp": 2}):
        assert any("meshwright.global_mean(model, loss, count)" in text for text in said)
    assert not [text for text in pool2.run(gradient_of_one_ranks_loss, {"tp": 2})[0] if "global_mean" in text]


def split_backward() -> list[str]:
    """Go on from what torch.autograd.grad returned of a loss of the global batch, as code for large batches does."""
    with Float64(), logged(level=logging.WARNING) as said:
        model, _, _ = mw.to_distributed(build("llama").double(), plan="dp2")
        hidden = model.model(tokens(2, 12)).last_hidden_state
        leaf = hidden.detach().requires_grad_()
        loss = mw.global_mean(model, leaf.square().mean(), 2)
        hidden.backward(torch.autograd.grad(loss, leaf))
    return said


def test_a_backward_that_goes_on_from_a_returned_gradient_is_told(pool2: Any) -> None:
    for said in pool2.run(split_backward):
        assert any("go on from x.grad" in text for text in said), said


def test_gradients_of_inputs_with_micro_batches(pool2: Any) -> None:
    for kind, message in pool2.run_expecting_error(
        gradient_of_inputs, {"dp": 2, "micro_batch_size": 1}, "the model", False, "backward"
    ):
        assert kind == "ValueError" and "inputs_embeds requires a gradient" in message and "micro_batch" in message
