"""Layers that get more than hidden states equal one process over stages: encoders' results, tables, second streams.

Tolerance 1e-10 of a tensor's largest value: in float64 only the order of sums differs, about 1e-16 a sum, and the steps
of AdamW divide tiny differences by tiny moments.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.modeling_outputs import BaseModelOutputWithPast

import meshwright as mw
from meshwright.parallel.fake_passes.sources import OUTSIDE
from meshwright.pipeline.cut import cut_decoder
from meshwright.pipeline.layer_order import crossing, record_order
from meshwright.pipeline.links import Links
from meshwright.roles import find_decoder
from support import encoder_models
from support.exact import Float64
from support.models import SIZES, labels_for, tokens
from support.parity import crossed, pool_for
from support.tiers import crossings
from support.whole_runs import assert_equals_one_process, differences, train_whole

LAYERS = 4
TP = {"tp": 2, "sequence_parallel": True}
PLANS: dict[str, dict[str, Any]] = {
    "pp2": {"pp": 2},
    "pp2, gpipe, recompute": {"pp": 2, "schedule": "gpipe", "recompute": "full"},
    "pp2, interleaved": {"pp": 2, "schedule": "interleaved"},
    "pp2, zb-h1": {"pp": 2, "schedule": "zb-h1"},
    "pp2, zbv": {"pp": 2, "schedule": "zbv"},
    "pp4, recompute": {"pp": 4, "recompute": "full"},
    "pp2 x dp2, interleaved": {"pp": 2, "dp": 2, "schedule": "interleaved"},
    "pp2 x dp2+zero1, zb-h1": {"pp": 2, "dp": 2, "zero_stage": 1, "schedule": "zb-h1"},
    "pp2 x tp2+sp, recompute": {"pp": 2, **TP, "recompute": "full"},
    "pp2 x tp2+sp, zbv": {"pp": 2, **TP, "schedule": "zbv"},
}
ENCODED = {"t5": "t5, translations", "bart, frozen encoder": "bart, translations", "whisper": "whisper, translations"}


def build(name: str) -> Any:
    """A model with four layers; RoFormer's table of positions is frozen."""
    if name in ENCODED:
        model: Any = encoder_models.build(ENCODED[name], num_decoder_layers=LAYERS, decoder_layers=LAYERS)
        if "frozen" in name:
            model.model.encoder.requires_grad_(False)
        return model
    torch.manual_seed(0)
    sizes = {key: x for key, x in SIZES.items() if key != "num_key_value_heads"} | {"num_hidden_layers": LAYERS}
    config = transformers.RoFormerConfig(**sizes, is_decoder=True)
    for key in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
        setattr(config, key, 0.0)
    return transformers.RoFormerForCausalLM(config).double().train()


def batches(name: str) -> list[dict[str, Tensor]]:
    """Rows that micro-batches do not divide, of several lengths, padded, and some without labels."""
    found = []
    for step, (rows, length, decoded) in enumerate([(4, 11, 6), (5, 8, 9), (4, 9, 9), (1, 10, 3)]):
        ids = tokens(rows, length, seed=step)
        mask = torch.ones_like(ids)
        for row in range(rows):
            mask[row, length - row :] = 0
        labels = labels_for(tokens(rows, decoded, seed=step + 9)) if name in ENCODED else labels_for(ids)
        labels[0, :2] = -100
        inputs = {"input_ids": ids, "attention_mask": mask}
        if name == "whisper":
            seed = torch.Generator().manual_seed(step)
            inputs = {"input_features": torch.randn(rows, 8, 128, dtype=torch.float64, generator=seed)}
        found.append({**inputs, "labels": labels})
    return found


def train(plan: dict[str, Any] | None, name: str) -> dict[str, Tensor]:
    options = None if plan is None else {"gradient_accumulation_steps": 2, **plan}
    with Float64():
        return train_whole(build(name), options, functools.partial(batches, name))


reference = functools.cache(functools.partial(train, None))
CASES = crossed([*ENCODED, "roformer"], PLANS)


@pytest.mark.parametrize(
    ("name", "plan_name"),
    crossings(
        CASES,
        but=[
            ("t5", "pp2, interleaved"),
            ("t5", "pp2 x tp2+sp, recompute"),
            ("bart, frozen encoder", "pp2, zbv"),
            ("whisper", "pp4, recompute"),
            ("roformer", "pp2 x dp2, interleaved"),
        ],
    ),
)
def test_equals_one_process(name: str, plan_name: str, request: pytest.FixtureRequest) -> None:
    results = pool_for(PLANS[plan_name], request).run(train, PLANS[plan_name], name)
    assert_equals_one_process(results, reference(name))


def train_without_their_gradients() -> dict[str, Tensor]:
    """A fault: what crosses beside the hidden states gets no gradient from later stages."""
    backward = Links.send

    def send(links: Links, crossing: tuple[Tensor, ...], receiver: int, *, announced: int = 0) -> None:
        is_gradient = receiver < links.pp.rank
        kept = (crossing[0], *map(torch.zeros_like, crossing[1:])) if is_gradient else crossing
        backward(links, kept, receiver, announced=announced)

    with mock.patch.object(Links, "send", send):
        return train(PLANS["pp2"], "t5")


def test_losing_their_gradients_would_be_caught(pool2: Any) -> None:
    found = differences(pool2.run(train_without_their_gradients), reference("t5"))
    assert found["gradient of encoder.block.0.layer.1.DenseReluDense.wo.weight"] > 1e-3


def save_after_a_step(folder: Path) -> dict[str, Tensor]:
    with Float64():
        model = build("t5")
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = mw.ParallelPlan(pp=2, gradient_accumulation_steps=2)
        model, optimizer, _ = mw.to_distributed(model, optimizer, plan=plan)
        model(**batches("t5")[0]).loss.backward()
        optimizer.step()
        mw.save_checkpoint(folder / "checkpoint", model, optimizer)
        model.save_pretrained(folder / "pretrained")
        return {name: x.clone() for name, x in mw.full_state_dict(model).items()}


def test_a_checkpoint_of_stages_is_that_of_one_process(pool2: Any, tmp_path: Path) -> None:
    saved = pool2.run(save_after_a_step, tmp_path)[0]
    stock = type(build("t5")).from_pretrained(tmp_path / "pretrained", dtype=torch.float64)
    loaded = build("t5")
    mw.load_checkpoint(tmp_path / "checkpoint", loaded, torch.optim.SGD(loaded.parameters(), lr=0.1))
    for weights in (stock.state_dict(), loaded.state_dict()):
        assert all(torch.equal(weights[name], x) for name, x in saved.items())
    batch = batches("t5")[0]
    assert stock(**batch).loss < build("t5")(**batch).loss  # the step has changed the weights


@pytest.mark.quick
def test_what_crosses_a_boundary() -> None:
    """T5's table is handed from layer to layer, and its encoder's result is one tensor for all layers."""
    model = build("t5")
    order = record_order(find_decoder(model))
    assert not order.is_plain and order.hidden_size == 32 and {"encoder_hidden_states"} <= order.given
    for before in (1, 3):
        found = crossing(order.inputs, before)
        assert [one.name for _, one in found.inputs] == ["position_bias", "encoder_hidden_states"]
        assert [one.source for _, one in found.inputs] == [before - 1, OUTSIDE] and found.end == before
    assert {"encoder.block.0", "encoder.block.1"} <= order.passing.keys()
    roformer = build("roformer")
    order = record_order(find_decoder(roformer))
    assert [one.name for _, one in crossing(order.inputs, 2).inputs] == ["sinusoidal_pos"]
    assert not order.is_plain


class Skipping(LlamaModel):
    """Adds what an earlier layer has returned, or the embeddings, to the hidden states of a later place."""

    place: int
    is_of_embeddings: bool

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        positions = torch.arange(input_ids.shape[1])[None]
        hidden = kept = self.embed_tokens(input_ids)
        embeddings = self.rotary_emb(hidden, position_ids=positions)
        for index, layer in enumerate(self.layers):
            if index == 1 and not self.is_of_embeddings:
                kept = hidden
            if index == self.place:
                hidden = hidden + kept
            hidden = layer(hidden, position_embeddings=embeddings, position_ids=positions)
        hidden = hidden + kept if self.place == len(self.layers) else hidden
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("place", "is_of_embeddings", "says"),
    [
        (2, True, "hidden states of layer 2 from the result of layer 1 and from what comes before its layers"),
        (3, False, "hidden states of layer 3 from the result of layer 2 and from the result of layer 0"),
        (4, True, "computes its loss from the result of its last layer and from what it computes before them"),
    ],
)
def test_what_only_an_earlier_stage_has_is_refused(place: int, is_of_embeddings: bool, says: str) -> None:
    """Where the embedding is tied to the head, the last stage would compute with other values than NaN."""
    model: Any = LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": LAYERS}, tie_word_embeddings=True))
    model.model.__class__ = Skipping
    model.model.place, model.model.is_of_embeddings = place, is_of_embeddings
    plan = mw.ParallelPlan(pp=2, stages=(1, 3))
    with pytest.raises(mw.PlanError, match=says):
        cut_decoder(find_decoder(model), plan, rank=0)
    if place == 2:  # the first stage has both
        cut_decoder(find_decoder(model), mw.ParallelPlan(pp=2, stages=(2, 2)), rank=0)


@pytest.mark.quick
def test_ranks_that_share_rows_are_refused() -> None:
    model = build("roformer")
    with pytest.raises(mw.PlanError, match=r"\(sinusoidal_pos\).*ParallelPlan\(cp=1\)"):
        cut_decoder(find_decoder(model), mw.ParallelPlan(pp=2, cp=2), rank=0)
