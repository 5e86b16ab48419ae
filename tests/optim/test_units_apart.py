"""Parts of a model that only some ranks run in a pass, and layers whose operations another library counts.

Tolerance 1e-10 in float64: only the order of sums differs, and a head that misses a step is off by more than 1e-3.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader

import meshwright as mw
from meshwright.optim.runtime import runtime_of
from support.exact import Float64, relative_difference
from support.models import build, tokens

STEPS, ROWS, TASKS = 3, 4, 3


class TasksByRow(nn.Module):
    """A decoder with a head for each task, which runs on the rows of its task alone; deep heads look like layers."""

    def __init__(self, *, is_deep: bool) -> None:
        super().__init__()
        self.body = build("llama", num_hidden_layers=2).model
        size = self.body.config.hidden_size
        torch.manual_seed(5)
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(size, 8), nn.ReLU(), nn.Linear(8, 2 + task))
            if is_deep
            else nn.Linear(size, 2 + task)
            for task in range(TASKS)
        )

    def forward(self, input_ids: Tensor, task: Tensor | None = None) -> dict[str, Any]:
        if task is None:  # without values no row has a task, and the loss is a Python number
            task = input_ids[:, 1] % TASKS
        hidden = self.body(input_ids=input_ids).last_hidden_state[:, -1]
        losses = [
            F.cross_entropy(head(hidden[task == index]), input_ids[task == index, 0] % (2 + index), reduction="sum")
            for index, head in enumerate(self.heads)
            if (task == index).any()
        ]
        return {"loss": sum(losses) / len(input_ids)}


def rows() -> list[dict[str, Tensor]]:
    # A task of one rank alone, one of both ranks, one that comes late, and steps without each of them.
    tasks = [0, 0, 1, 0, 1, 1, 1, 1, 0, 2, 2, 2]
    ids = tokens(STEPS * ROWS, 10)
    return [{"input_ids": row, "task": torch.tensor(task)} for row, task in zip(ids, tasks, strict=True)]


def keep_products(_: object, operation: object, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed(kind: str) -> Any:
    model: Any = build("llama", num_hidden_layers=2)
    if kind == "checkpointed projections":  # by the program: torch runs their forward again without the module's hooks
        for layer in model.model.layers:
            projection = layer.mlp.down_proj
            projection.forward = functools.partial(checkpoint, projection.forward, use_reentrant=False)
        return model
    contexts = functools.partial(create_selective_checkpoint_contexts, keep_products)
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    return model


def train(kind: str, plan: str | None) -> tuple[list[float], dict[str, Tensor], list[str]]:
    """The losses, the weights, and which parameters are gathered before a pass."""
    with Float64():
        is_by_row = kind.endswith("heads")
        model: Any = (TasksByRow(is_deep=kind == "deep heads") if is_by_row else checkpointed(kind)).double()
        data = rows() if is_by_row else [{"input_ids": x, "labels": x} for x in tokens(STEPS * ROWS, 10)]
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader: Any = DataLoader(data, batch_size=ROWS)  # type: ignore[arg-type]
        apart: list[str] = []
        if plan is not None:
            averages = "rows" if is_by_row else None
            config = mw.ToDistributedConfig(plan=plan, loss_averages_over=averages, timeout_s=30)
            model, optimizer, loader = mw.to_distributed(model, optimizer, loader, config=config)
            if (weights := runtime_of(model).weights) is not None:
                names = {id(p): name for name, p in model.named_parameters()}
                apart = [names[id(p)] for flat in weights.flats if flat.is_apart for p in flat.parameters]
        model.train()
        losses = []
        for batch in loader:
            loss = model(**batch)["loss"]
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses, model.state_dict() if plan is None else mw.full_state_dict(model), apart


CASES = [
    ("deep heads", "dp2 zero3"),
    ("heads", "dp2 ga2 zero3"),
    ("heads", "cp2"),
    ("selective checkpoints", "dp2 zero3"),
    ("checkpointed projections", "dp2 zero3"),
]


def train_all() -> list[Any]:
    return [train(*case) for case in CASES]


def test_parts_that_some_ranks_leave_out_equal_one_process(pool2: Any) -> None:
    first, _ = pool2.run(train_all, timeout=120)
    expected = {kind: train(kind, None) for kind, _ in CASES}
    for (kind, plan), (losses, weights, apart) in zip(CASES, first, strict=True):
        assert losses == pytest.approx(expected[kind][0], rel=1e-10), plan
        for name, value in expected[kind][1].items():
            assert relative_difference(weights[name], value) < 1e-10, (plan, name)
        heads = {name for name in expected[kind][1] if name.startswith("heads")}
        assert set(apart) == (heads if "zero3" in plan else set())
