"""Training over pipeline stages equals one process: every schedule, with tp, sp, dp, cp, ZeRO, ties and adapters.

Tolerance 1e-10 of a tensor's largest value: in float64 only the order of sums differs, about 1e-16 a sum, and the steps
of AdamW divide tiny differences by tiny moments (3e-11 measured at worst).
"""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm
from transformers import LlamaForSequenceClassification

import meshwright as mw
from meshwright.pipeline.pipeline_forward import PipelineForward
from support.exact import Float64, relative_difference
from support.models import build, labels_for, tokens
from support.parity import crossed, pool_for
from support.replicas import uncompared
from support.tiers import crossing, crossings
from support.whole_runs import assert_equals_one_process, differences, train_whole, with_adapters

TOLERANCE = 1e-10
LAYERS = 8
TP = {"tp": 2, "sequence_parallel": True}

# Every schedule with its stages on 2 and on 4 ranks, and every other axis with some schedule.
PLANS: dict[str, dict[str, Any]] = {
    "pp2": {"pp": 2},
    "pp2, gpipe": {"pp": 2, "schedule": "gpipe"},
    "pp2, interleaved": {"pp": 2, "schedule": "interleaved"},
    "pp2, zb-h1": {"pp": 2, "schedule": "zb-h1"},
    "pp2, zbv": {"pp": 2, "schedule": "zbv"},
    "pp4, interleaved": {"pp": 4, "schedule": "interleaved", "gradient_accumulation_steps": 4},
    "pp4, zbv": {"pp": 4, "schedule": "zbv", "gradient_accumulation_steps": 3},
    "pp4, uneven stages, recompute": {"pp": 4, "stages": (1, 3, 2, 2), "recompute": "full"},
    "pp2 x tp2, zbv": {"pp": 2, "tp": 2, "schedule": "zbv"},
    "pp2 x tp2+sp, interleaved": {"pp": 2, **TP, "schedule": "interleaved"},
    "pp2 x tp2+sp, zb-h1": {"pp": 2, **TP, "schedule": "zb-h1"},
    "pp2 x tp2+sp, recompute": {"pp": 2, **TP, "recompute": "full"},
    "pp2 x dp2+zero1, zb-h1": {"pp": 2, "dp": 2, "zero_stage": 1, "schedule": "zb-h1"},
    "pp2 x dp2, interleaved": {"pp": 2, "dp": 2, "schedule": "interleaved"},
    "pp2 x cp2": {"pp": 2, "cp": 2},
    "pp2 x cp2, gather, zbv": {"pp": 2, "cp": 2, "schedule": "zbv"},
    "pp2 x cp2, gather, recompute": {"pp": 2, "cp": 2, "recompute": "full"},
    "pp2 x cp2, ulysses, gpipe": {"pp": 2, "cp": 2, "context": "ulysses", "schedule": "gpipe"},
    "pp2 x cp2+zero1, ulysses, zb-h1": {"pp": 2, "cp": 2, "context": "ulysses", "zero_stage": 1, "schedule": "zb-h1"},
    "pp2 x cp2, ring, interleaved": {"pp": 2, "cp": 2, "context": "ring", "schedule": "interleaved"},
    "pp2 x cp2+zero1, ring, recompute": {"pp": 2, "cp": 2, "context": "ring", "zero_stage": 1, "recompute": "full"},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "gemma2, tied": ("gemma2", {}),
    "qwen3, tied": ("qwen3", {"tie_word_embeddings": True}),
}


def batches() -> list[dict[str, Tensor]]:
    """Rows that micro-batches do not divide, odd lengths, rows without labels, packed documents, and padding."""
    found = []
    for step, (rows, length) in enumerate([(4, 11), (5, 8), (4, 9), (6, 12), (1, 10)]):
        ids = tokens(rows, length, seed=step)
        found.append({"input_ids": ids, "labels": labels_for(ids)})
    found[1]["labels"][:3] = -100  # the first micro-batch has no label that counts
    found[2]["position_ids"] = torch.cat([torch.arange(4), torch.arange(5)]).expand(4, -1)
    mask = torch.ones(6, 12, dtype=torch.int64)
    mask[1, -3:] = mask[4, :2] = 0
    found[3] |= {"attention_mask": mask, "labels": found[3]["labels"].masked_fill(mask == 0, -100)}
    return found


def train(plan: dict[str, Any] | None, model_name: str = "llama", *, adapters: bool = False) -> dict[str, Tensor]:
    """Whole results of a few steps in which a layer is frozen."""
    family, traits = MODELS[model_name]
    options = None if plan is None else {"gradient_accumulation_steps": 2, **plan}
    with Float64():
        model: Any = build(family, num_hidden_layers=LAYERS, **traits).double().train()
        model.model.layers[1].requires_grad_(False)
        return train_whole(with_adapters(model) if adapters else model, options, batches)


@functools.cache
def reference(model_name: str, *, adapters: bool = False) -> dict[str, Tensor]:
    return train(None, model_name, adapters=adapters)


@pytest.mark.parametrize(
    ("model_name", "plan_name"),
    crossings(
        crossed(MODELS, PLANS, every=4),
        but=[
            ("llama", "pp2, gpipe"),
            ("llama", "pp4, interleaved"),
            ("llama", "pp2 x tp2+sp, recompute"),
            ("gemma2, tied", "pp2 x dp2+zero1, zb-h1"),
        ],
        quick=[("llama", "pp2, zbv")],
    ),
)
def test_equals_one_process(model_name: str, plan_name: str, request: pytest.FixtureRequest) -> None:
    results = pool_for(PLANS[plan_name], request).run(train, PLANS[plan_name], model_name)
    assert_equals_one_process(results, reference(model_name))


@pytest.mark.parametrize(
    "plan_name",
    [crossing("pp2 x tp2+sp, zb-h1"), crossing("pp2 x dp2+zero1, zb-h1"), "pp2 x cp2+zero1, ulysses, zb-h1"],
)
def test_adapters_equal_one_process(plan_name: str, request: pytest.FixtureRequest) -> None:
    results = pool_for(PLANS[plan_name], request).run(train, PLANS[plan_name], adapters=True)
    assert max(differences(results, reference("llama", adapters=True)).values()) <= TOLERANCE


def train_without_sum_of_ties() -> dict[str, Tensor]:
    with mock.patch.object(PipelineForward, "_sum_ties", lambda *_: None), uncompared():
        return train(PLANS["pp2"], "qwen3, tied")


def test_forgetting_to_sum_a_tied_weight_would_be_caught(pool2: Any) -> None:
    found = differences(pool2.run(train_without_sum_of_ties), reference("qwen3, tied"))
    assert found["gradient of model.embed_tokens.weight"] > 1e-3


def wrap_blocks(model: Any) -> None:
    """A wrapped MLP, weight_norm in a layer and on the head, and a head that is not used: no role covers them."""

    class Gated(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module):
            super().__init__()
            self.inner, self.gate = inner, torch.nn.Parameter(torch.full((32,), 1.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.inner(x) * self.gate
            return result

    model.model.layers[3].mlp = Gated(model.model.layers[3].mlp)
    for linear in (model.model.layers[0].self_attn.q_proj, model.lm_head):
        weight_norm(linear)
    model.value_head = torch.nn.Linear(32, 1)


def write_weights(model: torch.nn.Module, average: list[torch.Tensor], step: int) -> None:
    """Decay by hand, by lists and through .data, and an average that takes the weights' place after a step."""
    with torch.no_grad():
        parameters = list(model.parameters())
        torch._foreach_mul_(parameters, 0.99)
        for parameter, mean in zip(parameters, average, strict=True):
            parameter.mul_(0.99)
            parameter.data.copy_(parameter.data * 0.99)
            mean.lerp_(parameter, 0.5)
            if step == 0:
                other = parameter.detach().clone()
                parameter.copy_(mean)
                mean.copy_(other)


def program(plan: dict[str, Any] | None, name: str) -> dict[str, torch.Tensor]:
    """The losses and the weights of two steps."""
    with Float64():
        model: Any = build("llama", num_hidden_layers=4)
        data = [{"input_ids": (ids := tokens(4, 10, seed=seed)), "labels": labels_for(ids)} for seed in (0, 1)]
        torch.manual_seed(0)
        if name == "labels of rows":
            model = LlamaForSequenceClassification(model.config)
            data = [{**one, "labels": one["labels"][:, -1] % 2} for one in data]
        if name == "modules without roles":
            wrap_blocks(model)
        model = model.double()
        if name == "frozen":  # all of the first stage; after a step, all of it but one norm
            for key, parameter in model.named_parameters():
                parameter.requires_grad_("layers.3." in key)
        if name == "frozen end":  # all but the first layers, so that the last stage passes gradients on and has none
            for key, parameter in model.named_parameters():
                parameter.requires_grad_("embed" in key or "layers.0." in key)
        if name == "weights computed by hooks":
            torch.nn.utils.weight_norm(model.model.layers[0].mlp.down_proj)
            prune.l1_unstructured(model.model.layers[3].mlp.up_proj, "weight", 0.3)
        is_late = name == "optimizer made after"
        make = torch.optim.AdamW if is_late else functools.partial(torch.optim.SGD, momentum=0.5)
        optimizer: Any = make(model.parameters(), lr=0.1)
        if plan is not None:
            model, distributed, loader = mw.to_distributed(
                model, None if is_late else optimizer, data if "dp" in plan else None, plan=mw.ParallelPlan(**plan)
            )
            data = loader or data
            optimizer = make(model.parameters(), lr=0.1) if is_late else distributed
        model.train(name != "eval mode")
        average = [parameter.detach().clone() for parameter in model.parameters()]
        losses = []
        for step, one in enumerate(data):
            loss = model(**one).loss
            loss.backward()
            losses.append(loss.detach())
            if name == "gradients of weights":
                for parameter in model.parameters():
                    parameter.grad = 0.1 * parameter.detach() + 0.01
            optimizer.step()
            optimizer.zero_grad()
            if name == "writes in place":
                write_weights(model, average, step)
            if name == "frozen":
                model.model.layers[0].input_layernorm.weight.requires_grad_(True)
    weights = {n: w.clone() for n, w in model.state_dict().items()} if plan is None else mw.full_state_dict(model)
    return {**weights, "losses": torch.stack(losses)}


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("eval mode", "1f1b"),
        ("writes in place", "1f1b"),
        ("labels of rows", "1f1b"),
        ("modules without roles", "1f1b"),
        ("frozen", "1f1b"),
        ("frozen", "zb-h1"),
        ("optimizer made after", "1f1b"),
        ("gradients of weights", "1f1b"),
        ("weights computed by hooks", "zbv"),
    ],
)
def test_a_program_of_one_device_trains_as_it_is(name: str, schedule: str, pool2: Any) -> None:
    plan = {"pp": 2, "gradient_accumulation_steps": 2, "schedule": schedule}
    expected, actual = program(None, name), pool2.run(program, plan, name)[0]
    # Two steps change the weights by more than 1e-3.
    assert max(relative_difference(actual[key], value) for key, value in expected.items()) < TOLERANCE


def test_a_frozen_last_stage_passes_on_the_gradients_of_all_rows(pool4: Any) -> None:
    """Its own pass reaches no parameter, and without their factor the steps of the first stage would be halves."""
    plan = {"pp": 2, "dp": 2, "gradient_accumulation_steps": 2}
    expected, actual = program(None, "frozen end"), pool4.run(program, plan, "frozen end")[0]
    del expected["losses"], actual["losses"]
    assert max(relative_difference(actual[key], value) for key, value in expected.items()) < TOLERANCE
