"""Compare the methods of context parallelism for one plan: why the chosen one, and not the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from meshwright.planner.context_cost import exchanges, methods
from meshwright.planner.formatting import gib
from meshwright.planner.job.candidate import Candidate
from meshwright.planner.memory.peak import peak_memory
from meshwright.planner.search.search import Search
from meshwright.planner.time.step import StepModel


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
        both = exchanges(shape.runs[0], plan, seq_len=job.seq_len, element_bytes=job.activation_bytes)
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
