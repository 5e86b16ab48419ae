"""The heads of transformers whose loss is a mean over rows, labels or positions: exact under every plan."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForMultipleChoice,
    BertForTokenClassification,
    BlipConfig,
    BlipForConditionalGeneration,
    DistilBertConfig,
    DistilBertForMaskedLM,
    GPT2Config,
    GPT2ForQuestionAnswering,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    Pix2StructConfig,
    Pix2StructForConditionalGeneration,
    PreTrainedModel,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

import meshwright as mw
from meshwright.features.decision import refuse
from meshwright.features.training import LOSS
from meshwright.mesh.axes import Axis
from meshwright.parallel.autograd_graph import with_loss
from meshwright.parallel.batch.mean_over_ranks import GlobalMean
from meshwright.parallel.losses.head_losses import LossKind, OutputLoss, find_loss
from meshwright.parallel.losses.observed import ObservedLoss, observe_loss
from support.calls import call_of
from support.exact import Float64, relative_difference
from support.logs import logged
from support.models import SIZES, tokens
from support.parity import pool_for
from support.short_programs import Plan, train
from support.tiers import crossing
from support.trainers import Run, run_trainer

LENGTH = 10
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
_BERT = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}


def llama(kind: type, **options: Any) -> PreTrainedModel:
    return kind(LlamaConfig(**SIZES, classifier_dropout=0.0, **options))


def gpt2(kind: type, **options: Any) -> PreTrainedModel:
    return kind(GPT2Config(vocab_size=97, n_positions=32, pad_token_id=0, **_GPT2, **options))


def bert(kind: type = BertForMultipleChoice, **options: Any) -> PreTrainedModel:
    sizes = {name: value for name, value in SIZES.items() if "key_value" not in name and name != "use_cache"}
    return kind(BertConfig(**sizes, **_BERT, **options))


def t5() -> PreTrainedModel:
    sizes = {"vocab_size": 97, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4, "num_layers": 1}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=1, pad_token_id=0))


def distilbert() -> PreTrainedModel:
    sizes = {"vocab_size": 97, "dim": 32, "hidden_dim": 48, "n_layers": 1, "n_heads": 4}
    return DistilBertForMaskedLM(DistilBertConfig(**sizes, dropout=0.0, attention_dropout=0.0))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "sequences": lambda: llama(LlamaForSequenceClassification, num_labels=3),
    "regression": lambda: llama(LlamaForSequenceClassification, num_labels=1),
    "several labels": lambda: llama(LlamaForSequenceClassification, num_labels=3),
    "tokens": lambda: llama(LlamaForTokenClassification, num_labels=3),
    "spans": lambda: llama(LlamaForQuestionAnswering),
    "choices": bert,
    "translations": t5,
    "masked words": distilbert,
    "sequences of GPT-2": lambda: gpt2(GPT2ForSequenceClassification, num_labels=3),
    "spans of GPT-2": lambda: gpt2(GPT2ForQuestionAnswering),
}


def make_batch(head: str, rows: int) -> dict[str, Tensor]:
    """Rows of unlike lengths, of which each has another number of labels."""
    ids = tokens(rows, LENGTH)
    for row in range(rows):
        ids[row, LENGTH - row :] = 0
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    draws = torch.Generator().manual_seed(rows)
    classes = torch.randint(3, (rows, LENGTH), generator=draws)
    if head == "choices":
        return {**{k: torch.stack([v, v.flip(0).roll(1, 1)], 1) for k, v in batch.items()}, "labels": classes[:, 0] % 2}
    if head == "regression":
        return {**batch, "labels": torch.randn(rows, generator=draws, dtype=torch.float64)}
    if head == "several labels":
        return {**batch, "labels": (classes[:, :3] > 0).double()}
    if head in ("tokens", "translations", "masked words"):
        return {**batch, "labels": classes.masked_fill((ids == 0) | (ids % 3 == 1), -100)}
    if head.startswith("spans"):
        # A start behind the row does not count.
        starts = torch.tensor([LENGTH + 3 if row == 1 else row + 2 for row in range(rows)])
        return {**batch, "start_positions": starts, "end_positions": torch.full((rows,), 6)}
    labels = classes[:, 0].clone()
    labels[3:] = -100  # a fourth row does not count either
    return {**batch, "labels": labels}


def run(
    plan: Plan, heads: list[str], sizes: tuple[int, ...] = (3, 1, 4)
) -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    """For each head, the losses of batches with so many rows, and the whole gradients of their sum."""
    results = {}
    for head in heads:
        with Float64():
            torch.manual_seed(0)
            model: Any = MODELS[head]().double().train()
            results[head] = train(model, plan, [make_batch(head, rows) for rows in sizes])
    return results


def assert_equal(ranks: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for head, (losses, gradients) in expected.items():
        for rank in ranks:  # every rank reports the global loss
            # float64: only the order of sums differs. A mean of the ranks' means is off by more than 1e-3.
            assert rank[head][0] == pytest.approx(losses, rel=1e-12), head
        actual = ranks[0][head][1]
        largest = max(gradient.abs().max().item() for gradient in gradients.values())
        for name, gradient in gradients.items():
            if gradient.abs().max() > 1e-12 * largest:  # a key's bias has rounding only
                assert relative_difference(actual[name], gradient) < 1e-10, (head, name)


@pytest.mark.parametrize(
    "plan",
    [{"dp": 2}, crossing({"dp": 2, "zero_stage": 2}), {"dp": 2, "zero_stage": 3}, {"dp": 2, "micro_batch_size": 1}],
    ids=str,
)
def test_heads_split_over_data_parallel_ranks(plan: dict[str, Any], pool2: Any) -> None:
    """Rows 17 and 18: with 3, 1 and 4 rows over two ranks the loss is the mean over the global batch."""
    heads = (
        list(MODELS)
        if plan == {"dp": 2}
        else ["sequences", "tokens", "spans", "choices", "spans of GPT-2", "translations"]
    )
    assert_equal(pool2.run(run, plan, heads, timeout=300), run(None, heads))


@pytest.mark.parametrize(
    "plan", [crossing({"tp": 2}), {"tp": 2, "sequence_parallel": True, "micro_batch_size": 2}], ids=str
)
def test_heads_over_tensor_parallel_ranks(plan: dict[str, Any], pool2: Any) -> None:
    """A head for sequences, tokens or spans is one small layer, which each rank has whole."""
    heads = [head for head in MODELS if head not in ("choices", "translations", "masked words")]
    assert_equal(pool2.run(run, plan, heads, timeout=300), run(None, heads))


def warnings_of(plan: Plan, heads: list[str]) -> list[str]:
    with logged(level=logging.WARNING) as said:
        run(plan, heads)
    return [message for message in said if "unknown kind" in message]


def test_no_warning_calls_a_known_loss_unknown(pool2: Any) -> None:
    """Row 17: batches of 3, 1 and 4 rows over two ranks are uneven, which a loss of the global batch allows for."""
    assert pool2.run(warnings_of, {"dp": 2}, list(MODELS), timeout=300) == [[], []]


class OwnLoss(torch.nn.Module):
    """A model whose forward computes a loss in one of several ways."""

    def __init__(self, way: str):
        super().__init__()
        self.way, self.words = way, torch.nn.Embedding(97, 97)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Any = None) -> dict[str, Tensor]:
        logits, options = self.words(input_ids), {}
        if self.way in ("shifted", "masked"):
            logits, labels = logits[:, :-1], labels[:, 1:]
        if self.way == "masked" and attention_mask is not None:
            is_real = attention_mask[:, 1:] != 0
            logits, labels = logits[is_real], labels[is_real]
        if self.way == "weighted":
            options = {"weight": torch.ones(97)}
        if self.way == "summed":
            options = {"reduction": "sum"}
        if self.way == "another index":
            options = {"ignore_index": 0}
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 97), labels.reshape(-1), **options)
        return {"loss": loss + logits.mean() if self.way == "penalised" else loss, "logits": logits}


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ("plain", ObservedLoss(ignore_index=-100)),
        ("shifted", ObservedLoss(ignore_index=-100, is_shifted=True)),
        ("masked", ObservedLoss(ignore_index=-100, is_shifted=True, is_masked=True)),
        ("another index", ObservedLoss(ignore_index=0)),
        ("weighted", None),
        ("summed", None),
        ("penalised", None),
    ],
)
@pytest.mark.quick
def test_what_a_loss_averages_over_is_observed(way: str, expected: ObservedLoss | None) -> None:
    model = OwnLoss(way)
    found = observe_loss(model)
    assert found == expected
    if found is None:
        return
    batch = {**make_batch("tokens", 4), "labels": make_batch("tokens", 4)["input_ids"]}  # labels of padding too
    batch["labels"][0, :3] = -100 if way != "another index" else 0
    whole = model(**batch)["loss"]
    parts = [{name: x[rows] for name, x in batch.items()} for rows in (slice(0, 1), slice(1, 4))]
    mean = sum(model(**part)["loss"] * found.count(part) for part in parts) / found.count(batch)
    torch.testing.assert_close(mean, whole)
    if way == "masked":  # without the mask the mean would be another one
        blind = ObservedLoss(ignore_index=-100, is_shifted=True)
        wrong = sum(model(**part)["loss"] * blind.count(part) for part in parts) / blind.count(batch)
        assert (wrong - whole).abs() > 1e-3


def switch() -> PreTrainedModel:
    sizes = {"vocab_size": 97, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4, "num_layers": 2}
    sizes |= {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 4}
    options = {"dropout_rate": 0.0, "decoder_start_token_id": 1, "pad_token_id": 0, "router_jitter_noise": 0.0}
    return SwitchTransformersForConditionalGeneration(SwitchTransformersConfig(**sizes, **options)).double()


def blip() -> PreTrainedModel:
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    text = {**tower, "vocab_size": 97, "encoder_hidden_size": 32, "hidden_dropout_prob": 0.0, "bos_token_id": 1}
    config = BlipConfig(text_config=text, vision_config={**tower, "image_size": 8, "patch_size": 4})
    return BlipForConditionalGeneration(config).double().eval()


def pix2struct() -> PreTrainedModel:
    sizes = {"hidden_size": 32, "d_ff": 48, "d_kv": 8}
    text = {**sizes, "vocab_size": 97, "num_layers": 1, "num_heads": 4}
    vision = {**sizes, "num_hidden_layers": 1, "num_attention_heads": 4, "patch_embed_hidden_size": 48}
    return Pix2StructForConditionalGeneration(Pix2StructConfig(text_config=text, vision_config=vision)).double().eval()


def batch_for(build: Any, rows: int) -> dict[str, Tensor]:
    batch = make_batch("tokens", rows)
    batch["labels"] = batch["input_ids"].clone()
    if build is blip:
        batch["pixel_values"] = torch.randn(rows, 3, 8, 8, dtype=torch.float64)
    if build is pix2struct:  # each patch has its row and its column first
        patches = torch.cat([torch.ones(rows, 6, 2), torch.randn(rows, 6, 48)], 2).double()
        return {"flattened_patches": patches, "labels": batch["labels"]}
    return batch


@pytest.mark.parametrize(("build", "part"), [(switch, None), (blip, None), (pix2struct, "decoder")])
def test_the_loss_of_a_model_that_needs_values_or_images_is_known(build: Any, part: str | None) -> None:
    """Row 17: experts that route by values do not hide the loss, and a decoder's own loss is that of the model."""
    torch.manual_seed(0)
    with Float64():
        model = build()
        before = [{name: id(x) for name, x in vars(module).items()} for module in model.modules()]
        kind = find_loss(model)
        assert [{name: id(x) for name, x in vars(module).items()} for module in model.modules()] == before
        assert kind is not None and kind.part == part
        batch = batch_for(build, 4)
        batch["labels"][0, :7] = -100
        whole = model(**batch).loss
        parts = [{name: x[rows] for name, x in batch.items()} for rows in (slice(0, 2), slice(2, 4))]
        losses = [model(**rows).loss for rows in parts]
        mean = sum(loss * kind.counts(rows) for loss, rows in zip(losses, parts, strict=True)) / kind.counts(batch)
    assert relative_difference(mean, whole) < 1e-10  # one sum in another order
    assert relative_difference(sum(losses) / 2, whole) > 1e-6  # the mean of means would be another


def test_another_loss_than_that_of_the_part_is_an_error() -> None:
    """Row 17: a loss that the model has changed after its decoder has returned it is not taken for the decoder's."""
    model = pix2struct()
    kind = find_loss(model)
    assert kind is not None
    loss = OutputLoss(kind, GlobalMean(Axis("dp")))
    loss.watch(model)
    batch = batch_for(pix2struct, 2)
    assert model(**batch).loss.isfinite()
    model.decoder.register_forward_hook(lambda module, args, output: with_loss(output, output.loss * 2))
    with pytest.raises(ValueError, match="another loss than its decoder"):
        model(**batch)


def test_a_router_loss_of_ones_own_is_refused_where_ranks_have_parts() -> None:
    """Row 17: a product of means over all tokens is no mean of what the ranks have."""
    model = switch()
    kind = LossKind(counts=lambda batch: torch.ones(1), is_observed=True)
    refuse(call_of(model, loss=kind, dp=2), LOSS)
    model.config.output_router_logits = True
    refuse(call_of(model, loss=kind, tp=2), LOSS)
    for plan in ({"dp": 2}, {"gradient_accumulation_steps": 2}):
        with pytest.raises(mw.PlanError, match=r"Set model\.config\.output_router_logits = False"):
            refuse(call_of(model, loss=kind, **plan), LOSS)


class Labelled(Dataset):
    """Rows for the Trainer; of tokens, each ignores another number of labels."""

    def __init__(self, head: str, count: int):
        self.head, self.count = head, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = tokens(1, LENGTH, seed=index)[0]
        if self.head == "sequences":
            return {"input_ids": ids, "labels": int(ids.sum()) % 3}
        labels = ids % 3
        labels[: index % 5] = -100
        return {"input_ids": ids, "labels": labels}


def seeded(head: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return MODELS[head]() if head in MODELS else bert(BertForTokenClassification, num_labels=3)


def train_by_trainer(output_dir: Path, head: str, plan: dict[str, Any] | None, **options: Any) -> Run:
    init = functools.partial(seeded, head)
    extra = {"model_init": init, "train_dataset": Labelled(head, 22), "eval_dataset": Labelled(head, 7)}
    extra["compute_metrics"] = None
    return run_trainer(output_dir, plan, extra=extra, evaluated=7, num_train_epochs=2, **options)


@pytest.mark.parametrize(
    ("head", "plan"),
    [
        crossing("sequences", {"dp": 2}),
        ("tokens", {"dp": 2}),
        ("tokens of BERT", {"pp": 2, "micro_batch_size": 1}),
        crossing("tokens of BERT", {"dp": 2, "tp": 2, "sequence_parallel": True}),
    ],
    ids=str,
)
def test_heads_in_the_trainer(head: str, plan: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Row 6: the logged loss and norm are those of one process, as are evaluations, with rows that do not divide.

    BERT ignores the count of items that the Trainer passes.
    """
    expected = train_by_trainer(tmp_path, head, None)
    for run in pool_for(plan, request).run(train_by_trainer, tmp_path, head, plan, timeout=300):
        # float32; they were twice as large, or half.
        assert run.losses == pytest.approx(expected.losses, rel=1e-5)
        assert run.norms == pytest.approx(expected.norms, rel=1e-4)
        assert run.metrics["eval_loss"] == pytest.approx(expected.metrics["eval_loss"], rel=1e-5)
