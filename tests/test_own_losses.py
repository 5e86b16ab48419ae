"""Losses of the user's own, and penalties beside a loss: exact by one call or one option, and a warning without."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.parallel.partial import _Warning
from support.exact import Float64, relative_difference
from support.logs import logged
from support.models import build, labels_for, tokens

DP = {"dp": 2}
LENGTH = 12


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    """A mean over the labels that count, unlike transformers' own."""
    targets = labels[:, 1:].reshape(-1)
    return F.cross_entropy(logits[:, :-1].reshape(len(targets), -1), targets, label_smoothing=0.3)


def next_words(batch: dict[str, Any]) -> Tensor:
    return (batch["labels"][:, 1:] != -100).sum()


def smoothed_loss_function(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    return smoothed(logits, labels)


class Regression(nn.Module):
    """Not of transformers; returns its loss alone, the mean over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.layer(x)[:, 0], y)


def make_batches(program: str) -> list[dict[str, Tensor]]:
    """Batches that do not divide, of rows with unlike numbers of labels."""
    if program == "rows":
        draws = torch.Generator().manual_seed(1)
        draw = lambda *shape: torch.randn(*shape, generator=draws, dtype=torch.float64)  # noqa: E731
        return [{"x": draw(n, 4), "y": draw(n)} for n in (3, 5)]
    return [{"input_ids": tokens(n, LENGTH, seed=n), "labels": labels_for(tokens(n, LENGTH, seed=n))} for n in (3, 4)]


def train(plan: dict[str, Any] | None, program: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of two batches, accumulated, and whole gradients."""
    torch.manual_seed(0)
    with Float64():
        model: Any = (Regression() if program == "rows" else build("llama")).double().train()
        if program == "labels":
            model.loss_function = smoothed_loss_function
        batches: Any = make_batches(program)
        if plan is not None:
            over: Any = {"call": None, "rows": "rows", "labels": next_words}[program]
            config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan), loss_averages_over=over, gather_logits=True)
            model, _, batches = mw.to_distributed(model, None, batches, config=config)
        losses = []
        for batch in batches:
            if program == "call":
                labels = batch.pop("labels")
                loss = smoothed(model(**batch).logits, labels)
                if plan is not None:
                    loss = mw.global_mean(model, loss, count=(labels[:, 1:] != -100).sum())
            else:
                output = model(**batch)
                loss = output if program == "rows" else output.loss
            (loss / 2).backward()
            losses.append(loss.item())
    return losses, {n: p.grad for n, p in model.named_parameters()} if plan is None else mw.full_gradients(model)


@pytest.mark.parametrize(
    ("program", "plan"),
    [
        ("call", DP),
        ("call", {**DP, "zero_stage": 1}),
        ("call", {**DP, "zero_stage": 3}),
        ("call", {"tp": 2, "sequence_parallel": True}),
        ("rows", DP),
        ("labels", {**DP, "zero_stage": 1}),
        ("labels", {**DP, "micro_batch_size": 1}),
    ],
    ids=str,
)
def test_a_loss_of_ones_own(program: str, plan: dict[str, Any], pool2: Any) -> None:
    """Row 17: by global_mean or loss_averages_over a loss is the mean of the global batch, in value and gradient."""
    losses, gradients = train(None, program)
    for rank in (ranks := pool2.run(train, plan, program)):
        # float64: only the order of sums differs. The mean of the ranks' means is off by more than 1e-3.
        assert rank[0] == pytest.approx(losses, rel=1e-12)
    for name, gradient in gradients.items():
        if "k_proj.bias" not in name:  # rounding only
            assert relative_difference(ranks[0][1][name], gradient) < 1e-10, name


def warnings_of(program: str, sizes: tuple[int, ...]) -> list[str]:
    """What is logged while a program trains on batches with so many rows, of which each has all its labels."""
    with logged(level=logging.WARNING) as said:
        config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**DP))
        batches = [{"input_ids": (ids := tokens(n, LENGTH, seed=n)), "labels": ids} for n in sizes]
        model, _, loader = mw.to_distributed(build("llama"), None, batches, config=config)
        for batch in loader:
            if program == "known":
                model(**batch).loss.backward()
                continue
            labels = batch.pop("labels")
            loss = smoothed(model(**batch).logits, labels)
            if program == "corrected":
                loss = mw.global_mean(model, loss, (labels[:, 1:] != -100).sum())
            loss.backward()
    return [message for message in said if "global_mean" in message]


@pytest.mark.parametrize(
    ("program", "sizes", "expected"),
    [("own", (4, 3, 3), 1), ("own", (4, 4), 0), ("known", (4, 3), 0), ("corrected", (4, 3), 0)],
    ids=str,
)
def test_an_uneven_batch_is_named_once(program: str, sizes: tuple[int, ...], expected: int, pool2: Any) -> None:
    """Rows 17 and 18: without the call or the option, a warning says what data parallelism makes of the loss."""
    first, second = pool2.run(warnings_of, program, sizes)
    assert len(first) == expected and not second  # one rank speaks
    if expected:
        assert "1 rows on rank 0; 2 rows on rank 1" in first[0] and "loss_averages_over='rows'" in first[0]


def option_for_a_known_loss() -> str:
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(), loss_averages_over="rows")
    try:
        mw.to_distributed(build("llama"), config=config)
    except mw.PlanError as error:
        return str(error)
    return ""


def test_options_that_do_not_fit() -> None:
    assert "is exact without the option; leave it out" in option_for_a_known_loss()
    with pytest.raises(mw.PlanError, match="must be 'rows', 'labels' or a callable"):
        mw.ToDistributedConfig(loss_averages_over="tokens")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is not distributed"):
        mw.global_mean(nn.Linear(2, 2), torch.ones(()), 1)
    model = mw.to_distributed(build("llama"), config=mw.ToDistributedConfig(plan=mw.ParallelPlan()))[0]
    with pytest.raises(ValueError, match=r"takes a scalar loss.*a tensor of shape \(2,\): pass loss.mean\(\)"):
        mw.global_mean(model, torch.ones(2), 1)
    assert mw.global_mean(model, loss := torch.ones(()), 3) is loss  # one process: nothing changes


def warnings_beside_the_models_loss(uses_own: bool) -> list[str]:
    """A program that passes labels, and trains on a loss that it computes from the logits."""
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(dp=2))
    model = mw.to_distributed(build("llama"), config=config)[0]
    ids = tokens(1 + dist.get_rank(), LENGTH)
    with logged() as found:
        for _ in range(2):
            outputs = model(input_ids=ids, labels=ids)
            (smoothed(outputs.logits, ids) if uses_own else outputs.loss).backward()
    return [text for text in found if "rows" in text]


@pytest.mark.parametrize("uses_own", [True, False])
def test_a_loss_beside_the_models_own_is_named(uses_own: bool, pool2: Any) -> None:
    """Row 17: the labels were passed, so the model computed a loss too, which the program left aside."""
    first, second = pool2.run(warnings_beside_the_models_loss, uses_own)
    assert len(first) == int(uses_own) and not second


def warnings_with_a_hook(plan: dict[str, Any], has_hook: bool, is_uneven: bool) -> list[str]:
    """A program that adds a loss on a layer's output, which a hook of its own keeps."""
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan))
    model: Any = mw.to_distributed(build("llama"), config=config)[0]
    kept: list[Tensor] = []
    if has_hook:
        model.model.layers[0].register_forward_hook(lambda module, args, output: kept.append(output))
    ids = tokens(1 + dist.get_rank() if is_uneven else 2, LENGTH)
    with logged() as found:
        for _ in range(2):
            loss = model(input_ids=ids, labels=ids).loss
            (loss + sum(x.pow(2).mean() for x in kept[-1:])).backward()  # of the last micro-batch
            kept.clear()
    return [text for text in found if "hook" in text]


@pytest.mark.parametrize(
    ("plan", "has_hook", "is_uneven", "expected"),
    [
        ({"tp": 2, "sequence_parallel": True}, True, False, "a forward hook on model.layers.0 sees this rank's part"),
        ({"tp": 2, "sequence_parallel": True}, False, False, ""),
        ({"tp": 2}, True, False, ""),  # between blocks the activations are whole
        (DP, True, True, ""),  # of this rank's rows, as is all that the model returns
        ({**DP, "micro_batch_size": 1}, True, False, "runs once for each micro-batch"),
    ],
    ids=str,
)
def test_hooks_that_see_a_part_are_named(
    plan: dict[str, Any], has_hook: bool, is_uneven: bool, expected: str, pool2: Any
) -> None:
    """Row 16: once on each rank."""
    for said in pool2.run(warnings_with_a_hook, plan, has_hook, is_uneven):
        assert len(said) == bool(expected) and all(expected in text for text in said)


def gradient_of_a_parameter(plan: dict[str, Any]) -> None:
    model = mw.to_distributed(build("llama"), config=mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan)))[0]
    ids = tokens(2, LENGTH)
    torch.autograd.grad(model(input_ids=ids, labels=ids).loss, [model.model.norm.weight])


@pytest.mark.parametrize("plan", [{"dp": 2}, {"tp": 2, "sequence_parallel": True}, {"dp": 2, "zero_stage": 2}])
def test_gradients_that_nothing_reduces_are_refused(plan: dict[str, Any], pool2: Any) -> None:
    """Row 20."""
    for _, message in pool2.run_expecting_error(gradient_of_a_parameter, plan):
        assert "torch.autograd.grad would give this rank's own gradient of model.norm.weight" in message


def warnings_of_a_penalty(plan: dict[str, Any], program: str) -> list[str]:
    """A program that trains with a penalty on the norms' weights, or that only reads and uses them."""
    _Warning.has_warned = False
    model: Any = build("qwen3").train()
    model = mw.to_distributed(model, config=mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan)))[0]
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    assert len({hash(p) for p in norms}) == len(norms) and norms[0].to("cpu") is norms[0]
    ids = tokens(2, LENGTH)
    with logged() as found:
        if program == "the base model":
            model.model(input_ids=ids).last_hidden_state.pow(2).mean().backward()
        for _ in range(2):
            loss = model(input_ids=ids, labels=ids).loss
            penalty = sum(((p - 0.5) ** 2).sum() for p in norms)
            (loss + (penalty if program == "a penalty" else penalty.item())).backward()
    return [text for text in found if "a gradient comes back" in text]


@pytest.mark.parametrize(
    ("plan", "program", "expected"),
    [
        ({"tp": 2}, "a penalty", "_norm.weight through the program's own operations"),
        ({"tp": 2, "sequence_parallel": True}, "a penalty", "norm.weight through the program's own operations"),
        ({"tp": 2, "sequence_parallel": True, "recompute": "full"}, "a penalty", "counts 2 times"),
        ({"tp": 2, "sequence_parallel": True, "recompute": "full"}, "a value", ""),
        ({"tp": 2, "sequence_parallel": True}, "the base model", ""),
        ({"tp": 2, "sequence_parallel": True, "micro_batch_size": 1}, "a value", ""),
        ({"dp": 2, "zero_stage": 1}, "a penalty", ""),
    ],
    ids=str,
)
def test_a_penalty_on_norms_is_named(plan: dict[str, Any], program: str, expected: str, pool2: Any) -> None:
    """Row 15: each rank of tp computes the whole penalty, and the parts of a norm's gradient are added up."""
    for said in pool2.run(warnings_of_a_penalty, plan, program):
        assert len(said) == bool(expected) and all(expected in text for text in said)
