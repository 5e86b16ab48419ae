"""The answer about plans that the user gave, as text."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.planner.answers.cost import Budget, bill_line, bill_of
from meshwright.planner.answers.explain import error_band, heading, shares, table, warnings
from meshwright.planner.answers.notes import expert_line, notes
from meshwright.planner.formatting import gib, grid, seconds
from meshwright.planner.memory.peak import stage_memory
from meshwright.planner.search.method_choice import method_reasons
from meshwright.planner.search.search import Choice, Search


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
