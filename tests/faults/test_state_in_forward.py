"""State that a model's forward writes is that of one device, or an error names it before a step is taken."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import meshwright as mw
from support.exact import Float64, relative_difference
from support.logs import logged
from support.models import build, labels_for, tokens
from support.short_programs import Plan, distribute, losses_of, weights_of

DP2: dict[str, Any] = {"dp": 2}
ZERO1, ZERO3 = {**DP2, "zero_stage": 1}, {**DP2, "zero_stage": 3}
PIECES = {**DP2, "gradient_accumulation_steps": 2}
RECOMPUTED = {**DP2, "recompute": "full"}
PP2 = {"pp": 2, "gradient_accumulation_steps": 2}
ROWS, STEPS = 8, 3
AFTER, BY_ITSELF = ", after an evaluation", ", recomputed by the program"


class Activation(nn.Module):
    """Writes state whenever it runs; ``kind`` says which."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls = kind, 0
        self.norm = nn.BatchNorm1d(48) if "norm" in kind else None
        self.gain = nn.Parameter(torch.ones(48)) if kind == "decay" else None
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(48), persistent=False)
        self.register_buffer("table", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        count, mean, table = (self.get_buffer(name) for name in ("count", "mean", "table"))
        if self.norm is not None:
            return self.norm(x.transpose(1, 2)).transpose(1, 2)
        if self.kind == "count":
            count.add_(1)
            return x.tanh() * (1 + 1 / count)
        if self.kind == "mean":
            if self.training:
                self.mean = 0.9 * mean + 0.1 * x.detach().mean((0, 1))
            return x.tanh() - self.mean
        if self.gain is not None:
            with torch.no_grad():
                self.gain.mul_(0.9)
            return x.tanh() * self.gain
        if self.kind == "number":
            self.calls += 1
            return x.tanh() * (1 + 1 / self.calls)
        if x.shape[1] > len(table):  # a cache that follows the rows, and one that is written anew
            self.table = torch.arange(x.shape[1], dtype=x.dtype) / 10
        if self.kind == "saved":
            count.fill_(2)
        mean.fill_(2)
        return x.tanh() * mean + self.get_buffer("table")[: x.shape[1], None]


def model_of(kind: str) -> Any:
    model: Any = build("llama").double()
    if kind == "spectral":
        spectral_norm(model.lm_head)
    elif kind == "max_norm":
        model.model.embed_tokens.max_norm = 1.0
    else:
        model.model.layers[1].mlp.act_fn = Activation(kind.removesuffix(BY_ITSELF)).double()
    if kind.endswith(BY_ITSELF):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    if kind == "frozen norm":
        model.model.layers[1].mlp.act_fn.norm.eval()
    return model


def train(plan: Plan, kind: str, *, evaluates: bool = False) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and the state after a few steps; each data-parallel rank has rows of another length."""
    torch.manual_seed(0)
    with Float64():
        model = model_of(kind)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.2)
        batches: Any = []
        for step in range(STEPS):
            ids = tokens(ROWS, 10, seed=step)
            batches.append({"input_ids": ids, "labels": labels_for(ids)})
        model, optimizer, batches = distribute(plan, model, optimizer, batches)
        if evaluates:
            model.eval()
            with torch.no_grad():
                for _ in range(STEPS):
                    model(input_ids=tokens(2, 4))
            model.train()
        return losses_of(model, optimizer, batches), weights_of(model, plan)


@pytest.mark.parametrize(
    "kind, plan",
    [
        ("spectral", DP2),  # reading the head's weight once more would iterate once more
        ("spectral", ZERO1),
        ("spectral", ZERO3),
        ("count", DP2),
        ("count", ZERO3),
        ("table", PIECES),
        ("table", PP2),
        ("saved", PIECES),
        ("decay", DP2),  # writes a weight
        ("decay", ZERO1),
        ("saved", RECOMPUTED),
        ("count" + BY_ITSELF, RECOMPUTED),  # on one device it counts twice in a step, too
        ("frozen norm", DP2),
    ],
)
def test_state_that_does_not_follow_the_rows_is_that_of_one_device(kind: str, plan: Any, pool2: Any) -> None:
    losses, expected = train(None, kind)
    # float64, and only the order of sums differs. One power iteration more, or a count of two, gives more than 1e-3.
    for found_losses, found in pool2.run(train, plan, kind):
        assert found_losses == pytest.approx(losses, rel=1e-12)
        for name in expected.keys() & found.keys():
            assert relative_difference(found[name], expected[name]) < 1e-9, name


def refused(plan: dict[str, Any], kind: str) -> tuple[str, str]:
    """The kind and the text of the error; the model has been changed by nothing if it is a PlanError of the call."""
    try:
        train(plan, kind.removesuffix(AFTER), evaluates=kind.endswith(AFTER))
    except (mw.errors.PlanError, mw.errors.DivergenceError) as error:
        return type(error).__name__, str(error)
    return "", "trained in silence"


NORM = r"layers.1.mlp.act_fn.norm is a BatchNorm1d.*nn.LayerNorm.*layers.1.mlp.act_fn.norm\"\).eval\(\)"
MEAN = r"buffer model.layers.1.mlp.act_fn.mean: rank\(s\) 0 differ from rank\(s\) 1.*mw.gather_rows"
COUNT = r"forward changes model.layers.1.mlp.act_fn.count in each micro-batch.*model.layers.1.mlp.act_fn.count.copy_"


@pytest.mark.parametrize(
    "kind, plan, message",
    [
        ("norm", DP2, NORM),
        ("norm", {**DP2, "zero_stage": 3, "gradient_accumulation_steps": 2}, NORM),
        ("mean" + AFTER, DP2, r"in step 1:\s+" + MEAN),  # passes that do not train write nothing
        ("mean", ZERO3, MEAN),
        ("mean", PIECES, "forward changes model.layers.1.mlp.act_fn.mean in each micro-batch"),
        ("count", PIECES, COUNT),
        ("mean", PP2, "forward changes model.layers.1.mlp.act_fn.mean in each"),  # only the last stage sees it
        ("saved", PP2, r"act_fn.count, which only the stage of its layer.*persistent=False"),
        ("spectral", PIECES, r"forward changes lm_head.parametrizations.weight.0._u in each micro-batch"),
        ("spectral", {"tp": 2}, r"lm_head"),
        ("spectral", {"pp": 2}, r"lm_head"),
        ("count", RECOMPUTED, r"forward changes model.layers.1.mlp.act_fn.count, and recompute='full'"),
        ("decay", PIECES, "forward changes model.layers.1.mlp.act_fn.gain in each micro-batch"),
        # The weight changes between a forward and its backward, which autograd refuses with words of its own.
        ("decay", {**PP2, "schedule": "gpipe"}, "forward changes model.layers.1.mlp.act_fn.gain in each micro-batch"),
        ("decay", ZERO3, "forward writes the weight model.layers.1.mlp.act_fn.gain in place"),
        (
            "max_norm",
            DP2,
            r"over dp=2, but model.model.embed_tokens is an Embedding with max_norm=1.0, .* = None",
        ),
    ],
)
def test_state_that_follows_a_part_of_the_batch_is_named(kind: str, plan: Any, message: str, pool2: Any) -> None:
    """Every rank raises, in the first pass."""
    for error, text in pool2.run(refused, plan, kind):
        assert error and re.search(message, text.replace("\n", " ")), text


def test_what_layers_read_is_the_same_when_they_run_again() -> None:
    """A hook, an adapter or a mode that is there in forward alone; and keys that recomputed layers do not read."""
    model: Any = mw.to_distributed(build("llama"), plan=mw.ParallelPlan(recompute="full"))[0]
    ids = tokens(2, 8)
    handle = model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: 1.001 * output)
    loss = model(input_ids=ids, labels=ids).loss
    handle.remove()
    with pytest.raises(mw.PlanError, match=r"model.layers.1 computes something else .* Change it after loss.backward"):
        loss.backward()
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
    with pytest.raises(mw.PlanError, match=r"given past_key_values in training"):
        model(input_ids=ids, labels=ids, past_key_values=[ids])


def warned(plan: dict[str, Any]) -> str:
    with logged("meshwright") as lines:
        train(plan, "number")
    return "\n".join(lines)


def test_a_number_that_forward_counts_is_named_once(pool2: Any) -> None:
    """Whether numbers follow from a Python attribute cannot be known, so it is a warning."""
    for text in pool2.run(warned, PIECES):
        assert text.count("forward changes model.layers.1.mlp.act_fn.calls in each micro-batch") == 1, text
