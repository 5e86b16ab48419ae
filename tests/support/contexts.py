"""Models under context parallelism, for its tests."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import meshwright as mw
from support.models import build, labels_for, tokens

METHODS: dict[str, dict[str, Any]] = {
    "gather": {"cp": 2},
    "ulysses": {"cp": 2, "context": "ulysses"},
    "ring": {"cp": 2, "context": "ring"},
}


def distributed(plan: dict[str, Any] | None = None, family: str = "llama", **traits: Any) -> Any:
    return mw.to_distributed(build(family, **traits), plan=mw.ParallelPlan(**(plan or {"cp": 2})))[0].train()


def batch(rows: int = 2, length: int = 13, seed: int = 0) -> dict[str, Tensor]:
    ids = tokens(rows, length, seed=seed)
    return {"input_ids": ids, "labels": labels_for(ids)}
