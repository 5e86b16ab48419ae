"""Packing: no token lost, rows well filled, resumed in the middle, and a loss equal to that of single documents."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from transformers import masking_utils

import meshwright as mw
from meshwright.data.packing import (
    DocumentPiece,
    PackedDataset,
    PackedRows,
    PackedShards,
    Packing,
    best_fit,
    block_diagonal_mask,
    cu_seqlens,
    make_row,
)
from meshwright.data.shards import ListedShards
from meshwright.data.stream import ShardedStream
from meshwright.mesh.axes import Axis
from support import models, vision_models
from support.exact import Float64, relative_difference
from support.tiers import crossings

STRATEGIES: list[Any] = ["best_fit", "concatenate"]


def log_normal(count: int, seed: int, mean: float = 5.5, sigma: float = 1.0) -> list[int]:
    chooser = random.Random(seed)
    return [max(1, int(chooser.lognormvariate(mean, sigma))) for _ in range(count)]


def documents(lengths: list[int]) -> list[list[int]]:
    """Documents whose tokens are all different, over all documents."""
    numbers = itertools.count(1)
    return [list(itertools.islice(numbers, length)) for length in lengths]


def tokens(rows: Any) -> list[int]:
    """The tokens of rows that are not padding, which is 0."""
    return [token for row in rows for token in row["input_ids"].tolist() if token]


def fill(rows: list[list[DocumentPiece]], length: int) -> float:
    return sum(piece.stop - piece.start for row in rows for piece in row) / (length * len(rows))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("length", [1024, 2048, 4096])
@pytest.mark.parametrize("seed", crossings(range(3), but=[0]))
def test_fill_on_log_normal_lengths(strategy: Any, length: int, seed: int) -> None:
    lengths = log_normal(20_000, seed)
    rows = Packing(length, strategy).rows(lengths)
    assert fill(rows, length) >= 0.98
    assert max(sum(piece.stop - piece.start for piece in row) for row in rows) <= length
    pieces = sorted(itertools.chain(*rows))
    for document, parts in itertools.groupby(pieces, key=lambda piece: piece.document):
        borders = [(piece.start, piece.stop) for piece in parts]
        ends = [0, *(stop for _, stop in borders)]
        assert [start for start, _ in borders] == ends[:-1] and ends[-1] == lengths[document]
    assert len({piece.document for piece in pieces}) == len(lengths)


def test_best_fit_splits_only_what_is_longer_than_a_row() -> None:
    rows = best_fit([10, 0, 4, 3, 25], 10)
    assert rows == [
        [DocumentPiece(0, 0, 10)],
        [DocumentPiece(2, 0, 4), DocumentPiece(4, 20, 25)],
        [DocumentPiece(3, 0, 3)],
        [DocumentPiece(4, 0, 10)],
        [DocumentPiece(4, 10, 20)],
    ]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_go_on_from_a_state(strategy: Any) -> None:
    packing = Packing(32, strategy, window=16)
    texts = documents([*log_normal(100, 3, mean=2.5), 0, 70])
    whole = list(PackedRows(texts, packing))
    assert sorted(tokens(whole)) == list(range(1, sum(map(len, texts)) + 1))
    for taken in range(len(whole) + 1):
        first, second = PackedRows(texts, packing), PackedRows(texts, packing)
        before = list(itertools.islice(first, taken))
        state = json.dumps(first.state_dict())
        assert len(state) < 256
        second.load_state_dict(json.loads(state))
        rows = [*before, *second]
        assert len(rows) == len(whole)
        for row, expected in zip(rows, whole, strict=True):
            assert all(torch.equal(row[name], expected[name]) for name in expected)


def test_a_state_of_other_rows_is_refused() -> None:
    state = PackedRows([[1]], Packing(8)).state_dict()
    with pytest.raises(ValueError, match=r"length=8, but this Packing has length=16"):
        PackedRows([[1]], Packing(16)).load_state_dict(state)


def test_a_row_marks_the_borders() -> None:
    first = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}
    row = make_row([(DocumentPiece(0, 0, 3), first), (DocumentPiece(1, 2, 4), [1, 2, 8, 9])], Packing(6, multiple_of=4))
    assert row["input_ids"].tolist() == [5, 6, 7, 8, 9, 0, 0, 0]
    assert row["labels"].tolist() == [-100, 6, 7, -100, 9, -100, -100, -100]
    assert row["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 1, 2]


def test_what_attention_needs() -> None:
    positions = torch.tensor([[0, 1, 0, 0]])
    assert cu_seqlens(positions)[0].tolist() == [0, 2, 3, 4] and cu_seqlens(positions)[1] == 2
    assert block_diagonal_mask(positions)[0, 0].int().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 0, 1],
    ]
    assert block_diagonal_mask(positions, torch.float32)[0, 0, 2].tolist()[1:3] == [torch.finfo(torch.float32).min, 0]


TEXTS = [models.tokens(1, length, seed=length)[0] for length in (3, 17, 1, 9, 24, 5, 12, 30, 2, 7)]


def loss_of_single_documents(model: Any) -> torch.Tensor:
    losses = [model(input_ids=text[None], labels=text[None]).loss * (len(text) - 1) for text in TEXTS if len(text) > 1]
    return sum(losses) / sum(len(text) - 1 for text in TEXTS)


@pytest.mark.parametrize("attention", ["position_ids", "mask", "eager"])
def test_the_loss_is_that_of_single_documents(attention: str) -> None:
    """Of the stock model on one device, which reads borders from positions only without a cache."""
    model = models.build("llama", attn_implementation="eager" if attention == "eager" else "sdpa").double()
    model.config.use_cache = False
    texts = TEXTS
    expected = loss_of_single_documents(model)
    expected_grads = torch.autograd.grad(expected, list(model.parameters()))

    rows = PackedDataset(texts, Packing(32, multiple_of=4))
    assert len(rows) < len(texts)
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    if attention == "mask":
        batch["attention_mask"] = block_diagonal_mask(batch["position_ids"])
    elif attention == "eager":
        batch["attention_mask"] = block_diagonal_mask(batch["position_ids"], torch.float64)
    loss = model(**batch).loss
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for grad, single in zip(torch.autograd.grad(loss, list(model.parameters())), expected_grads, strict=True):
        torch.testing.assert_close(grad, single, rtol=1e-6, atol=1e-9)


def train_on_packed_rows(plan: dict[str, Any]) -> dict[str, Any]:
    """A plain loop of the user's: packed rows, and a model with transformers' default ``use_cache=True``."""
    with Float64():
        model: Any = models.build("llama").double()
        assert model.config.use_cache
        loader: Any = DataLoader(PackedDataset(TEXTS, Packing(32, multiple_of=4)), batch_size=6)
        config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan))
        model, _, loader = mw.to_distributed(model, None, loader, config=config)
        (batch,) = loader
        loss = model(**batch).loss
        loss.backward()
        model.eval()
        with torch.no_grad():
            evaluated = model(**batch).loss
            del batch["labels"]
            logits = model(**batch).logits
            assert model(input_ids=batch["input_ids"]).past_key_values is not None, "nothing is packed"
    return {
        "losses": [loss.item(), evaluated.item()],
        "gradients": mw.full_gradients(model),
        "rows": batch["input_ids"],
        "logits": logits,
    }


@pytest.mark.quick
@pytest.mark.parametrize(
    "plan",
    [
        {"dp": 2},
        {"tp": 2, "sequence_parallel": True},
        {"dp": 2, "zero_stage": 3, "gradient_accumulation_steps": 2},
    ],
    ids=str,
)
def test_a_plain_loop_keeps_packed_documents_apart(plan: dict[str, Any], pool2: Any) -> None:
    """Row 34: with a cache, which nothing reads in training, transformers lets packed documents see each other.

    In float64 only the order of the sums differs; documents that see each other are 1e-3 off.
    """
    with Float64():
        model = models.build("llama").double()
        expected = loss_of_single_documents(model)
        expected.backward()
        ranks = pool2.run(train_on_packed_rows, plan)
        for rank in ranks:
            for loss in rank["losses"]:
                assert abs(loss / expected.item() - 1) < 1e-12
        gradients = ranks[0]["gradients"]
        for name, parameter in model.named_parameters():
            if not name.endswith("k_proj.bias"):  # whose gradient is zero but for rounding
                assert relative_difference(gradients[name], parameter.grad) < 1e-9, name
        with torch.no_grad():
            for row, logits in zip(ranks[0]["rows"], ranks[0]["logits"], strict=True):
                text = next(text for text in TEXTS if torch.equal(row[: len(text)], text))
                expected_logits = model.eval()(input_ids=text[None]).logits[0]
                torch.testing.assert_close(logits[: len(text)], expected_logits, rtol=1e-9, atol=1e-9)


def test_documents_are_looked_for_only_in_positions_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the host waits for transformers' check; one device's default, with a cache, has none either."""
    looks: list[torch.Size] = []
    check = masking_utils.find_packed_sequence_indices
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda x: looks.append(x.shape) or check(x))
    ids = torch.zeros(2, 8, dtype=torch.int64)
    models.build("llama")(input_ids=ids, labels=ids)
    assert not looks
    model, _, _ = mw.to_distributed(models.build("llama"), plan="tp1")
    model(input_ids=ids, labels=ids)
    with pytest.raises(ValueError, match="exactly one"):  # the check is given back after a pass that fails
        model(input_ids=ids, labels=ids, inputs_embeds=torch.zeros(2, 8, 32))
    assert not looks
    model(input_ids=ids, labels=ids, position_ids=torch.arange(8).expand(2, -1))
    model.config.use_cache = False  # as on one device, which then looks
    model(input_ids=ids, labels=ids)
    assert len(looks) == 2


def test_an_interrupted_pass_does_not_mix_the_documents_of_the_next() -> None:
    """torch calls no hook after a KeyboardInterrupt, so that the next pass must give the check back."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    model, _, _ = mw.to_distributed(models.build("llama"), plan="tp1")
    ids = torch.arange(8).expand(2, -1)
    packed = {"input_ids": ids, "labels": ids, "position_ids": (torch.arange(8) % 4).expand(2, -1)}
    expected = model(**packed).loss
    handle = model.model.layers[0].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(input_ids=ids, labels=ids)
    handle.remove()
    assert torch.equal(model(**packed).loss, expected)
    assert masking_utils.find_packed_sequence_indices.__module__ == "transformers.masking_utils"


def test_the_dataset_of_rows() -> None:
    lengths = log_normal(500, 1, mean=3)
    texts = documents(lengths)
    rows = PackedDataset(texts, Packing(128, window=64), lengths=lengths)
    assert sorted(tokens(rows[i] for i in range(len(rows)))) == list(range(1, sum(lengths) + 1))
    assert torch.equal(rows[-1]["input_ids"], rows[len(rows) - 1]["input_ids"])
    with pytest.raises(IndexError):
        rows[len(rows)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_packed_shards_are_streamed_and_resumed(strategy: Any) -> None:
    texts = documents(log_normal(300, 2, mean=2.5))
    source = PackedShards(ListedShards([texts[:120], texts[120:130], texts[130:]]), Packing(48, strategy, window=32))
    options: dict[str, Any] = {"dp": Axis("dp"), "shuffle": True, "buffer_size": 20}
    stream = ShardedStream(source, batch_size=3, **options)
    rows = [row for batch in itertools.islice(stream, 5) for row in batch.samples]
    other = ShardedStream(source, batch_size=4, **options)
    other.load_state_dict(stream.state_dict())
    rows += [row for batch in other for row in batch.samples]
    assert sorted(tokens(rows)) == list(range(1, sum(map(len, texts)) + 1))


def test_a_stream_of_rows_packed_otherwise_is_refused() -> None:
    source = ListedShards([[[1, 2, 3]]])
    state = ShardedStream(PackedShards(source, Packing(8)), batch_size=1, dp=Axis("dp")).state_dict()
    with pytest.raises(ValueError, match=r"fingerprint=.?Packing\(length=8.*Packing\(length=16"):
        ShardedStream(PackedShards(source, Packing(16)), batch_size=1, dp=Axis("dp")).load_state_dict(state)


def test_documents_are_not_read_before_they_are_needed() -> None:
    read = []

    def texts() -> Iterator[list[int]]:
        for number in itertools.count():
            read.append(number)
            yield [1] * 8

    next(iter(PackedRows(texts, Packing(16, window=10))))
    assert len(read) == 10


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"length=0 must be at least 1"):
        Packing(0)
    with pytest.raises(ValueError, match=r"'best_fit' or 'concatenate'"):
        Packing(8, strategy="first")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"padding=False"):
        PackedDataset([{"input_ids": [1, 0], "attention_mask": [1, 0]}], Packing(8))[0]


class Activation(nn.Module):
    forward = staticmethod(F.gelu)  # a builtin function, which has no signature


@pytest.mark.parametrize("family", ["llava", "qwen3_vl", "mistral3"])
def test_documents_of_a_decoder_inside_a_model_are_kept_apart(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward of the first two only passes use_cache on; the config of all has one for the decoder alone."""
    looks: list[torch.Size] = []
    check = masking_utils.find_packed_sequence_indices
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda x: looks.append(x.shape) or check(x))
    with Float64():
        model = vision_models.build(family).double()
        model._modules = {"activation": Activation(), **model._modules}
        documents = [torch.randint(5, 20, (1, n), generator=torch.Generator().manual_seed(n)) for n in (6, 5)]
        losses = [model(input_ids=x, labels=x).loss.item() * (x.shape[1] - 1) for x in documents]
        ids = torch.cat(documents, dim=1)
        packed = {
            "input_ids": ids,
            "labels": ids.clone().index_fill_(1, torch.tensor(6), -100),
            "position_ids": torch.cat([torch.arange(6), torch.arange(5)])[None],
        }
        assert abs(model(**packed).loss.item() - sum(losses) / 9) > 1e-4, "a cache hides no documents"
        model, _, _ = mw.to_distributed(model, plan="tp1")
        looks.clear()
        model(input_ids=ids, labels=ids)
        assert not looks
        for trains in (True, False):  # in float64 only the order of the sums differs
            assert model.train(trains)(**packed).loss.item() == pytest.approx(sum(losses) / 9, rel=1e-12)
