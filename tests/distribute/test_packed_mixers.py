"""Packed documents equal separate ones in models with recurrences or convolutions over tokens.

Tolerance 1e-10 of a tensor's largest value: in float64 only the order of sums differs, about 1e-16 a sum, and the steps
of AdamW divide tiny differences by tiny moments.
"""

from __future__ import annotations

import functools
import logging
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.data.packing import PackedDataset, Packing, block_diagonal_mask
from meshwright.parallel.batch.document_rows import DocumentsAsRows
from meshwright.parallel.saved_tensors import Replay
from support.exact import Float64, relative_difference
from support.hybrid_models import FAMILIES, build
from support.models import tokens
from support.parity import pool_for
from support.tiers import crossings
from support.whole_runs import assert_equals_one_process, differences, train_whole

LENGTH = 12
# Of each row of three batches: the lengths of its documents. Some are shorter than a convolution.
DOCUMENTS = (
    ((3, 1, 8), (12,), (5, 7), (2, 10)),
    ((4, 4, 4), (6, 6), (12,), (1, 2, 3, 6)),
    ((12,), (12,), (12,), (12,)),
)
PLANS: dict[str, dict[str, Any]] = {
    "one process": {},
    "tp2+sp": {"tp": 2, "sequence_parallel": True},
    "dp2 zero3": {"dp": 2, "zero_stage": 3},
    "cp2(ring), recompute": {"cp": 2, "context": "ring", "recompute": "full"},
    "pp2, recompute, micro-batches": {"pp": 2, "recompute": "full", "gradient_accumulation_steps": 2},
}
CASES = [(family, plan) for family in FAMILIES for plan in PLANS]


def documents(step: int) -> list[Tensor]:
    lengths = [length for row in DOCUMENTS[step] for length in row]
    return list(tokens(1, sum(lengths), seed=step)[0].split(lengths))


def rows() -> list[dict[str, Tensor]]:
    """Three batches of four packed rows."""
    found = []
    for step, of_rows in enumerate(DOCUMENTS):
        packed: list[dict[str, Tensor]] = []
        rest = documents(step)
        for lengths in of_rows:
            own, rest = rest[: len(lengths)], rest[len(lengths) :]
            packed += PackedDataset([x.tolist() for x in own], Packing(LENGTH, strategy="concatenate"))  # type: ignore[arg-type]
        found.append({name: torch.stack([row[name] for row in packed]) for name in packed[0]})
    return found


def separate() -> list[dict[str, Tensor]]:
    """The same documents, each in a row of its own."""
    found = []
    for step in range(len(DOCUMENTS)):
        own = documents(step)
        ids = torch.nn.utils.rnn.pad_sequence(own, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in own], batch_first=True)
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, 0] = -100
        found.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return found


def train(plan: dict[str, Any] | None, family: str) -> dict[str, Tensor]:
    with Float64():
        found = train_whole(build(family), plan, separate if plan is None else rows)
    return {name: value for name, value in found.items() if not name.startswith("logits")}


reference = functools.cache(functools.partial(train, None))


@pytest.mark.parametrize(
    ("family", "plan_name"),
    crossings(CASES, but=[("mamba2", "one process"), ("qwen3_5_text", "cp2(ring), recompute"), ("lfm2", "dp2 zero3")]),
)
def test_equals_separate_documents(family: str, plan_name: str, request: pytest.FixtureRequest) -> None:
    plan = PLANS[plan_name]
    results = pool_for(plan, request).run(train, plan, family) if plan else [train(plan, family)]
    assert_equals_one_process(results, reference(family))


def logits(family: str, *, plan: mw.ParallelPlan | None, ids: Tensor, **batch: Tensor) -> Tensor:
    model = build(family)
    if plan is not None:
        mw.to_distributed(model, plan=plan)
    with Float64(), torch.no_grad():
        found: Tensor = model(input_ids=ids, **batch).logits
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_document_does_not_change_another(family: str) -> None:
    batch = rows()[0]
    ids, positions, labels = batch["input_ids"], batch["position_ids"], batch["labels"]
    other = ids.clone()
    other[0, :3] = tokens(1, 3, seed=9)  # the first document of the first row
    stock = [logits(family, plan=None, ids=x, position_ids=positions) for x in (ids, other)]
    first, second = (logits(family, plan=mw.ParallelPlan(), ids=x, position_ids=positions) for x in (ids, other))
    assert torch.equal(first[0, 3:], second[0, 3:]) and not torch.equal(first[0, :3], second[0, :3])
    assert relative_difference(stock[1][0, 3:], stock[0][0, 3:]) > 1e-3, "the stock model would leak"
    with_mask = {"position_ids": positions, "attention_mask": block_diagonal_mask(positions)}
    if family not in ("mamba2", "recurrent_gemma"):  # whose attention, if any, has a window besides
        assert relative_difference(logits(family, plan=mw.ParallelPlan(), ids=ids, **with_mask), first) < 1e-10
    plain = labels.new_ones(ids.shape)  # a mask of padding says that a row is one document
    whole = logits(family, plan=mw.ParallelPlan(), ids=ids, attention_mask=plain, position_ids=positions)
    assert relative_difference(whole[0, 3:], first[0, 3:]) > 1e-3


def train_without_replay(plan: dict[str, Any], family: str) -> dict[str, Tensor]:
    """A fault: a layer that backward runs again does not know the documents of its rows."""
    with mock.patch.object(Replay, "attach", lambda self, model: None):
        return train(plan, family)


def test_documents_that_backward_does_not_know_are_an_error() -> None:
    with pytest.raises(mw.PlanError, match=r"backward runs layers of Lfm2ForCausalLM again.*recompute='full'"):
        train_without_replay({"recompute": "full"}, "lfm2")


def test_documents_that_leak_would_be_caught() -> None:
    with mock.patch.object(DocumentsAsRows, "__call__", lambda self, *args, **kwargs: self.method(*args, **kwargs)):
        found = differences([train({}, "mamba2")], reference("mamba2"))
    assert found["loss 0"] > 1e-3 and found["norm 0"] > 1e-5


def test_it_is_said_once_and_what_cannot_be_kept_apart_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    batch = rows()[0]
    model = build("lfm2")
    mw.to_distributed(model, plan=mw.ParallelPlan())
    with caplog.at_level(logging.WARNING):
        model(**batch)
        model(**batch)
    assert sum("rows have several documents, which the stock Lfm2ForCausalLM" in text for text in caplog.messages) == 1
    model = build("lfm2")
    model.model.layers[0].conv.is_causal = True  # the mark of an attention
    mw.to_distributed(model, plan=mw.ParallelPlan())
    with pytest.raises(mw.PlanError, match=r"layers.0.conv \(Lfm2ShortConv\).*attention.*leave out Packing"):
        model(**batch)


def test_an_attention_whose_mask_has_no_documents_is_refused() -> None:
    """GraniteMoeHybrid makes its mask without positions, so documents would be apart in some of its layers only."""
    model = build("granitemoehybrid")
    mw.to_distributed(model, plan=mw.ParallelPlan())
    with pytest.raises(
        mw.PlanError, match=r"\(GraniteMoeHybridAttention\) lets them see each other.*leave out Packing"
    ):
        model(**rows()[0])


def test_an_attention_may_get_its_mask_by_position() -> None:
    def by_position(module: Any, args: Any, given: dict[str, Any]) -> Any:
        names = ("hidden_states", "position_embeddings", "attention_mask")
        return tuple(given.pop(name) for name in names), given

    losses = []
    for is_by_position in (False, True):
        model = build("lfm2")
        for layer in model.model.layers:
            if is_by_position and layer.is_attention_layer:
                layer.self_attn.register_forward_pre_hook(by_position, with_kwargs=True)
        mw.to_distributed(model, plan=mw.ParallelPlan())
        losses.append(model(**rows()[0]).loss)
    assert torch.equal(*losses)


def test_states_of_an_unknown_form_are_refused() -> None:
    model = build("lfm2")
    model.model.layers = torch.nn.ModuleList([model.model.layers[1]])  # one with attention
    type(model)._is_stateful = True  # the mark of transformers' recurrent models
    try:
        mw.to_distributed(model, plan=mw.ParallelPlan())
        with pytest.raises(mw.PlanError, match=r"Lfm2ForCausalLM keeps states over tokens.*leave out Packing"):
            model(**rows()[0])
    finally:
        del type(model)._is_stateful


@pytest.mark.crossing
def test_verify_keeps_documents_apart_on_one_device_too() -> None:
    report = mw.verify(functools.partial(build, "lfm2"), "dp2 zero1")
    assert report.ok, report
    assert "Packed documents are kept apart on one device too" in str(report)
