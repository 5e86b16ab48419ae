"""Draws a random program: one choice for each kind of choice in real training scripts."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from typing import Any

PLANS: dict[str, int] = {  # a plan in words -> number of processes
    "tp2": 2,
    "tp2+sp": 2,
    "dp2": 2,
    "dp2 zero1": 2,
    "dp2 zero2": 2,
    "dp2 zero3": 2,
    "dp2 tp2": 4,
    "dp2 tp2+sp zero1": 4,
    "dp2 tp2+sp zero3": 4,
    "tp4+sp": 4,
}

CHOICES: dict[str, dict[Any, int]] = {  # kind -> each choice and its weight
    "family": {"llama": 4, "qwen3": 2, "gemma2": 1, "phi3": 1, "olmo2": 1, "qwen2": 1},
    "head": {"causal": 6, "sequence": 1, "token": 1},
    "is_tied": {False: 3, True: 1},
    "kv_heads": {4: 3, 1: 1},
    "optimizer": {"adamw": 4, "sgd": 2, "adagrad": 1},
    "groups": {1: 1, 2: 2},
    "schedule": {"none": 2, "cosine": 1},
    "rows": {4: 3, 3: 1, 5: 1},  # per batch; an epoch's last batch has fewer
    "length": {12: 2, 11: 1},
    "batch": {"plain": 3, "padded": 2, "packed": 1},
    "loss": {"model": 6, "own counts": 1, "own": 1},
    "regulariser": {"none": 6, "norms": 1, "all": 1},
    "clipping": {"ours": 4, "none": 2, "torch, a list made before": 1},
    "accumulation": {"none": 4, "by hand": 2, "no_sync": 1, "plan": 2},
    "recompute": {False: 3, True: 1},
    "freezing": {"none": 4, "before": 2, "thaw": 2, "freeze": 1},
    "hook": {"none": 5, "gradient, before": 1, "gradient, after": 1, "activation": 1, "auxiliary loss": 1},
    "average": {"none": 5, "before": 1, "after": 1, "by hand": 1},
    "write": {"none": 6, "clamp": 1, "load_state_dict": 1, "gradient": 1},
    "reading": {"none": 5, "parameter count": 1, "weight norm": 1, "gradient norm": 1, "state_dict": 1, "copy": 1},
    "zeroing": {"optimizer": 3, "model": 1, "set_to_none=False": 1},
    "evaluation": {"none": 3, "loss": 1, "generate": 1},
    "resume": {"none": 4, "files": 1},
}


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program: one choice of each kind; see ``CHOICES``."""

    seed: int
    plan: str
    family: str
    head: str
    is_tied: bool
    kv_heads: int
    optimizer: str
    groups: int
    schedule: str
    rows: int
    length: int
    batch: str
    loss: str
    regulariser: str
    clipping: str
    accumulation: str
    recompute: bool
    freezing: str
    hook: str
    average: str
    write: str
    reading: str
    zeroing: str
    evaluation: str
    resume: str

    @staticmethod
    def drawn(seed: int) -> Program:
        """Return the program of a seed. Most choices are the usual one, so that few unusual choices occur together."""
        source = random.Random(seed)
        plan = source.choice(list(PLANS))
        chosen = {
            name: source.choices(list(weights), list(weights.values()))[0]
            if name in _ALWAYS or source.random() < 0.5
            else next(iter(weights))
            for name, weights in CHOICES.items()
        }
        if chosen["head"] != "causal":
            chosen |= {"batch": "padded", "loss": "model", "evaluation": "none", "is_tied": False}
        return Program(seed=seed, plan=plan, **chosen)

    @property
    def world_size(self) -> int:
        return PLANS[self.plan]

    def __str__(self) -> str:
        unusual = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if field.name in CHOICES and getattr(self, field.name) != next(iter(CHOICES[field.name]))
        ]
        return f"{self.seed} under {self.plan}: {', '.join(unusual) or 'plain'}"


_ALWAYS = ("family", "rows", "length", "optimizer")
