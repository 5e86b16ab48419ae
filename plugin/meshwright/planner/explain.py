"""Describe the result of a search: the plan, its cost, the reasons against others, and what would change it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright.errors import PlanError
from meshwright.planner.candidate import Candidate, Job
from meshwright.planner.cost import Budget, bill_dict, bill_line, bill_of
from meshwright.planner.formatting import gib, seconds
from meshwright.planner.hardware import Cluster
from meshwright.planner.memory import state_memory
from meshwright.planner.method_choice import method_reasons
from meshwright.planner.notes import batch_warning, expert_line, notes
from meshwright.planner.search import Choice, Search, search
from meshwright.planner.shapes import ModelShape

TIE = 0.03  # relative difference in time below which two plans tie, since runs of one plan differ as much
_GIB = 2**30
_GROWTH = 12  # doublings of the cluster to try if no plan fits
_DEVICES_A_SEQUENCE = 128  # largest number of devices that may share one sequence


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
        return self.plan is not None and dataclasses.replace(self.plan, accumulation=best.accumulation) == best


def ties(found: Search) -> int:
    """Return how many choices, counting the first, have times too close to the first's to rank."""
    first, job = found.choices[0], found.job
    close = (
        choice.time.total <= first.time.total * (1 + TIE)
        and job.rounds_updates(choice.plan) == job.rounds_updates(first.plan)
        for choice in found.choices
    )
    return sum(itertools.takewhile(bool, close))


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
    other = search(found.space(cluster, job), found.profile, top=1, budget=budget)
    if not other.choices:
        return Change(what=what, plan=None, speed=0.0)
    best = other.choices[0]
    return Change(what=what, plan=best.plan, speed=best.tokens_per_second / found.choices[0].tokens_per_second)


def no_fit(found: Search) -> PlanError:
    """Return the error for a search in which no plan fits, with the missing memory and the changes that would help."""
    plan, memory = found.smallest
    largest = sorted(memory.parts.items(), key=lambda item: -item[1])[:2]
    where = " and ".join(f"{name} {gib(value)}" for name, value in largest)
    return PlanError(
        f"no plan fits: the leanest plan, {plan.label}, needs {gib(memory.total)}, but may fill {gib(found.budget)} of "
        f"each {found.cluster.device.name}, so it needs {gib(memory.total - found.budget)} too much ({where}). "
        f"What would make one fit: {'; '.join(_remedies(found))}"
    )


def _remedies(found: Search) -> Iterator[str]:
    cluster, job = found.cluster, found.job

    def best(cluster: Cluster, job: Job, *, later: bool = False) -> str | None:
        if state_memory(found.shape, job) > cluster.gpus * found.budget:
            return None  # a search would find none either, but only after it has weighed every plan
        space = found.space(cluster, job, allow_future=later)
        try:
            other = search(space, found.profile, top=1, budget=found.budget)
        except PlanError:
            return None
        return other.choices[0].plan.label if other.choices else None

    if not found.allow_future and (label := best(cluster, job, later=True)):
        yield f"{label}, once this version can run it (--allow-future plans it)"
    later = False
    for gpus in _more_devices(cluster, job):
        more = dataclasses.replace(cluster, gpus=gpus)
        if label := best(more, job):
            yield f"--gpus {gpus} ({label})"
            break
        if not found.allow_future and not later and (label := best(more, job, later=True)):
            later = True
            yield f"--gpus {gpus} with --allow-future ({label})"
    shorter = job.seq_len
    while shorter % 2 == 0 and shorter > 256:
        shorter //= 2
        if best(cluster, dataclasses.replace(job, seq_len=shorter)):
            yield f"--seq-len {shorter}"
            break
    yield f"devices with {gib(found.smallest[1].total * found.cluster.device.memory / found.budget)} of memory"


def _more_devices(cluster: Cluster, job: Job) -> Iterator[int]:
    for doubling in range(1, _GROWTH):
        gpus = cluster.gpus << doubling
        gpus = -(-gpus // cluster.gpus_per_node) * cluster.gpus_per_node if gpus > cluster.gpus_per_node else gpus
        if gpus > job.global_batch * _DEVICES_A_SEQUENCE:
            return
        yield gpus


def text(found: Search, *, changed: Sequence[Change] | None = None, budget: Budget | None = None) -> str:
    """Return the whole answer as text.

    Args:
        found: the outcome of a search.
        changed: result of ``changes``; computed if not given.
        budget: tokens and price of a whole run; None to leave its time and cost out.

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
    precision += "" if job.optimizer == "adamw" else f", {job.optimizer}"
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
    for name, reason in found.pruned.items():
        axis, _, value = name.partition("=")
        same.setdefault((axis, reason), []).append(value)
    for (axis, reason), values in same.items():
        yield f"{axis}={','.join(values)}" if values[0] else axis, reason


def warnings(found: Search) -> list[str]:
    """Return the warnings about the job, each after an empty line."""
    warning = batch_warning(found.job)
    return ["", f"Warning: {warning}."] if warning else []


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


def as_dict(found: Search, *, changed: Sequence[Change] = (), budget: Budget | None = None) -> dict[str, object]:
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
                "plan": dataclasses.asdict(choice.plan),
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
        "warnings": list(filter(None, [batch_warning(found.job)])),
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


def grid(rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Return rows of cells as text, with the first ``left`` columns aligned left and the others right.

    Example:
        >>> print(grid([("a", "n"), ("bb", "10")]))
        a    n
        bb  10
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


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
