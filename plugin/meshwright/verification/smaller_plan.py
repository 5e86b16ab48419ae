"""Shrinks a plan for a cluster to a plan for one machine."""

from __future__ import annotations

import contextlib
import dataclasses
import math

from meshwright.errors import PlanError
from meshwright.plan.config import ParallelPlan


def smaller_plan(plan: ParallelPlan, processes: int) -> ParallelPlan:
    """Return the plan or, if it needs more than ``processes`` processes, a smaller plan of the same kind.

    Every axis and option of the plan stays; the sizes of the axes shrink, dp and pp first. dp and pp shrink to 2, and
    tp to its largest divisor that fits or, if none fits, to its smallest divisor above 1. So the result may need more
    than ``processes`` processes: at least 4 with dp and tp, and 14 with dp and tp=7. etp shrinks to 2, and ep becomes
    the largest size that these axes allow. The model of a verification has fewer layers, so stages of given lengths
    become even.

    Example:
        >>> smaller_plan(ParallelPlan(dp=64, tp=8, sequence_parallel=True), 4).tp
        2
    """
    # One of the few layers of a verification is recomputed, and the others are not.
    plan = dataclasses.replace(plan, stages=None, recomputed_layers=plan.recomputed_layers and 1)
    if plan.world_size <= processes:
        return plan
    small = {name: min(plan.sizes[name], 2) for name in ("dp", "pp")}
    most = processes // math.prod(small.values())
    sizes = [size for size in range(2, plan.tp + 1) if plan.tp % size == 0] or [1]
    small["tp"] = max((size for size in sizes if size <= most), default=sizes[0])
    smaller = dataclasses.replace(
        plan,
        ep=1,
        etp=1,
        gradient_accumulation_steps=min(plan.gradient_accumulation_steps, 2),
        micro_batch_size=plan.micro_batch_size and min(plan.micro_batch_size, 2),
    ).resized(small)
    # As before, the ranks that share experts are those of one tp group, or of several.
    largest = smaller.world_size if plan.ep * plan.etp > plan.tp else smaller.tp
    for etp in (2, 1) if plan.etp > 1 else (1,):
        for ep in range(min(plan.ep, largest // etp), 0, -1):
            with contextlib.suppress(PlanError):
                return dataclasses.replace(smaller, ep=ep, etp=etp)
    return smaller
