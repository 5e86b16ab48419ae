"""The figures of a distributed run, which its rank 0 saves for the proof and the summary."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from examples.demo.settings import Settings


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """Figures of a distributed run.

    Args:
        plan: the arguments of ``meshwright.ParallelPlan`` that were given or picked.
        losses: the loss of each step.
        tokens_per_s: the tokens per second of the median step, over all ranks.
        param_bytes_per_rank, optimizer_bytes_per_rank: the bytes on the rank that holds most.
    """

    plan: dict[str, Any]
    losses: list[float]
    tokens_per_s: float
    param_bytes_per_rank: int
    optimizer_bytes_per_rank: int

    def save(self, settings: Settings) -> None:
        _path(settings).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, settings: Settings) -> TrainResult:
        return cls(**json.loads(_path(settings).read_text()))


def _path(settings: Settings) -> Path:
    return settings.output / "train.json"
