"""Compare training all weights with training adapters, on a frozen base in 16 bits or quantised."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshwright.errors import PlanError
from meshwright.planner.answers.cost import Budget, bill_dict, bill_of, days_text
from meshwright.planner.formatting import gib, grid, seconds
from meshwright.planner.job.adapters import Lora
from meshwright.planner.job.candidate import Job
from meshwright.planner.job.shapes import ModelShape
from meshwright.planner.search.search import Search


@dataclass(frozen=True, kw_only=True)
class TrainingWay:
    """One way to train a model, with its best plan.

    Args:
        job: the job.
        trained: number of trained parameters.
        found: the search for its plans; None if there is no legal plan.
    """

    job: Job
    trained: int
    found: Search | None

    @property
    def best(self) -> str:
        """The label of the first plan, or why there is none."""
        if self.found is None:
            return "no legal plan"
        if not self.found.choices:
            plan, memory = self.found.smallest
            return f"does not fit: {plan.label} needs {gib(memory.total)}"
        plan = self.found.choices[0].plan
        return plan.label + " *" * self.job.rounds_updates(plan)


def trainings(shape: ModelShape, job: Job, find: Callable[[Job], Search]) -> list[TrainingWay]:
    """Return the ways to train a model, beginning with all weights; the job's own adapters are among them.

    Args:
        shape: the model.
        job: a job with adapters.
        find: a function that searches the plans of a job.
    """
    assert job.lora is not None
    plain = Lora(rank=job.lora.rank)
    packed = job.lora if job.lora.quantised else Lora(rank=job.lora.rank, quantised="nf4")
    rows = []
    for lora in (None, plain, packed):
        each = dataclasses.replace(job, lora=lora)
        try:
            found: Search | None = find(each)
        except PlanError:
            found = None
        rows.append(TrainingWay(job=each, trained=trained_parameters(shape, lora), found=found))
    return rows


def trained_parameters(shape: ModelShape, lora: Lora | None) -> int:
    """Return the number of trained parameters."""
    if lora is None:
        return shape.parameters
    return int(sum(run.count * lora.elements(run) for run in shape.runs))


HEAD = ("trained", "parameters", "plan", "step", "tokens/s/GPU", "memory")


def training_rows(rows: Sequence[TrainingWay], budget: Budget | None) -> list[tuple[str, ...]]:
    """Return the cells of a table, its heading first."""
    has_price = budget is not None and budget.price is not None
    extra = ("days", "GPU-hours", *(["cost"] if has_price else [])) if budget else ()
    cells: list[tuple[str, ...]] = [(*HEAD, *extra)]
    for row in rows:
        line = [row.job.method, f"{row.trained / 1e6:,.1f} M", row.best]
        if row.found is None or not row.found.choices:
            cells.append((*line, *[""] * (3 + len(extra))))
            continue
        choice = row.found.choices[0]
        line += [seconds(choice.time.total), f"{choice.tokens_per_second:,.0f}", gib(choice.memory.total)]
        if budget is not None:
            bill = bill_of(row.found, budget)
            line += [days_text(bill.days, unit=False), f"{bill.gpu_hours:,.0f}"]
            line += [f"{bill.cost:,.0f}"] if bill.cost is not None else []
        cells.append(tuple(line))
    return cells


def training_text(rows: Sequence[TrainingWay], budget: Budget | None) -> str:
    """Return the table as text."""
    return "What is trained, with the first plan of each:\n\n" + grid(training_rows(rows, budget), left=3)


def training_dict(rows: Sequence[TrainingWay], budget: Budget | None) -> list[dict[str, object]]:
    """Return the rows as plain data."""
    found: list[dict[str, object]] = []
    for row in rows:
        entry: dict[str, object] = {"method": row.job.method, "trained_parameters": row.trained, "plan": None}
        if row.found is not None and row.found.choices:
            choice = row.found.choices[0]
            entry |= {
                "plan": choice.plan.label,
                "keeps_masters": not row.job.rounds_updates(choice.plan),
                "step_seconds": choice.time.total,
                "tokens_per_second_per_gpu": choice.tokens_per_second,
                "memory_bytes": choice.memory.total,
            }
            entry |= bill_dict(bill_of(row.found, budget)) if budget else {}
        else:
            entry["reason"] = row.best
        found.append(entry)
    return found
