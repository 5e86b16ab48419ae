"""The program that torchrun starts on two ranks: trains in float8, and writes what rank 0 has compared as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from support.float8 import run

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
PLANS: dict[str, dict[str, Any]] = {
    "tp2+sp": {"tp": 2, "sequence_parallel": True},
    "dp2 zero1": {"dp": 2, "zero_stage": 1},
    "dp2 zero3": {"dp": 2, "zero_stage": 3},
    "pp2": {"pp": 2},
    "cp2": {"cp": 2},
}
GATHERED = "dp2 zero3, gathered in float8"
LENGTH, STEPS = 8, 20
LIMIT = 1e-6  # of a loss, with sums in float64


def main(output: Path) -> None:
    """Train with each recipe under each plan, and write the comparisons with one device to ``output``."""
    torch.set_num_threads(1)
    records = []
    for recipe in RECIPES:
        case = (recipe, "lm_head", LENGTH, STEPS)
        exact, plain = (run(None, *case, is_exact=is_exact) for is_exact in (True, False))
        # torchao gathers weights in float8 where a weight has one scale.
        plans = PLANS | ({GATHERED: PLANS["dp2 zero3"]} if recipe == "tensorwise" else {})
        for name, plan in plans.items():
            in_64, _, scales = run(plan, *case, gathers=name == GATHERED)
            losses = run(plan, *case, is_exact=False, gathers=name == GATHERED)[0]
            # A rank of pp has the scales of its layers.
            is_equal = all(set(found) <= set(exact[2][role]) and found for role, found in scales.items())
            is_equal &= max(abs(a - b) for a, b in zip(in_64, exact[0], strict=True)) <= LIMIT
            worst = max(abs(a - b) for a, b in zip(losses, plain[0], strict=True))
            records.append((recipe, name, is_equal, worst))
            if os.environ["RANK"] == "0":
                print(*records[-1], flush=True)
                output.write_text(json.dumps(records))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
