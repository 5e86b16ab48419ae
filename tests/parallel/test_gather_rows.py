"""``gather_rows``: what a program computes from all rows of a batch is that of one device, in value and gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import meshwright as mw
from support.exact import Float64, relative_difference
from support.models import build, labels_for, tokens
from support.short_programs import Plan, distribute, weights_of, worst

LENGTH = 10
SIZES = (4, 3, 1)  # rows of a batch: as many on each rank, one more on one of two, and a filler on one of two


def make_batches() -> list[dict[str, Tensor]]:
    batches = []
    for rows in SIZES:
        ids = tokens(rows, LENGTH, seed=rows)
        batches.append({"input_ids": ids, "labels": labels_for(ids), "rewards": ids.double().mean(1)})
    return batches


def contrastive(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """In-batch negatives between two poolings of the hidden states, beside the model's own loss."""
    hidden = model.model(input_ids=batch["input_ids"]).last_hidden_state
    queries, keys = mw.gather_rows(hidden[:, -1]), mw.gather_rows(hidden.mean(1))
    own = F.cross_entropy(queries @ keys.T, torch.arange(len(queries)))
    return own + model(input_ids=batch["input_ids"], labels=batch["labels"]).loss


def advantages(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Rewards that are normalised over the batch weigh the rows' losses."""
    every = mw.gather_rows(batch["rewards"])
    weights = (batch["rewards"] - every.mean()) / (every.std(correction=0) + 1)
    losses = 1 - model(input_ids=batch["input_ids"]).logits.log_softmax(-1)[:, :, 1].mean(1)
    whole = mw.gather_rows(weights * losses)
    assert torch.equal(mw.gather_rows(batch["rewards"] > 3), every > 3) and len(whole) == len(every)
    return whole.mean()


def centred(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """A layer whose output depends on the mean over rows, and a pass in evaluation."""

    def centre(_: Any, __: Any, output: Tensor) -> Tensor:
        return output - mw.gather_rows(output).mean(0) / 2

    handle = model.model.layers[0].register_forward_hook(centre)
    with torch.no_grad():
        model(input_ids=batch["input_ids"], labels=batch["labels"])
    loss: Tensor = model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
    handle.remove()
    return loss


PROGRAMS = {program.__name__: program for program in (contrastive, advantages, centred)}


def train(plan: Plan, program: str) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and the weights after a step of SGD per batch."""
    with Float64():
        model: Any = build("llama").double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        model, optimizer, loader = distribute(plan, model, optimizer, make_batches())
        losses = []
        for batch in loader:
            loss = PROGRAMS[program](model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, weights_of(model, plan)


def compare(ranks: list[Any], program: str) -> None:
    """float64: the plans differ in the order of sums only, by 1e-13; local rows alone differ by more than 1e-3."""
    losses, weights = train(None, program)
    for found, _ in ranks:
        assert found == pytest.approx(losses, rel=1e-10)
    assert worst(ranks[0][1], weights) < 1e-10


DP = {"dp": 2}


@pytest.mark.parametrize(
    ("program", "plan"),
    [
        ("contrastive", DP),
        ("contrastive", {**DP, "zero_stage": 1}),
        ("contrastive", {**DP, "zero_stage": 3}),
        ("advantages", {**DP, "zero_stage": 2}),
        ("centred", DP),
        ("centred", {**DP, "recompute": "full"}),
    ],
    ids=str,
)
def test_all_rows_of_the_batch(program: str, plan: dict[str, Any], pool2: Any) -> None:
    compare(pool2.run(train, plan, program), program)


@pytest.mark.parametrize(
    "plan", [{**DP, "tp": 2}, {**DP, "tp": 2, "sequence_parallel": True}, {"dp": 4, "zero_stage": 1}], ids=str
)
def test_all_rows_of_the_batch_on_two_axes(plan: dict[str, Any], pool4: Any) -> None:
    """With dp=4, batches of 3 rows and of 1 have fillers too."""
    compare(pool4.run(train, plan, "contrastive"), "contrastive")
