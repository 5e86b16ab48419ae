"""What a loss is divided by, and labels that are no words: the numbers of one device, or an error."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import meshwright as mw
from meshwright.mesh.axes import Axis
from meshwright.parallel.async_numbers import require_words
from meshwright.parallel.batch.mean_over_ranks import GlobalMean
from support.exact import Float64, relative_difference
from support.models import build, labels_for, tokens
from support.short_programs import Plan, gradients_of, train

pytestmark = pytest.mark.quick

SP = {"tp": 2, "sequence_parallel": True}
DP = {"dp": 2}
ROWS, LENGTH, WINDOW = 4, 12, 2


def make_batches(*, ragged: bool) -> list[dict[str, Tensor]]:
    """The global batches of one accumulation window."""
    every = tokens(WINDOW * ROWS, LENGTH)
    labels = labels_for(every) if ragged else every
    return [{"input_ids": every[i : i + ROWS], "labels": labels[i : i + ROWS]} for i in range(0, WINDOW * ROWS, ROWS)]


def count(batches: list[dict[str, Tensor]]) -> int:
    return sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)


def items_of(passed: str, window: list[dict[str, Tensor]]) -> int:
    """What a program may pass for ``num_items_in_batch``, from its own rows."""
    if passed == "sequences":
        return sum(len(batch["labels"]) for batch in window)
    own = count(window)
    if passed != "global" or not dist.is_initialized():
        return own
    total = torch.tensor(own)
    dist.all_reduce(total)
    return int(total)


def accumulate(
    plan: dict[str, Any] | None, passed: str, meaning: str, *, ragged: bool
) -> tuple[list[float], dict[str, Tensor]] | str:
    """The losses and whole gradients of a window whose batches are divided by a count of all of it."""
    with Float64():
        model, batches = build("llama").double(), make_batches(ragged=ragged)
        if plan is not None:
            config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan), num_items_in_batch=meaning)  # type: ignore[arg-type]
            model, _, loader = mw.to_distributed(model, None, batches, config=config)
            batches = list(loader)
        losses = []
        for batch in batches:
            items = items_of(passed, [batch] if passed == "own batch" else batches)
            try:
                loss = model(**batch, num_items_in_batch=items).loss
            except ValueError as error:
                return str(error)
            loss.backward()
            losses.append(loss.item())
    return losses, gradients_of(model, plan)


@pytest.mark.parametrize(
    ("plan", "passed", "meaning", "ragged"),
    [
        (DP, "own window", "local", True),
        ({**DP, "zero_stage": 1}, "own window", "local", False),
        ({**DP, "micro_batch_size": 1}, "global", "global", True),
    ],
    ids=str,
)
def test_counts_of_a_window(plan: dict[str, Any], passed: str, meaning: str, ragged: bool, pool2: Any) -> None:
    """Row 9: with equal lengths a rank's count of two batches is the global count of one, and was taken for it."""
    expected_losses, expected = accumulate(None, passed, meaning, ragged=ragged)
    losses, gradients = pool2.run(accumulate, plan, passed, meaning, ragged=ragged)[0]
    # float64: only the order of sums differs, and a number read the other way gives twice the loss.
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    assert max(relative_difference(gradients[n], g) for n, g in expected.items() if "k_proj.bias" not in n) < 1e-10


@pytest.mark.parametrize(
    ("passed", "meaning", "ragged", "said"),
    [
        # Row 8: the number of sequences.
        ("sequences", "auto", False, "rank 0 of dp passed 4 and has 22 valid labels; rank 1 of dp passed 4 and has 22"),
        # Row 9: no meaning that could be another one in the next step. With these lengths too, what the first rank has
        # in its window happens to be the count of the first global batch.
        ("own window", "auto", False, "passed 44 and has 22 valid labels; the global batch has 44"),
        ("own window", "auto", True, "passed 41 and has 22 valid labels; rank 1 of dp passed 40 and has 19 valid"),
        ("global", "auto", True, r"set ToDistributedConfig\(num_items_in_batch='global'\)"),
        ("own window", "global", True, r"passed different numbers \(41, 40\)"),
    ],
)
def test_a_number_of_items_is_not_guessed(passed: str, meaning: str, ragged: bool, said: str, pool2: Any) -> None:
    """Rows 8 and 9: what the number counts is said by an option, never by its value."""
    for message in pool2.run(accumulate, DP, passed, meaning, ragged=ragged):
        assert isinstance(message, str) and re.search(said, message), message


def test_messages_of_a_device_are_short_and_hold_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's assertions on CUDA take no longer message, and raise for one whether they hold or not."""
    said: list[str] = []
    monkeypatch.setattr(torch, "_assert_async", lambda holds, message: said.append(message))
    numbers = torch.zeros(4, device="meta")
    require_words(numbers.long(), 10**6, "token id", ignored=-100)
    mean = GlobalMean(Axis("dp"), "auto", parts=2)
    mean._items(numbers, numbers)
    mean.num_items = "global"
    mean._items(numbers, numbers)
    mean.has_miscounted = numbers[0] > 0
    mean.check_counts()
    cures = (
        "resize_token_embeddings(len(tokenizer)) before to_distributed", "whole rows on each of them", "leave it out",
        "whole rows on each of them", "if each rank passes its own count", "global_mean(model, loss, count)",
    )  # fmt: skip
    for message, cure in zip(said, cures, strict=True):
        assert len(message) < 255 and cure in message


def test_each_ranks_own_count_needs_no_option(pool2: Any) -> None:
    """Row 8: a batch's own count has one meaning, so that the loss is the mean of the global batch."""
    model, (batch, _) = build("llama").double(), make_batches(ragged=True)
    with Float64():
        expected = model(**batch).loss.item()
    assert pool2.run(accumulate, DP, "own batch", "auto", ragged=True)[0][0][0] == pytest.approx(expected, rel=1e-12)


def train_with_another_index(plan: Plan) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and whole gradients of batches whose loss skips the label 7, of 1 row and of 3 rows."""
    with Float64():
        model, batches = build("llama").double(), []
        for rows in (1, 3):
            ids = tokens(rows, LENGTH, seed=rows)
            batches.append({"input_ids": ids, "labels": ids.masked_fill(torch.arange(LENGTH) % 3 == 0, 7)})
        return train(model, plan, batches, loss_of=lambda model, batch: model(**batch, ignore_index=7).loss)


@pytest.mark.parametrize("plan", [DP, {**DP, "zero_stage": 3}, {**DP, "micro_batch_size": 1}], ids=str)
def test_an_index_of_the_call_is_ignored_in_fillers_too(plan: dict[str, Any], pool2: Any) -> None:
    """A batch of one row gives the second rank a filler, whose labels the loader cannot know. 1e-10 as above."""
    expected_losses, expected = train_with_another_index(None)
    losses, gradients = pool2.run(train_with_another_index, plan)[0]
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    assert max(relative_difference(gradients[n], g) for n, g in expected.items() if "k_proj.bias" not in n) < 1e-10


def out_of_vocabulary(plan: dict[str, Any], where: str, word: int) -> str:
    model = mw.to_distributed(build("llama"), config=mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan)))[0]
    batch = {"input_ids": tokens(2, LENGTH), "labels": tokens(2, LENGTH)}
    batch[where][1, 3] = word
    try:
        model(**batch).loss.item()
    except IndexError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("where", ["input_ids", "labels"])
@pytest.mark.parametrize("word", [97, -1], ids=["padding of the last shard", "negative"])
def test_a_word_that_nobody_has(where: str, word: int, pool2: Any) -> None:
    """Row 10: a token id or a label outside of the vocabulary is an IndexError, as on one device."""
    with pytest.raises(IndexError):
        model, batch = build("llama"), {"input_ids": tokens(2, LENGTH), "labels": tokens(2, LENGTH)}
        batch[where][1, 3] = word
        model(**batch)
    what = "token id" if where == "input_ids" else "label"
    for said in pool2.run(out_of_vocabulary, SP, where, word):
        assert said.startswith("OutOfVocabularyError") and f"{what} {word} is outside of the model's vocabulary" in said
