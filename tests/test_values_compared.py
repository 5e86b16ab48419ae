"""Ranks that train on other values than each other are named: tokens, optimizer settings, weights, random draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import meshwright as mw
from meshwright.errors import DivergenceError
from support.models import build, labels_for, tokens

EVERY = 4  # steps between two comparisons of the weights
TP2 = {"tp": 2}
SP2 = {"tp": 2, "sequence_parallel": True}
DP2 = {"dp": 2}
STEP_OF_FAULT = 6


class Run:
    """A model in training on this rank, and what a planted fault may change."""

    def __init__(self, plan: dict[str, Any], **overrides: Any):
        model = build("llama", **overrides)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan), check_replicas_every=EVERY)
        self.model, self.optimizer, _ = mw.to_distributed(model, optimizer, config=config)
        self.skips_step = self.skips_batch = self.keeps_gradients = False
        self.mask: Tensor | None = None
        self.shift_of_batches = 0
        self.dp_rank = dist.get_rank() // plan.get("tp", 1)

    def step(self, number: int) -> None:
        # Each data-parallel rank has rows of its own, the ranks of tp the same ones.
        ids = tokens(2, 12, seed=100 * (number + self.shift_of_batches) + self.dp_rank)
        self.model(input_ids=ids, labels=labels_for(ids), attention_mask=self.mask).loss.backward()
        mw.clip_grad_norm_(self.model, 1.0)
        if not self.skips_step:
            self.optimizer.step()
        if not self.keeps_gradients:
            self.optimizer.zero_grad()


def flip(parameter: Tensor, element: int, bit: int) -> None:
    """Flip a bit of a weight in memory, as a fault of the hardware does: torch's version counter does not see it."""
    word = parameter.detach().view(-1)[element : element + 1].view(torch.int32)
    word.data.bitwise_xor_(torch.tensor(1 << bit).to(torch.int32))


def other_tokens(run: Run) -> None:
    run.shift_of_batches = 50


def other_mask(run: Run) -> None:
    run.mask = torch.ones(2, 12, dtype=torch.int64).index_fill(1, torch.tensor([0]), 0)


def skipped_step(run: Run) -> None:
    run.skips_step = True


def kept_gradients(run: Run) -> None:
    run.keeps_gradients = True


def other_rate(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] *= 2


def other_decay(run: Run) -> None:
    run.optimizer.param_groups[0]["weight_decay"] = 0.5


def frozen(run: Run) -> None:
    run.model.model.norm.weight.requires_grad_(False)


def edited(run: Run) -> None:
    with torch.no_grad():
        run.model.model.norm.weight.add_(1e-3)


def flipped_norm(run: Run) -> None:
    flip(run.model.model.layers[1].input_layernorm.weight, 3, 0)


def flipped_matrix(run: Run) -> None:
    flip(run.model.model.layers[1].mlp.up_proj.weight, 5, 31)


def flipped_key(run: Run) -> None:
    flip(run.model.model.layers[0].self_attn.k_proj.weight, 40, 17)


def train_until_named(plan: dict[str, Any], fault: Callable[[Run], None], overrides: dict[str, Any]) -> tuple[int, str]:
    """Plant a fault on the last rank; the step in which this rank hears of it, and what it hears."""
    run = Run(plan, **overrides)
    for number in range(1, STEP_OF_FAULT + 2 * EVERY):
        if number == STEP_OF_FAULT and dist.get_rank() == dist.get_world_size() - 1:
            fault(run)
        try:
            run.step(number)
        except DivergenceError as error:
            return number, str(error)
    return 0, "trained to the end in silence"


NAMED = {
    # fault, plans, steps after which it is named at the latest, what the message says
    "other tokens": (other_tokens, [TP2, SP2], 0, r"input_ids: int64 \(2, 12\) with digest \w+ on rank 0"),
    "another mask": (other_mask, [TP2], 0, r"attention_mask: "),
    "a skipped optimizer step": (
        skipped_step,
        [DP2, TP2, {"dp": 2, "zero_stage": 1}],
        1,
        r"optimizer.step\(\): called 6 times on rank 0 .*; called 5 times on rank 1|optimizer step, step 6.*step 7",
    ),
    "gradients kept": (kept_gradients, [DP2, TP2], 1, r"zero_grad\(\): gradients cleared .* on rank 0"),
    "another learning rate": (
        other_rate,
        [DP2, TP2, {"dp": 2, "zero_stage": 3}],
        0,
        r"lr of the optimizer's group 0: 0.001 on rank 0 .*; 0.002 on rank 1.*last time in step 5",
    ),
    "another decay": (other_decay, [DP2], 0, r"weight_decay of the optimizer's group 0: 0.01 on rank 0"),
    "a parameter frozen": (frozen, [DP2], 0, r"requires_grad of model.norm.weight: True on rank 0"),
    "a weight edited": (edited, [DP2, SP2], EVERY, r"model.norm.weight: rank\(s\) 0 differ from rank\(s\) 1"),
    "a bit of a norm": (flipped_norm, [DP2, TP2, SP2], EVERY, r"layers.1.input_layernorm.weight: rank\(s\) 0 differ"),
    "a bit of a matrix": (flipped_matrix, [DP2], EVERY, r"layers.1.mlp.up_proj.weight: rank\(s\) 0 differ"),
}


@pytest.mark.parametrize("name, plan", [(name, plan) for name, case in NAMED.items() for plan in case[1]])
def test_a_fault_on_one_rank_is_named(name: str, plan: dict[str, Any], pool2: Any) -> None:
    """Rows 32 and 33: every rank hears what differs, on which ranks, and since when."""
    import re

    fault, _, steps, message = NAMED[name]
    for step, text in pool2.run(train_until_named, plan, fault, {}):
        assert STEP_OF_FAULT <= step <= STEP_OF_FAULT + steps, text
        assert re.search(message, text.replace("\n", " ")), text
