"""Two or four ranks that train, and how each of them should end."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

import meshwright as mw
from harness.programs import Outcome
from support.models import build, labels_for, tokens

TIMEOUT = 4.0  # seconds, instead of the two minutes of real programs


def trainer(plan: mw.ParallelPlan) -> Callable[..., None]:
    """A function that trains one step of a distributed model."""
    return trained(plan)[2]


def trained(plan: mw.ParallelPlan, model: Any = None) -> tuple[Any, Any, Callable[..., None]]:
    """A distributed model, its optimizer, and a function that trains one step."""
    model = build("llama") if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = mw.ToDistributedConfig(plan=plan, timeout_s=TIMEOUT)
    model, optimizer, _ = mw.to_distributed(model, optimizer, config=config)

    def step(length: int = 12) -> None:
        ids = tokens(2, length)
        model(input_ids=ids, labels=labels_for(ids)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


DP2 = mw.ParallelPlan(dp=2)
TP2 = mw.ParallelPlan(tp=2, sequence_parallel=True)


def check(outcome: Outcome, message: str, *, within: float) -> None:
    """The rank ended with an error of its own that says so, and without an abort."""
    assert outcome.code == 1, outcome
    assert outcome.after < within, outcome
    assert re.search(message, flat(outcome.output)), outcome.output
    assert "went on in silence" not in outcome.output


def flat(text: str) -> str:
    return text.replace("\n", " ")
