"""Estimates the time and memory of plans that the user gives, whether they fit or not, and gives the answer as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshwright.errors import PlanError
from meshwright.planner.answers.cost import Budget, bill_line, bill_of
from meshwright.planner.answers.explain import error_band, heading, method_reasons, shares, table, warnings
from meshwright.planner.answers.notes import expert_line, notes
from meshwright.planner.context_cost import methods
from meshwright.planner.formatting import gib, grid, seconds
from meshwright.planner.job.candidate import Candidate
from meshwright.planner.job.shapes import ModelShape
from meshwright.planner.machine.hardware import HardwareProfile
from meshwright.planner.memory.peak import peak_memory, stage_memory
from meshwright.planner.search.search import HEADROOM, Choice, Search, choice_of, outcome
from meshwright.planner.search.space import Space, expert_reason
from meshwright.planner.time.step import StepModel


def check_plan(shape: ModelShape, plan: Candidate) -> None:
    """Raise a PlanError if the sizes of a model cannot be split as a plan says."""
    for uneven in shape.uneven(plan.tp):
        raise PlanError(f"{plan.label}: {uneven} of {shape.name} is not divisible by tp={plan.tp}")
    check_expert_ranks(shape, plan)
    count = plan.pp * plan.stages_per_rank
    if count > shape.most_stages:
        first = f", of which the first stage needs {shape.least_on_first}" if shape.least_on_first > 1 else ""
        raise PlanError(f"{plan.label}: {count} stages are more than the {shape.layers} layers of {shape.name}{first}")
    if plan.stages is not None and (len(plan.stages) != count or sum(plan.stages) != shape.layers):
        raise PlanError(
            f"{plan.label}: the stages must be {count} and hold the {shape.layers} layers of {shape.name} together"
        )
    if plan.stages is not None and plan.stages[0] < shape.least_on_first:
        raise PlanError(f"{plan.label}: the first stage of {shape.name} needs {shape.least_on_first} layers")
    if plan.cp > 1:
        if plan.context not in shape.traits.context:
            raise PlanError(f"{plan.label}: the attention of {shape.name} cannot use context={plan.context!r}")
        for context, ulysses, reason in methods(shape, plan.cp, plan.tp):
            if (context, ulysses) == (plan.context, plan.ulysses) and reason is not None:
                raise PlanError(f"{plan.label}: {reason}")
    if plan.recomputed_layers is not None and plan.recomputed_layers > shape.layers:
        raise PlanError(
            f"{plan.label}: {plan.recomputed_layers} recomputed layers are more than the {shape.layers} of {shape.name}"
        )


def check_expert_ranks(shape: ModelShape, plan: Candidate) -> None:
    """Raise a PlanError if ranks cannot share a model's experts as a plan says, or it has no estimate."""
    if plan.ep > 1 and plan.ep > shape.experts:
        have = f"{shape.experts} experts in a layer" if shape.experts else "no experts"
        raise PlanError(f"{plan.label}: {shape.name} has {have}, which {plan.ep} ranks cannot share; leave ep out")
    if (reason := expert_reason(plan, plan.ep)) is not None:
        raise PlanError(f"{plan.label}: {reason}")
    if shape.experts and plan.tp > 1 and not plan.sequence_parallel:
        raise PlanError(
            f"{plan.label}: {shape.name} has experts, which the planner estimates under tp with sequence parallelism "
            f"only; write tp{plan.tp}+sp"
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
        PlanError: a plan needs another number of devices, or cannot split the model, or has no estimate.
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
        if (reason := space.reason_against("tp", plan.tp)) is not None:
            raise PlanError(f"{plan.label}: {reason}")
        if (reason := space.too_narrow(plan.tp)) is not None:
            raise PlanError(f"{plan.label}: {reason}; write a smaller tp, or --precision bf16")
    model = StepModel(shape, cluster, profile.coefficients)
    weights = {plan: peak_memory(shape, plan, job) for plan in plans}
    choices = [choice_of(space, plan, model.step(plan, job), weights[plan]) for plan in plans]
    return outcome(
        space, profile, budget, choices, weights, binding={}, considered=len(weights), simulated=len(weights)
    )


def own_text(found: Search, *, best: Search | None, budget: Budget | None) -> str:
    """Return the answer about given plans.

    Args:
        found: the given plans.
        best: the search for the fastest plan that fits; None if there is none.
        budget: tokens and price of a whole run; None to leave its time and cost out.
    """
    lines = [heading(found), "", table(found, 1), *(f"   {note}" for note in notes(found))]
    for index, choice in enumerate(found.choices):
        lines += ["", *_about(found, choice)]
        if budget is not None:
            lines.append(f"  whole run: {bill_line(bill_of(found, budget, index=index))}")
    lines += ["", *_against(found, best), "", error_band(found), *warnings(found)]
    return "\n".join(lines)


def _about(found: Search, choice: Choice) -> Iterator[str]:
    plan, memory = choice.plan, choice.memory
    is_fit = memory.total <= found.budget
    verdict = "fits" if is_fit else f"does not fit, by {gib(memory.total - found.budget)}"
    yield f"{plan.label}: {verdict}: needs {gib(memory.total)} of the {gib(found.budget)} that a plan may fill"
    yield f"  time: {shares(choice.time.parts, choice.time.total, 'ms')}"
    yield f"  memory: {shares(memory.parts, memory.total, 'GiB')}"
    if plan.pp > 1:
        names = ("weights", "gradients", "optimizer", "activations", "logits", "working", "communication", "slack")
        rows: list[tuple[str, ...]] = [("  rank of pp", *names, "total")]
        for stage in range(plan.pp):
            held = stage_memory(found.shape, plan, found.job, stage)
            parts = (f"{held.parts[name] / 2**30:.1f}" for name in names)
            rows.append((f"  {stage}", *parts, gib(held.total)))
        yield grid(rows)
    if found.shape.experts:
        yield f"  {expert_line(found, plan)}"
    for line in method_reasons(found, plan):
        yield f"  {line}"


def _against(found: Search, best: Search | None) -> Iterator[str]:
    if best is None or not best.choices:
        yield "No plan fits among those that this version can run."
        return
    fastest, given = best.choices[0], found.choices[0]
    if fastest.plan == given.plan:
        yield f"{given.plan.label} is the fastest plan that fits."
        return
    ratio = given.time.total / fastest.time.total
    yield (
        f"The fastest plan that fits is {fastest.plan.label}: {seconds(fastest.time.total)} per step, {ratio:.2f}x the "
        f"tokens per second of {given.plan.label}."
    )
