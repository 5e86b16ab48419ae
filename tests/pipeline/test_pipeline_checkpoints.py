"""One run that goes from four stages to data parallelism to stages with tensor parallelism, through checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import meshwright as mw
from support.models import SIZES, labels_for, tokens

PLANS: list[dict[str, Any]] = [
    {"pp": 4, "gradient_accumulation_steps": 4, "schedule": "zb-h1"},
    {"dp": 4},
    {"tp": 2, "sequence_parallel": True, "pp": 2, "gradient_accumulation_steps": 4},
]
STEPS, ROWS = 3, 8  # steps of each plan; rows of a step, over all ranks
# float32 has 24 bits, and each plan adds the same numbers in another order.
TOLERANCE = 1e-5


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows with different numbers of labels."""

    ids = tokens(5 * ROWS, 10)  # the last plan begins a second, differently shuffled epoch
    labels = labels_for(ids)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def train(plan: dict[str, Any], folder: Path, steps: int) -> list[float]:
    """Train further than the newest checkpoint of the folder, and save; each call is a program of its own."""
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": 4}))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader: Any = DataLoader(Rows(), batch_size=ROWS, shuffle=True)
    model, optimizer, loader = mw.to_distributed(model, optimizer, loader, plan=mw.ParallelPlan(**plan))
    loaded = mw.load_checkpoint(folder, model, optimizer, loader=loader, missing_ok=True)
    done = 0 if loaded is None or loaded.step is None else loaded.step
    end, losses = done + steps, []
    while done < end:
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            mw.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            done += 1
            if done == end:
                break
    mw.save_checkpoint(folder / str(done), model, optimizer, loader=loader, step=done)
    return losses


def test_a_run_changes_its_plan_twice(pool4: Any, tmp_path: Path) -> None:
    expected = train({}, tmp_path / "one", STEPS * len(PLANS))
    losses: list[float] = []
    for plan in PLANS:
        found = pool4.run(train, plan, tmp_path / "four", STEPS)
        assert all(one == found[0] for one in found)
        losses += found[0]
    assert expected[0] - expected[-1] > 0.1  # the weights change by far more than the tolerance
    off = max(abs(loss / wanted - 1) for loss, wanted in zip(losses, expected, strict=True))
    assert off <= TOLERANCE, off
