"""``gather_rows``: what a program computes from all rows of a batch is that of one device, in value and gradient."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import meshwright as mw
from support.exact import Float64, relative_difference
from support.models import build, labels_for, tokens
from support.short_programs import Plan, train, worst
from support.tiers import crossing

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


def run(plan: Plan, program: str) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and the weights after a step of SGD per batch."""
    with Float64():
        model: Any = build("llama").double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        return train(model, plan, make_batches(), optimizer, loss_of=PROGRAMS[program])


def compare(ranks: list[Any], program: str) -> None:
    """float64: the plans differ in the order of sums only, by 1e-13; local rows alone differ by more than 1e-3."""
    losses, weights = run(None, program)
    for found, _ in ranks:
        assert found == pytest.approx(losses, rel=1e-10)
    assert worst(ranks[0][1], weights) < 1e-10


DP = {"dp": 2}


@pytest.mark.parametrize(
    ("program", "plan"),
    [
        ("contrastive", DP),
        crossing("contrastive", {**DP, "zero_stage": 1}),
        ("contrastive", {**DP, "zero_stage": 3}),
        ("advantages", {**DP, "zero_stage": 2}),
        ("centred", DP),
        ("centred", {**DP, "recompute": "full"}),
    ],
    ids=str,
)
def test_all_rows_of_the_batch(program: str, plan: dict[str, Any], pool2: Any) -> None:
    compare(pool2.run(run, plan, program), program)


@pytest.mark.parametrize(
    "plan",
    [crossing({**DP, "tp": 2}), {**DP, "tp": 2, "sequence_parallel": True}, crossing({"dp": 4, "zero_stage": 1})],
    ids=str,
)
def test_all_rows_of_the_batch_on_two_axes(plan: dict[str, Any], pool4: Any) -> None:
    """With dp=4, batches of 3 rows and of 1 have fillers too."""
    compare(pool4.run(run, plan, "contrastive"), "contrastive")


def with_logits(plan: Plan) -> dict[str, Tensor]:
    """Whole gradients of a loss on the gathered logits, beside the model's own."""

    def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
        outputs = model(**batch)
        pooled = mw.gather_rows(outputs.logits.mean(1))
        return outputs.loss + (pooled @ pooled.T).logsumexp(1).mean()

    with Float64():
        model: Any = build("llama").double()
        ids = tokens(3, LENGTH)
        return train(model, plan, [{"input_ids": ids, "labels": ids}], loss_of=loss_of, gather_logits=True)[1]


@pytest.mark.parametrize("plan", [{**DP, "cp": 2}, crossing({**DP, "tp": 2})], ids=str)
def test_logits_of_all_rows(plan: dict[str, Any], pool4: Any) -> None:
    """float64: 1e-10 for other orders of sums."""
    found, expected = pool4.run(with_logits, plan)[0], with_logits(None)
    assert all(relative_difference(found[n], x) < 1e-10 for n, x in expected.items() if "k_proj.bias" not in n)


def refused(program: str) -> None:
    plan = {"a micro-batch": {**DP, "micro_batch_size": 1}, "a pipeline": {"pp": 2}}.get(program, DP)
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan), gather_logits=True)
    model: Any = mw.to_distributed(build("llama"), config=config)[0]
    ids = tokens(2, LENGTH)
    if program == "a micro-batch":
        model.model.layers[0].register_forward_hook(lambda _, __, x: x - mw.gather_rows(x).mean(0))
        model(input_ids=ids, labels=ids)
    elif program == "a pipeline":
        mw.gather_rows(model(input_ids=ids, labels=ids).loss.reshape(1))
    elif program == "unlike rows":
        mw.gather_rows(torch.ones(2, 3 + dist.get_rank()))
    elif program == "two models":
        other = mw.to_distributed(build("llama"), config=mw.ToDistributedConfig(plan=mw.ParallelPlan(tp=2)))[0]
        assert len(mw.gather_rows(torch.ones(2), model)) == 4 and len(mw.gather_rows(torch.ones(2), other)) == 2
        mw.gather_rows(torch.ones(2))
    else:
        mw.gather_rows(torch.ones(()), model)


@pytest.mark.parametrize(
    ("program", "kind", "expected"),
    [
        ("a micro-batch", "PlanError", "needs all rows of the batch at a time, but the plan dp2 zero0 mb1 runs"),
        ("a pipeline", "PlanError", "Use a plan with pp=1, without micro-batches"),
        ("unlike rows", "ValueError", r"float32 rows of shape \(3,\) on rank 0 of dp; .* \(4,\) on rank 1"),
        ("two models", "ValueError", r"different data-parallel ranks: \[0, 1\]; .*mw.gather_rows\(x, model\)"),
        ("no rows", "ValueError", "whose first dim has this rank's rows, not a tensor without dims"),
    ],
    ids=["a micro-batch", "a pipeline", "unlike rows", "two models", "no rows"],
)
def test_rows_that_cannot_be_gathered_are_refused(program: str, kind: str, expected: str, pool2: Any) -> None:
    for name, message in pool2.run_expecting_error(refused, program):
        assert name == kind and re.search(expected, message)


def test_one_process_has_all_rows() -> None:
    assert mw.gather_rows(x := torch.ones(2)) is x
