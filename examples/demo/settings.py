"""The settings of one demo run, written to a file that every process of the run reads."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The model, the corpus, the plan and the output folder of a run.

    Args:
        output: folder of everything that the demo writes.
        device: "cpu" or "cuda".
        dp, tp: data- and tensor-parallel size; None for both to have the planner pick a plan.
        processes: number of processes if the planner picks the plan.
        steps: number of optimizer steps.
        proof_steps: number of first steps that one process repeats.
        batch_size: rows per step over all processes.
        seq_length: tokens per row.
        corpus_files: number of source files in the corpus; None for all.
        learning_rate: highest learning rate of the schedule.
        max_norm: global norm to which gradients are clipped.
    """

    output: Path
    device: str = "cpu"
    dp: int | None = None
    tp: int | None = None
    processes: int = 4
    steps: int = 120
    proof_steps: int = 5
    batch_size: int = 8
    seq_length: int = 256
    corpus_files: int | None = None
    vocab_size: int = 8192
    hidden_size: int = 320
    intermediate_size: int = 864
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    max_norm: float = 1.0
    seed: int = 0

    @property
    def world_size(self) -> int:
        return self.processes if self.plan is None else self.plan["dp"] * self.plan["tp"]

    @property
    def plan(self) -> dict[str, Any] | None:
        """The arguments of ``meshwright.ParallelPlan``; None to have the planner pick a plan."""
        if self.dp is None and self.tp is None:
            return None
        dp, tp = self.dp or 1, self.tp or 1
        return {"dp": dp, "tp": tp, "sequence_parallel": tp > 1, "zero_stage": 1 if dp > 1 else 0}

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_length

    @property
    def path(self) -> Path:
        """The file that holds these settings."""
        return self.output / "settings.json"

    @property
    def checkpoint(self) -> Path:
        """Folder of the checkpoint at the end of the distributed run."""
        return self.output / "checkpoint"

    @property
    def gradients(self) -> Path:
        """Folder of the distributed run's whole gradients, which is deleted after the proof."""
        return self.output / "gradients"

    def gradient_file(self, step: int) -> Path:
        return self.gradients / f"step-{step}.safetensors"

    def save(self) -> None:
        """Write the settings to ``path`` for the training processes."""
        self.output.mkdir(parents=True, exist_ok=True)
        values = dataclasses.asdict(self) | {"output": str(self.output)}
        self.path.write_text(json.dumps(values, indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Settings:
        """Read the settings that ``save`` wrote."""
        values = json.loads(Path(path).read_text())
        return cls(**values | {"output": Path(values["output"])})
