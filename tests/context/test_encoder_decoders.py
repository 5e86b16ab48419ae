"""Encoder-decoders whose decoder's tokens are spread over cp equal one process.

Tolerance 1e-10 of a tensor's largest value: in float64 only the order of sums differs, about 1e-16 a sum, and the steps
of AdamW divide tiny differences by tiny moments.
"""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor

import meshwright as mw
from meshwright.context import attend
from meshwright.context.record import _OfWholeRow, record_context
from meshwright.roles import find_decoder
from support import encoder_models
from support.exact import Float64
from support.models import labels_for, tokens
from support.parity import crossed, pool_for
from support.tiers import crossings
from support.whole_runs import assert_equals_one_process, differences, train_whole

TP = {"tp": 2, "sequence_parallel": True}
PLANS: dict[str, dict[str, Any]] = {
    "cp2": {"cp": 2},
    "cp2, ulysses": {"cp": 2, "context": "ulysses"},
    "cp2, ring": {"cp": 2, "context": "ring"},
    "cp4, hybrid": {"cp": 4, "context": "hybrid", "ulysses": 2},
    "cp2 x dp2+zero1, recompute": {"cp": 2, "dp": 2, "zero_stage": 1, "recompute": "full"},
    "cp2 x dp2+zero3, ulysses, recompute": {
        "cp": 2, "dp": 2, "zero_stage": 3, "context": "ulysses", "recompute": "full",
    },
    "cp2 x tp2+sp, micro-batches": {"cp": 2, **TP, "gradient_accumulation_steps": 2},
    "cp2 x tp2, ulysses": {"cp": 2, "tp": 2, "context": "ulysses"},
}  # fmt: skip
MODELS = {"t5": "t5, translations", "bart, frozen encoder": "bart, translations", "whisper": "whisper, translations"}


def build(name: str) -> Any:
    model = encoder_models.build(MODELS[name])
    if "frozen" in name:
        model.model.encoder.requires_grad_(False)
    return model


def batches(name: str) -> list[dict[str, Tensor]]:
    """Encoder and decoder lengths that differ, are equal, or are those of a rank, padded, and rows without labels."""
    found = []
    for step, (rows, length, decoded) in enumerate([(4, 11, 6), (5, 8, 9), (4, 9, 9), (4, 5, 10), (1, 10, 3)]):
        ids = tokens(rows, length, seed=step)
        mask = torch.ones_like(ids)
        for row in range(rows):
            mask[row, length - row :] = 0
        labels = labels_for(tokens(rows, decoded, seed=step + 9))
        labels[0, :2] = -100
        inputs = {"input_ids": ids, "attention_mask": mask}
        if name == "whisper":
            seed = torch.Generator().manual_seed(step)
            inputs = {"input_features": torch.randn(rows, 8, 128, dtype=torch.float64, generator=seed)}
        found.append({**inputs, "labels": labels})
    found[1]["labels"][:3] = -100  # the first micro-batch has no label that counts
    given = found[2]["labels"].masked_fill(found[2]["labels"] == -100, 1)  # what the decoder gets, with padding
    found[2] |= {"decoder_input_ids": given, "decoder_attention_mask": torch.ones_like(given)}
    found[2]["decoder_attention_mask"][1, 7:] = 0
    return found


def train(plan: dict[str, Any] | None, name: str) -> dict[str, Tensor]:
    with Float64():
        return train_whole(build(name), plan, functools.partial(batches, name))


reference = functools.cache(functools.partial(train, None))
REFUSED = {("t5", "cp2, ring"), ("t5", "cp4, hybrid")}  # a ring takes no bias of positions
CASES = [case for case in crossed(MODELS, PLANS) if case not in REFUSED]


@pytest.mark.parametrize(
    ("name", "plan_name"),
    crossings(
        CASES,
        but=[
            ("t5", "cp2"),
            ("t5", "cp2 x dp2+zero3, ulysses, recompute"),
            ("t5", "cp2 x tp2+sp, micro-batches"),
            ("bart, frozen encoder", "cp2, ring"),
            ("whisper", "cp2, ulysses"),
        ],
    ),
)
def test_equals_one_process(name: str, plan_name: str, request: pytest.FixtureRequest) -> None:
    results = pool_for(PLANS[plan_name], request).run(train, PLANS[plan_name], name)
    assert_equals_one_process(results, reference(name))


def train_without_padding(plan: dict[str, Any]) -> dict[str, Tensor]:
    """A fault: queries see the padding of the encoder."""
    with mock.patch.object(attend, "_own_mask", lambda call, mask, q: None):
        return train(plan, "bart, frozen encoder")


def test_padding_of_the_encoder_counts(pool2: Any) -> None:
    found = differences(pool2.run(train_without_padding, PLANS["cp2"]), reference("bart, frozen encoder"))
    assert found["loss 0"] > 1e-6


def train_with_biases_of_own_tokens() -> str:
    with mock.patch.object(_OfWholeRow, "__call__", lambda step, *args, **kwargs: step.method(*args, **kwargs)):
        with pytest.raises(mw.PlanError) as error:
            train({"cp": 2}, "t5")
        return str(error.value)


def refusal(plan: dict[str, Any], name: str) -> str:
    with pytest.raises(mw.PlanError) as error:
        train(plan, name)
    return str(error.value)


def test_refusals_name_the_cure(pool2: Any, pool4: Any) -> None:
    assert all("'position_bias' of shape" in words for words in pool2.run(train_with_biases_of_own_tokens))
    assert all("context='gather'" in words for words in pool2.run(refusal, {"cp": 2, "context": "ring"}, "t5"))
    assert all("cp=1" in words for words in pool4.run(refusal, {"pp": 2, "cp": 2}, "whisper"))


def test_a_record_shows_whose_keys_an_attention_sees() -> None:
    record = record_context(find_decoder(build("t5")))
    assert [site.kind.is_across for site in record.sites] == [False, True, False, True]
    assert [sorted(site.kind.biases) for site in record.sites] == [["position_bias"], []] * 2
    # What the first layer returns has the tokens of a rank already, or is whole, as its biases are.
    assert [sorted(place[-1] for place in record.token_dims[layer]) for layer in record.layers] == [[0], []]
    assert "encoder_hidden_states" in record.of_layers


def test_layers_that_count_along_the_tokens_are_refused() -> None:
    config = transformers.SwitchTransformersConfig(
        vocab_size=97, d_model=32, d_ff=48, d_kv=8, num_heads=4, num_layers=2, num_sparse_decoder_layers=1,
        num_sparse_encoder_layers=1, num_experts=2, decoder_start_token_id=1,
    )  # fmt: skip
    with pytest.raises(mw.PlanError, match=r"counts along the tokens of a row \(cumsum\).*cp=1"):
        record_context(find_decoder(transformers.SwitchTransformersForConditionalGeneration(config)))


def test_states_that_are_not_of_tokens_are_refused() -> None:
    config = transformers.FSMTConfig(
        langs=["en", "de"], src_vocab_size=97, tgt_vocab_size=97, d_model=32, encoder_layers=1, decoder_layers=2,
        encoder_ffn_dim=48, decoder_ffn_dim=48, encoder_attention_heads=4, decoder_attention_heads=4,
    )  # fmt: skip
    with pytest.raises(mw.PlanError, match="no dim of tokens behind that of rows"):
        record_context(find_decoder(transformers.FSMTForConditionalGeneration(config)))


def train_two_lengths_before_backward(plan: dict[str, Any] | None) -> dict[str, Tensor]:
    """Backward runs the layers of a row again after another row of another length."""
    with Float64():
        model, data = build("t5"), batches("t5")[:2]
        if plan is None:
            model.gradient_checkpointing_enable()
        else:
            model, _, data = mw.to_distributed(model, None, data, plan=mw.ParallelPlan(**plan, recompute="full"))
        losses = [model(**batch).loss for batch in data]
        losses[0].backward()
        losses[1].backward()
        return {"loss": losses[0].detach(), "norm": mw.clip_grad_norm_(model, 1.0)}


def test_layers_that_backward_runs_again_have_the_biases_of_their_own_row(pool2: Any) -> None:
    results = pool2.run(train_two_lengths_before_backward, {"cp": 2})
    assert_equals_one_process(results, train_two_lengths_before_backward(None))
