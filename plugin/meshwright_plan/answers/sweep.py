"""Compares the best plans of several jobs: values of one setting, sizes of a cluster, and training of all weights or of
adapters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from meshwright.errors import PlanError
from meshwright_plan.answers.cost import Bill, Budget, bill_dict, bill_of, days_text
from meshwright_plan.answers.notes import warnings_of
from meshwright_plan.formatting import gib, grid, seconds
from meshwright_plan.job.adapters import Lora
from meshwright_plan.job.candidate import Job
from meshwright_plan.job.shapes import ModelShape
from meshwright_plan.machine.devices import matmul_peak
from meshwright_plan.machine.hardware import Cluster
from meshwright_plan.search.search import Choice, Search

_STEPS = 8  # sizes of the cluster to try for each doubling
_DOUBLINGS = 6  # doublings to try, from the size at which devices would have to run at their peak


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """The best plan for one value of a setting.

    Args:
        value: the value.
        found: the outcome of the search; None if there is no legal plan.
        reason: why no plan is shown; None if there is one.
        bill: what a whole training run takes; None without a number of tokens.
    """

    value: object
    found: Search | None = None
    reason: str | None = None
    bill: Bill | None = None

    @property
    def best(self) -> Choice | None:
        """The best plan; None without one."""
        return self.found.choices[0] if self.found and self.found.choices else None

    @property
    def speed(self) -> float:
        """Tokens per second per device; 0 without a plan."""
        return self.best.tokens_per_second if self.best else 0.0


def row_of(value: object, find: Callable[[], Search], budget: Budget | None) -> SweepRow:
    """Return the row for one value.

    Args:
        value: the value of the setting.
        find: a function that searches with this value.
        budget: the tokens and the price; None to leave the bill out.
    """
    try:
        found = find()
    except PlanError as error:
        return SweepRow(value=value, reason=str(error).split(". ")[0])
    if not found.choices:
        return SweepRow(value=value, found=found, reason=str(no_fit_of(found)))
    return SweepRow(value=value, found=found, bill=bill_of(found, budget) if budget else None)


def no_fit_of(found: Search) -> str:
    """Return why no plan fits, without the changes that would help."""
    plan, memory = found.smallest
    return f"no plan fits: the leanest, {plan.label}, needs {gib(memory.total)} of {gib(found.budget)}"


def sweep_text(name: str, rows: Sequence[SweepRow]) -> str:
    """Return the rows as a table.

    Args:
        name: the option whose values are compared.
        rows: at least one row.
    """
    has_bill = any(row.bill for row in rows)
    has_price = any(row.bill and row.bill.cost is not None for row in rows)
    relative = "efficiency" if name == "gpus" else "relative"
    head = [name, "plan", "step", "tokens/s/GPU", relative, "MFU", "memory"]
    head += ["days", "GPU-hours"] * has_bill + ["cost"] * has_price
    base = next((row.speed for row in rows if row.speed), 0.0)
    cells = [tuple(head)]
    for row in rows:
        if (best := row.best) is None:
            cells.append((_number(row.value), "-", *[""] * (len(head) - 2)))
            continue
        line = [
            _number(row.value), best.plan.label, seconds(best.time.total), f"{best.tokens_per_second:,.0f}",
            f"{row.speed / base:.0%}", f"{best.mfu:.1%}", gib(best.memory.total),
        ]  # fmt: skip
        if row.bill is not None:
            line += [days_text(row.bill.days, unit=False), f"{row.bill.gpu_hours:,.0f}"]
            line += [f"{row.bill.cost:,.0f}"] if row.bill.cost is not None else []
        cells.append(tuple(line))
    reasons = [f"  {name}={_number(row.value)}: {row.reason}" for row in rows if row.reason is not None]
    return "\n".join([grid(cells, left=2), *(["", "Without a plan:", *reasons] if reasons else [])])


def sweep_dict(name: str, rows: Sequence[SweepRow]) -> list[dict[str, object]]:
    """Return the rows as plain data."""
    found: list[dict[str, object]] = []
    for row in rows:
        entry: dict[str, object] = {name: row.value, "reason": row.reason}
        if row.found is not None:
            entry["warnings"] = warnings_of(row.found)
        if (best := row.best) is not None:
            entry |= {
                "plan": best.plan.label,
                "step_seconds": best.time.total,
                "tokens_per_second_per_gpu": best.tokens_per_second,
                "mfu": best.mfu,
                "memory_bytes": best.memory.total,
            }
        if row.bill is not None:
            entry |= bill_dict(row.bill)
        found.append(entry)
    return found


def smallest_cluster(
    find: Callable[[Cluster, Job], Search], cluster: Cluster, job: Job, budget: Budget, days: float, flops: float
) -> list[SweepRow]:
    """Return rows for clusters of ascending size, the last of which is the first that is fast enough, if any is.

    Args:
        find: a function that searches for a cluster and a job.
        cluster: the device and the nodes; its number of devices is not used.
        job: the job.
        budget: the tokens and the price.
        days: the days that the run may take.
        flops: floating-point operations of forward and backward for one token.
    """
    if not days > 0:
        raise PlanError(f"--days={days} must be above zero")
    least = budget.tokens * flops / (matmul_peak(cluster.device, job.precision) * days * 86400)
    rows: list[SweepRow] = []
    for gpus in _sizes(least, cluster.gpus_per_node):
        sized = dataclasses.replace(cluster, gpus=gpus)
        rows.append(row_of(gpus, partial(find, sized, job), budget))
        made = rows[-1].bill
        if made is not None and made.days <= days:
            break
    return rows


def is_met(rows: Sequence[SweepRow], days: float) -> bool:
    """Return whether the last of the rows of ``smallest_cluster`` is fast enough."""
    return bool(rows) and rows[-1].bill is not None and rows[-1].bill.days <= days


def _sizes(least: float, per_node: int) -> Iterator[int]:
    """Yield sizes of a cluster from the least on: powers of two inside a node, then whole nodes.

    Example:
        >>> list(_sizes(3.0, 8))[:7]
        [4, 8, 16, 24, 32, 40, 48]
    """
    size = 1
    while size < per_node:
        if size >= least:
            yield size
        size *= 2
    nodes, most = 1, max(least, per_node) * 2**_DOUBLINGS
    while nodes * per_node <= most:
        if nodes * per_node >= least:
            yield nodes * per_node
        nodes += max(1, 2 ** (nodes.bit_length() - 1) // _STEPS)


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)


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
