"""Models built in every way, seeded as a user's script does it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import meshwright as mw
from support.models import FAMILIES, SIZES

PLANS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2+sp": {"tp": 2, "sequence_parallel": True},
    "dp2+zero1": {"dp": 2, "zero_stage": 1},
    "dp2xtp2+sp+zero1": {"dp": 2, "tp": 2, "sequence_parallel": True, "zero_stage": 1},
}
HOWS: dict[str, Callable[[], Any]] = {
    "real": contextlib.nullcontext,
    "deferred": mw.deferred_init,
    "meta": lambda: torch.device("meta"),
}


def make(family: str = "llama", *, how: str = "real", seed: int = 5, **overrides: Any) -> Any:
    """As a user's script does it: seed, then build; no value is touched afterwards."""
    config_class, model_class, traits = FAMILIES[family]
    torch.manual_seed(seed)
    with HOWS[how]():
        return model_class(config_class(**{**SIZES, **traits, **overrides}))


def distribute(model: Any, optimizer: Any = None, *, weights: Any = None, **plan: Any) -> Any:
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan), weights=weights)
    return mw.to_distributed(model, optimizer, config=config)[0]


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(actual[name], expected[name])]
    assert not different
    assert all(actual[name].dtype == expected[name].dtype for name in expected)


def write_checkpoint(folder: Path, kind: str, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """What transformers writes, of weights that no seed of these tests draws."""
    model = make(seed=77, **overrides).to(dtype)
    model.save_pretrained(folder, max_shard_size="20KB" if kind == "index" else "5GB")
    names = {"single": "model.safetensors", "index": "model.safetensors.index.json", "directory": ""}
    return folder / names[kind]
