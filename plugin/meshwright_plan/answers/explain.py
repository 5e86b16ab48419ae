"""Describe the result of a search: the plan, its cost, the reasons against others, and what would change it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright_plan.answers.cost import Budget, bill_dict, bill_line, bill_of
from meshwright_plan.answers.notes import expert_line, masters_line, no_fit, notes, warnings_of
from meshwright_plan.answers.sweep import TrainingWay, training_dict, training_text
from meshwright_plan.context_cost import exchanges, methods
from meshwright_plan.formatting import gib, grid, seconds
from meshwright_plan.job.candidate import Candidate, Job
from meshwright_plan.job.shapes import ModelShape
from meshwright_plan.machine.hardware import Cluster
from meshwright_plan.memory.peak import peak_memory, stage_memory
from meshwright_plan.search.search import TIE, Choice, Search, search
from meshwright_plan.time.step import StepModel

__all__ = ["TIE", "no_fit"]  # other modules read them here
_GIB = 2**30


def method_reasons(found: Search, plan: Candidate) -> Iterator[str]:
    """Yield a line on the method of a plan, and one on each other method; nothing without context parallelism.

    Args:
        found: the outcome of the search.
        plan: one of its plans.
    """
    if plan.cp == 1:
        return
    shape, job = found.shape, found.job
    model = StepModel(shape, found.cluster, found.profile.coefficients)
    best = model.step(plan, job)

    def sent(plan: Candidate) -> str:
        both = exchanges(shape.runs[0], plan, job)
        size = sum(x.count * x.bytes * (x.ranks - 1) / x.ranks if x.kind != "send" else x.count * x.bytes
                   for phase in both for x in phase)  # fmt: skip
        return f"a rank sends {size / 2**20:,.0f} MiB per layer and micro-batch"

    share = best.context / best.total
    yield f"{_name(plan)}: {sent(plan)}, which takes {share:.1%} of the step beside attention"
    for context, ulysses, reason in methods(shape, plan.cp, plan.tp):
        other = dataclasses.replace(plan, context=context, ulysses=ulysses)
        if other == plan:
            continue
        if reason is not None:
            yield f"{_name(other)}: {reason}"
            continue
        time, memory = model.step(other, job), peak_memory(shape, other, job).total
        fits = "" if memory <= found.budget else f", and needs {gib(memory)}, more than the budget"
        longer = time.total / best.total
        parts = {"attention": time.attention - best.attention, "communication": time.context - best.context}
        cause = max(parts, key=lambda name: abs(parts[name]))
        because = f", for the most part by {cause}" if longer > 1.005 else ""
        yield f"{_name(other)}: {sent(other)}; the step takes {longer:.2f} times as long{because}{fits}"


def _name(plan: Candidate) -> str:
    return plan.context if plan.ulysses is None else f"{plan.context}-{plan.ulysses}"


@dataclass(frozen=True, kw_only=True)
class Change:
    """The best plan for a changed cluster or job.

    Args:
        what: the change.
        plan: the best plan after the change; None if no plan fits.
        speed: tokens per second, relative to the best plan without the change.
    """

    what: str
    plan: Candidate | None
    speed: float

    def is_same(self, best: Candidate) -> bool:
        """Return whether the plan is ``best``, apart from the number of micro-batches."""
        steps = best.gradient_accumulation_steps
        return self.plan is not None and self.plan.copy(gradient_accumulation_steps=steps) == best


def ties(found: Search) -> int:
    """Return how many choices, counting the first, have times too close to the fastest's to rank."""
    first, job = found.choices[0], found.job
    alike = (c for c in found.choices if job.rounds_updates(c.plan) == job.rounds_updates(first.plan))
    fastest = min(choice.time.total for choice in alike)
    close = (
        choice.time.total <= fastest * (1 + TIE) and job.rounds_updates(choice.plan) == job.rounds_updates(first.plan)
        for choice in found.choices
    )
    return max(1, sum(itertools.takewhile(bool, close)))  # with --simple, the first may be slower than a tie


def changes(found: Search) -> list[Change]:
    """Return the best plans for twice the batch, half the link bandwidth, and twice the memory of a device."""
    cluster, job = found.cluster, found.job
    double = dataclasses.replace(job, global_batch=2 * job.global_batch)
    link, half = "interconnect between nodes", dataclasses.replace(cluster, slow_link=cluster.slow / 2)
    if cluster.nodes == 1:
        link, half = "links between devices", dataclasses.replace(cluster, fast_link=cluster.fast / 2)
    larger = dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, memory=2 * cluster.device.memory))
    cases = (
        ("twice the global batch", cluster, double, found.budget),
        (f"half the {link}", half, job, found.budget),
        ("twice the memory of a device", larger, job, 2 * found.budget),
    )
    return [_change(found, *case) for case in cases]


def _change(found: Search, what: str, cluster: Cluster, job: Job, budget: float) -> Change:
    space = dataclasses.replace(found.space, cluster=cluster, job=job)
    other = search(space, found.profile, top=1, budget=budget, explains=False, within=found.within or None)
    if not other.choices:
        return Change(what=what, plan=None, speed=0.0)
    best = other.choices[0]
    return Change(what=what, plan=best.plan, speed=best.tokens_per_second / found.choices[0].tokens_per_second)


def text(
    found: Search,
    *,
    changed: Sequence[Change] | None = None,
    budget: Budget | None = None,
    compared: Sequence[TrainingWay] = (),
) -> str:
    """Return the whole answer as text.

    Args:
        found: the outcome of a search.
        changed: result of ``changes``; computed if not given.
        budget: tokens and price of a whole run; None to leave its time and cost out.
        compared: the ways to train the model, for a table of them.

    Raises:
        PlanError: no plan fits.
    """
    if not found.choices:
        raise no_fit(found)
    best = found.choices[0]
    lines = [
        heading(found),
        "",
        table(found, ties(found)),
        *(f"   {note}" for note in notes(found)),
        *masters_line(found),
        *(["", training_text(compared, budget)] if compared else []),
        "",
        *([f"Whole run: {bill_line(bill_of(found, budget))}"] if budget else []),
        f"Time of the first: {shares(best.time.parts, best.time.total, 'ms')}",
        f"Memory of a device: {shares(best.memory.parts, best.memory.total, 'GiB')}",
        f"Budget {gib(found.budget)}; {found.considered:,} legal plans, {found.weighed:,} weighed, "
        f"{found.simulated:,} simulated.",
        *([expert_line(found, best.plan)] if found.shape.experts else []),
        *_of_method(found),
        "",
        "Not chosen:",
        *(f"  {name}: {reason}" for name, reason in reasons(found)),
        "",
        "What would change the answer:",
        *(_change_line(best, change) for change in (changes(found) if changed is None else changed)),
        "",
        error_band(found),
        *warnings(found),
    ]
    return "\n".join(lines)


def heading(found: Search) -> str:
    """Return the line about the model, the cluster and the job."""
    cluster, job = found.cluster, found.job
    nodes = f" in {cluster.nodes} nodes" if cluster.nodes > 1 else ""
    precision = "" if job.precision == "bf16" else f", matrix multiplications in {job.precision}"
    precision += "" if job.lora is None else f", {job.method}"
    precision += "" if job.optimizer == "adamw" else f", {job.kind.name}"
    return (
        f"{found.shape.name}: {parameters_text(found.shape)} in {job.dtype}{precision}, "
        f"{cluster.gpus} x {cluster.device.name}{nodes}, {job.global_batch} sequences of {job.seq_len} tokens per step"
    )


def parameters_text(shape: ModelShape) -> str:
    """Return the number of parameters in words and, of a model with experts, that of the active ones."""
    active = f" ({shape.active_parameters / 1e9:,.2f} B active)" if shape.experts else ""
    return f"{shape.parameters / 1e9:,.2f} B parameters{active}"


def _of_method(found: Search) -> list[str]:
    """Return the lines on the method of context parallelism of the first plan, if it has one."""
    lines = [f"  {line}" for line in method_reasons(found, found.choices[0].plan)]
    return ["", f"Method of cp={found.choices[0].plan.cp}:", *lines] if lines else []


def reasons(found: Search) -> Iterator[tuple[str, str]]:
    """Yield (axis values, the reason against them), first for legal values that do not fit."""
    for name, (plan, memory) in found.binding.items():
        yield name, f"does not fit: its leanest plan, {plan.label}, needs {gib(memory.total)}"
    same: dict[tuple[str, str], list[str]] = {}
    for name, reason in found.space.pruned.items():
        axis, _, value = name.partition("=")
        same.setdefault((axis, reason), []).append(value)
    for (axis, reason), values in same.items():
        yield f"{axis}={','.join(values)}" if values[0] else axis, reason


def warnings(found: Search) -> list[str]:
    """Return the warnings about the model, the job and the device, each after an empty line."""
    return [line for warning in warnings_of(found) for line in ("", f"Warning: {warning}.")]


def error_band(found: Search) -> str:
    """Return the line about the error band of the estimates."""
    profile, first = found.profile, found.choices[0].time.total
    kind = "points" if profile.points else "runs"
    source = (
        f"{profile.rows} measured {kind}" if profile.rows else "the catalogue alone, nothing measured on this cluster"
    )
    low, high = first / (1 + profile.band), first * (1 + profile.band)
    return (
        f"Error band: nine of ten runs should take {seconds(low)} to {seconds(high)} (±{profile.band:.0%}; "
        f"{source}). Plans within {TIE:.0%} of each other are ties."
    )


def as_dict(
    found: Search, *, changed: Sequence[Change] = (), budget: Budget | None = None, compared: Sequence[TrainingWay] = ()
) -> dict[str, object]:
    """Return the whole answer as plain data, for ``--json``."""
    return {
        "model": {
            "name": found.shape.name,
            "parameters": found.shape.parameters,
            "active_parameters": found.shape.active_parameters,
            "experts": found.shape.experts,
            "roles": found.shape.roles,
        },
        "cluster": {
            "device": found.cluster.device.name,
            "gpus": found.cluster.gpus,
            "gpus_per_node": found.cluster.gpus_per_node,
        },
        "job": dataclasses.asdict(found.job) | {"dtype": found.job.dtype},
        "plans": [
            {
                "label": choice.plan.label,
                "plan": choice.plan.plan.changed if choice.plan.runs_today else dataclasses.asdict(choice.plan),
                "micro_batch_size": choice.plan.micro_batch_size,
                "gradient_accumulation_steps": choice.plan.gradient_accumulation_steps,
                "runs_today": found.runs_today(choice.plan),
                "tie": index < ties(found),
                "fits": choice.memory.total <= found.budget,
                "keeps_masters": not found.job.rounds_updates(choice.plan),
                "step_seconds": choice.time.total,
                "time": choice.time.parts,
                "tokens_per_second_per_gpu": choice.tokens_per_second,
                "mfu": choice.mfu,
                "memory_bytes": choice.memory.total,
                "memory": choice.memory.parts,
            }
            | ({"run": bill_dict(bill_of(found, budget, index=index))} if budget else {})
            for index, choice in enumerate(found.choices)
        ],
        **({"trainings": training_dict(compared, budget)} if compared else {}),
        "budget_bytes": found.budget,
        "considered": found.considered,
        "weighed": found.weighed,
        "fitting": found.fitting,
        "simulated": found.simulated,
        "not_chosen": dict(reasons(found)),
        "context_methods": list(method_reasons(found, found.choices[0].plan)) if found.choices else [],
        "changes": [
            {"what": change.what, "plan": change.plan and change.plan.label, "speed": change.speed}
            for change in changed
        ],
        "notes": list(notes(found)),
        "warnings": warnings_of(found),
        "band": found.profile.band,
        "profile": {"name": found.profile.name, "rows": found.profile.rows},
    }


def table(found: Search, tied: int) -> str:
    """Return the table of plans. The first ``tied`` are marked as ties, and those without masters by a star."""
    head = ("", "plan", "step", "tokens/s/GPU", "MFU", "memory", "compute", "comm", "bubble", "other")
    rows: list[tuple[str, ...]] = [head]
    for index, choice in enumerate(found.choices):
        parts, total = choice.time.parts, choice.time.total
        compute = sum(parts[name] for name in ("matmul", "attention", "elementwise", "recompute"))
        moved = sum(parts[name] for name in ("tensor", "context", "experts", "data"))
        rows.append(
            (
                "=" if 0 < index < tied else str(index + 1),
                choice.plan.label + " *" * found.job.rounds_updates(choice.plan),
                seconds(total),
                f"{choice.tokens_per_second:,.0f}",
                f"{choice.mfu:.1%}",
                gib(choice.memory.total),
                *(f"{value / total:.0%}" for value in (compute, moved, parts["bubble"])),
                f"{(total - compute - moved - parts['bubble']) / total:.0%}",
            )
        )
    return grid(rows, left=2)


def _change_line(best: Choice, change: Change) -> str:
    if change.plan is None:
        return f"  {change.what}: no plan fits"
    plan = "the same plan" if change.is_same(best.plan) else change.plan.label
    return f"  {change.what}: {plan}, {change.speed:.2f}x the tokens per second"


def shares(parts: dict[str, float], total: float, unit: str) -> str:
    """Return the parts of a total that are above half a percent, the largest first, in "ms" or "GiB"."""
    scale = 1e-3 if unit == "ms" else _GIB
    shown = sorted(((name, value) for name, value in parts.items() if value > 0.005 * total), key=lambda p: -p[1])
    return ", ".join(f"{name} {value / scale:,.{0 if unit == 'ms' else 1}f} {unit}" for name, value in shown)


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
