"""Every rank's rows have the padding of the one-device batch, whatever collates, pads and reads them."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
)
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling as TrlCollator

import meshwright as mw
from data.test_stream import Ranks
from meshwright.data.global_batches import Portion, even_share
from meshwright.data.nested import leaves
from meshwright.data.one_length import OneLength
from meshwright.data.peers import Peers
from meshwright.data.readers.choose import make_reader
from meshwright.mesh.axes import Axis
from meshwright.plan.loader_options import LoaderOptions
from meshwright.random_states import RandomStates
from support.exact import Float64
from support.logs import logged
from support.models import build, tokens
from support.short_programs import Plan, distribute

WORDS = 50


def tokenizer(side: str) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w1"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", mask_token="w2", padding_side=side)


def own_collate(rows: list[dict[str, Any]]) -> tuple[Tensor, Tensor, list[int], Tensor]:
    """A user's: a tuple with padded rows, a mask that is padded in two dims, numbers of the rows, and their classes."""
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    longest = max(map(len, ids))
    mask = torch.zeros(len(rows), 1, longest, longest)
    for row, x in enumerate(ids):
        mask[row, 0, -len(x) :, -len(x) :] = 1.0
    classes = torch.tensor([len(x) % 3 for x in ids])
    return (
        pad_sequence(ids, batch_first=True, padding_value=-7, padding_side="left"),
        mask,
        [len(x) for x in ids],
        classes,
    )


def collators(side: str) -> dict[str, Callable[[list[Any]], Any]]:
    tokens = tokenizer(side)
    return {
        "padding": DataCollatorWithPadding(tokens),
        "multiple of 4": DataCollatorWithPadding(tokens, pad_to_multiple_of=4),
        "language modelling": DataCollatorForLanguageModeling(tokens, mlm=False),
        "seq2seq": DataCollatorForSeq2Seq(tokens),
        "trl": TrlCollator(pad_token_id=0),
        "preference": DataCollatorForPreference(pad_token_id=0),
        "own": own_collate,
        "packed": DataCollatorWithFlattening(),
        "rows": list,
    }


def rows_for(name: str, draws: random.Random, count: int) -> list[dict[str, Any]]:
    def words() -> list[int]:
        return [draws.randrange(3, WORDS) for _ in range(draws.randint(1, 12))]

    if name == "preference":
        return [{"prompt_ids": words(), "chosen_ids": words(), "rejected_ids": words()} for _ in range(count)]
    rows: list[dict[str, Any]] = [{"input_ids": words()} for _ in range(count)]
    return [{**row, "labels": row["input_ids"][::-1]} for row in rows] if name in ("seq2seq", "packed") else rows


class Lines(IterableDataset[Any]):
    """Rows that only an iteration gives, in one piece or in three shards."""

    def __init__(self, rows: list[Any]):
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


class Shards(Lines):
    num_shards = 3

    def open(self, shard: int, start: int) -> Any:
        return iter(self.rows[shard::3][start:])


def portions(make: Callable[[], DataLoader[Any]], dp: int) -> list[list[Portion]]:
    """Each rank's portions, of ranks that are threads of this process."""
    group = Ranks(dp)

    def one(rank: int) -> list[Portion]:
        axis, loader = Axis("dp", size=dp, rank=rank), make()
        gather = lambda value: group.gather(rank, value)  # noqa: E731
        options = LoaderOptions(draws="rank")  # the threads share one random state
        reader: Any = make_reader(loader, axis, even_share, Peers(), options, keeps_samples=True)
        if hasattr(reader, "_stream"):
            reader._stream._gather = gather
        lengths = OneLength(loader.collate_fn, axis, gather=gather)
        return [lengths.of(portion, seed=step) for step, portion in enumerate(reader.read(reader.draw()))]

    read = group.run(one)
    for result in read:
        if isinstance(result, Exception):
            raise result
    return read


def row_of(batch: Any, row: int, rows: int) -> list[Any]:
    """One row's values: of each block of rows of a tensor, and of each list with one value per row."""
    if isinstance(batch, list):
        return [batch[row]]
    found: list[Any] = []
    for name, x in leaves(dict(batch) if hasattr(batch, "keys") else dict(enumerate(batch))):
        if isinstance(x, Tensor):
            found.append((name, x.unflatten(0, (-1, rows))[:, row].tolist(), x.shape[1:]))
    return found


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", collators("left"))
def test_each_rank_has_rows_of_the_one_device_batch(name: str, side: str) -> None:
    """Drawn at random: lengths, sizes of batches, ranks and readers. Values are integers, so they are equal exactly."""
    draws = random.Random(f"{name} {side}")
    collate = collators(side)[name]
    for trial in range(6):
        dp, size = draws.choice([2, 2, 3]), draws.randint(3, 9)
        rows = rows_for(name, draws, count=draws.randint(size, 2 * size + 1))
        dataset: Any = [rows, Lines(rows), Shards(rows)][trial % 3]
        make = lambda: DataLoader(dataset, batch_size=size, collate_fn=collate)  # noqa: B023, E731
        whole = [portion.batch for portion in portions(make, 1)[0]]
        for batch, of_ranks in zip(whole, zip(*portions(make, dp), strict=True), strict=True):
            read = [portion for portion in of_ranks if not portion.is_blank]
            if name == "packed":  # without padding, each rank's tokens are those of its rows
                assert sum(portion.batch["input_ids"].numel() for portion in read) == batch["input_ids"].numel()
                continue
            found = [row_of(portion.batch, row, portion.held) for portion in read for row in range(portion.held)]
            expected = [row_of(batch, row, read[0].total) for row in range(read[0].total)]
            if isinstance(dataset, Shards):  # which deals the rows to the ranks that have read them
                found, expected = sorted(found, key=str), sorted(expected, key=str)
            assert found == expected


def padded(rows: list[Tensor], side: str = "left") -> dict[str, Tensor]:
    ids = pad_sequence(rows, batch_first=True, padding_side=side)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.where(ids > 0, -100)}


def train(plan: Plan) -> list[float]:
    """The losses of four steps on rows whose first token becomes a label behind a pad, and the last norm."""
    with Float64():
        model: Any = build("llama").double()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        rows = [x[: 3 + 7 * n % 11] for n, x in enumerate(tokens(16, 14))]
        loader: Any = DataLoader(rows, batch_size=4, collate_fn=padded)
        model, optimizer, loader = distribute(plan, model, optimizer, loader)
        found = []
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            norm = mw.clip_grad_norm_(model, 1e9)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return [*found, float(norm)]


@pytest.mark.parametrize("plan", [{"dp": 2}, {"dp": 2, "zero_stage": 3}, {"dp": 2, "micro_batch_size": 1}], ids=str)
def test_left_padding_gives_the_numbers_of_one_device(plan: dict[str, Any], pool2: Any) -> None:
    """In float64, so that only the order of sums differs; padding to a rank's own longest row differs by 1e-3."""
    for found in pool2.run(train, plan):
        assert found == pytest.approx(train(None), rel=1e-10)


def warnings_of_padding_in_the_loop(side: str) -> list[str]:
    with logged(level=logging.WARNING) as said:
        rows = [x[: 3 + 7 * n % 11] for n, x in enumerate(tokens(8, 14))]
        loader: Any = DataLoader(rows, batch_size=4, collate_fn=list)
        config = mw.ToDistributedConfig(plan=mw.ParallelPlan(dp=2))
        model, _, loader = mw.to_distributed(build("llama"), None, loader, config=config)
        for batch in loader:
            model(**padded(batch, side)).loss.backward()
    return [text for text in said if "pads on the left" in text]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_in_the_loop_is_told(side: str, pool2: Any) -> None:
    """The loader yields rows without padding, so only the ranks' passes show that their lengths differ."""
    said = [text for found in pool2.run(warnings_of_padding_in_the_loop, side) for text in found]
    assert bool(said) == (side == "left") and all("another data-parallel rank's rows" in text for text in said)


def by_length(rows: list[Tensor]) -> Tensor:
    return pad_sequence(sorted(rows, key=len, reverse=True), batch_first=True)


@pytest.mark.parametrize("collate", [pad_sequence, by_length], ids=["batch second", "sorted"])
def test_what_cannot_be_padded_is_told(collate: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Rows that change their places, or are not the first dim: each rank keeps its own rows, as they were collated."""
    rows = [torch.arange(1, n) for n in (3, 4, 9, 8)]
    found = portions(lambda: DataLoader(rows, batch_size=4, collate_fn=collate), 2)  # type: ignore[arg-type]
    assert [x.batch.tolist() for (x,) in found] == [collate(rows[:2]).tolist(), collate(rows[2:]).tolist()]
    said = [text for text in caplog.messages if "cannot pad them to that length" in text]
    assert len(said) == (1 if collate is by_length else 0)
    assert not said or "rank 0 of dp has rows of length 3 in a batch whose longest rows have length 8" in said[0]


def test_random_masks_are_drawn_for_the_padded_rows() -> None:
    """Inputs and labels of a row are of one run, since those of two runs hide different words."""
    collate = DataCollatorForLanguageModeling(tokenizer("left"), mlm_probability=0.5)
    draws = random.Random(0)
    rows = [{"input_ids": [draws.randrange(3, WORDS) for _ in range(n)]} for n in (30, 7, 12, 9, 31, 40)]
    torch.manual_seed(0)
    for of_rank, own in zip(
        portions(lambda: DataLoader(rows, 6, collate_fn=collate), 2), (rows[:3], rows[3:]), strict=True
    ):
        batch = of_rank[0].batch
        is_hidden = batch["labels"] >= 0
        whole = batch["input_ids"].where(~is_hidden, batch["labels"])
        assert batch["input_ids"].shape == (3, 40) and is_hidden.any()
        assert [row[row > 0].tolist() for row in whole] == [row["input_ids"] for row in own]


class Iterated(IterableDataset):
    """Rows that can only be gone through."""

    def __init__(self, rows: list[Any]):
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


@pytest.mark.parametrize("kind", [list, Iterated])
@pytest.mark.parametrize("workers", [0, 1])
def test_random_masks_are_those_of_one_device(workers: int, kind: Any) -> None:
    """Equal bitwise, since each rank draws for all rows; with draws="rank" the second rank's masks differ."""
    collate = DataCollatorForLanguageModeling(tokenizer("right"), mlm_probability=0.5)
    rows = kind([{"input_ids": list(range(3, 3 + n))} for n in (30, 7, 12, 9, 31, 40)])

    def read(dp: int, rank: int, options: LoaderOptions) -> list[Tensor]:
        torch.manual_seed(0)
        loader = DataLoader(rows, 4, collate_fn=collate, num_workers=workers)
        reader: Any = make_reader(loader, Axis("dp", size=dp, rank=rank), even_share, Peers(), options)
        return [portion.batch["labels"] for portion in reader.read(reader.draw())]

    torch.manual_seed(0)
    whole = [batch["labels"] for batch in DataLoader(rows, 4, collate_fn=collate, num_workers=workers)]
    ranks = [read(2, rank, LoaderOptions()) for rank in (0, 1)]
    assert all(torch.equal(torch.cat(parts), x) for *parts, x in zip(*ranks, whole, strict=True))
    alone = read(2, 1, LoaderOptions(draws="rank"))[0]
    assert alone.shape != ranks[1][0].shape or not torch.equal(alone, ranks[1][0])


class Taking:
    """Counts its calls, and takes what it collates out of the samples."""

    calls = 0

    def __call__(self, samples: list[Any]) -> Tensor:
        self.calls += 1
        return torch.tensor([sample.pop("x") + 100 * self.calls for sample in samples])


def test_a_collate_function_is_called_once_for_each_batch() -> None:
    rows = Iterated([{"x": i} for i in range(6)])
    reader = make_reader(DataLoader(rows, 4, collate_fn=Taking()), Axis("dp", size=2, rank=1), even_share, Peers(),
                         LoaderOptions())  # fmt: skip
    assert [portion.batch.tolist() for portion in reader.read(reader.draw())] == [[102, 103], [205]]


@pytest.mark.parametrize("kind", [list, Iterated])
def test_a_later_batch_that_cannot_be_cut_is_an_error(kind: Any) -> None:
    collate = lambda rows: torch.rand(len(rows) if len(rows) == 4 else 7, 2)  # noqa: E731
    for rank in (0, 1):
        reader = make_reader(DataLoader(kind(range(6)), 4, collate_fn=collate), Axis("dp", size=2, rank=rank),
                             even_share, Peers(), LoaderOptions())  # fmt: skip
        with pytest.raises(ValueError, match=r"batch of 2 rows \(Tensor\) cannot be cut.*draws='rank'"):
            list(reader.read(reader.draw()))


@pytest.mark.parametrize(
    ("generator", "draw"),
    [
        (np.random.RandomState(0), lambda x: x.rand()),
        (np.random.default_rng(0), lambda x: x.random()),
        (random.Random(0), lambda x: x.random()),
        (torch.Generator(), lambda x: torch.rand(1, generator=x)),
    ],
)
def test_draws_from_generators_that_are_held_are_seen(generator: Any, draw: Callable[[Any], Any]) -> None:
    """In a list, since transforms are; the module is one that data sets hold too, and is not searched."""
    holder = SimpleNamespace(transforms=[SimpleNamespace(own=generator)], module=np)
    holder.own = holder
    states = RandomStates(holder)
    assert states.are_unchanged
    drawn = draw(generator)
    assert not states.are_unchanged
    states.restore()
    assert states.are_unchanged and draw(generator) == drawn
