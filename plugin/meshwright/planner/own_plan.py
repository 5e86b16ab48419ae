"""Estimate the time and memory of plans that the user gives, whether they fit or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.errors import PlanError
from meshwright.plan.schedule import check, chunks_of
from meshwright.planner.candidate import Candidate, Job
from meshwright.planner.context_cost import methods
from meshwright.planner.hardware import HardwareProfile
from meshwright.planner.memory import peak_memory
from meshwright.planner.search import HEADROOM, Search, choice_of, outcome
from meshwright.planner.shapes import ModelShape
from meshwright.planner.space import Space
from meshwright.planner.time import StepModel


def candidate_of(fields: Mapping[str, Any], job: Job) -> Candidate:
    """Return the candidate for the fields of a ``ParallelPlan`` and a batch.

    Args:
        fields: all fields of a ``ParallelPlan``.
        job: the job, whose batch is split over dp and into micro-batches.

    Raises:
        PlanError: the batch cannot be split as the plan says.

    Example:
        >>> candidate_of({"dp": 2, "zero_stage": 1, "micro_batch_size": 2}, Job(seq_len=8, global_batch=16)).label
        'dp2 zero1 mb2x4'
    """
    dp, zero, pp = fields.get("dp", 1), fields.get("zero_stage", 0), fields.get("pp", 1)
    if fields.get("ep", 1) > 1:
        raise PlanError(f"ep={fields['ep']} spreads experts, which the planner does not estimate; leave ep out")
    rows, rest = divmod(job.global_batch, dp)
    if rest:
        raise PlanError(
            f"--global-batch {job.global_batch} is not divisible by dp={dp}; use a multiple of dp, or another dp"
        )
    parts = fields.get("gradient_accumulation_steps") or 1
    micro = fields.get("micro_batch_size") or max(1, rows // parts)
    if rows % micro or (parts > 1 and rows % parts):
        raise PlanError(
            f"a rank's {rows} sequences (--global-batch {job.global_batch} over dp={dp}) cannot be split into "
            f"micro-batches of {micro if rows % micro else rows / parts:g}; use a divisor of {rows}"
        )
    schedule = fields.get("schedule") or "1f1b"
    stages = fields.get("stages")
    plan = Candidate(
        replicate=1 if zero else dp,
        shard=dp if zero else 1,
        tp=fields.get("tp", 1),
        sequence_parallel=bool(fields.get("sequence_parallel")) and fields.get("tp", 1) > 1,
        cp=fields.get("cp", 1),
        context=(fields.get("context") or "gather") if fields.get("cp", 1) > 1 else "gather",
        ulysses=fields.get("ulysses"),
        pp=pp,
        schedule=schedule if pp > 1 else "1f1b",
        chunks=chunks_of(schedule, fields.get("chunks")) if pp > 1 else 1,
        stages=tuple(stages) if stages else None,
        micro_batch=micro,
        accumulation=rows // micro,
        zero_stage=zero,
        recompute=fields.get("recompute") or "none",
        recomputed=fields.get("recomputed_layers"),
        reduce_dtype=fields.get("reduce_dtype"),
    )
    if pp > 1:
        try:
            check(plan.schedule, pp, plan.chunks, plan.accumulation)
        except ValueError as error:
            raise PlanError(f"{plan.label}: {error}") from None
    return plan


def check_plan(shape: ModelShape, plan: Candidate) -> None:
    """Raise a PlanError if the sizes of a model cannot be split as a plan says."""
    for name in ("heads", "ffn"):
        if (size := getattr(shape, name)) % plan.tp:
            raise PlanError(f"{plan.label}: {name}={size} of {shape.name} is not divisible by tp={plan.tp}")
    count = plan.pp * plan.chunks
    if count > shape.layers:
        raise PlanError(f"{plan.label}: {count} stages are more than the {shape.layers} layers of {shape.name}")
    if plan.stages is not None and (len(plan.stages) != count or sum(plan.stages) != shape.layers):
        raise PlanError(
            f"{plan.label}: the stages must be {count} and hold the {shape.layers} layers of {shape.name} together"
        )
    if plan.cp > 1:
        if plan.context not in shape.traits.context:
            raise PlanError(f"{plan.label}: the attention of {shape.name} cannot use context={plan.context!r}")
        for context, ulysses, reason in methods(shape, plan.cp, plan.tp):
            if (context, ulysses) == (plan.context, plan.ulysses) and reason is not None:
                raise PlanError(f"{plan.label}: {reason}")
    if plan.recomputed is not None and plan.recomputed > shape.layers:
        raise PlanError(
            f"{plan.label}: {plan.recomputed} recomputed layers are more than the {shape.layers} of {shape.name}"
        )


def weigh(
    space: Space, profile: HardwareProfile | None, plans: Sequence[Candidate], *, budget: float | None = None
) -> Search:
    """Return the given plans as the choices of a search, in the given order, whether they fit or not.

    Args:
        space: the model, the devices and the job.
        profile: the coefficients (default: the catalogue's).
        plans: the plans.
        budget: memory per device that a plan may fill, in bytes (default: 90 % of the device's memory).

    Raises:
        PlanError: a plan needs another number of devices, or cannot split the model.
    """
    shape, cluster, job = space.shape, space.cluster, space.job
    profile = profile or HardwareProfile(name="catalogue")
    budget = budget if budget is not None else HEADROOM * cluster.device.memory
    for plan in plans:
        if plan.world_size != cluster.gpus:
            raise PlanError(
                f"{plan.label} needs {plan.world_size} devices, but --gpus is {cluster.gpus}; write --gpus "
                f"{plan.world_size}, or a plan of {cluster.gpus} devices"
            )
        check_plan(shape, plan)
    model = StepModel(shape, cluster, profile.coefficients)
    weights = {plan: peak_memory(shape, plan, job) for plan in plans}
    choices = [choice_of(space, plan, model.step(plan, job), weights[plan]) for plan in plans]
    return outcome(
        space, profile, budget, choices, weights, binding={}, considered=len(weights), simulated=len(weights)
    )
