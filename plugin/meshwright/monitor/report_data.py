"""The figures of runs as the report's script draws them: a column of values for each figure, and what to mark."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from meshwright.monitor.figures import PARTS
from meshwright.monitor.records import RunRecords, finite_number, number
from meshwright.monitor.run_folders import LoggedRun

GIB = 2**30
_RANKS = 8  # ranks with a line of their own; of more ranks, the two at the ends have one
_NUMBERS = 60_000  # numbers in a page, about six bytes each
_OWN_NUMBERS = 30_000  # of the program's own
_WINDOW = 20  # lines from whose losses the next one may differ
_SPIKE = 6.0  # standard deviations of these losses that are a spike
_FEWEST = 0.1  # of the loss that a spike is above their mean

Data = dict[str, Any]  # what JSON can hold, by name


def report_data(runs: Sequence[LoggedRun]) -> list[Data]:
    """Return the figures of each run."""
    columns = [_columns(run.records.steps) for run in runs]
    total = sum(len(run.records.steps) * len(found) for run, found in zip(runs, columns, strict=True))
    size = max(1, -(-total // _NUMBERS))  # lines that become one point
    found = [_run_data(run, own, size) for run, own in zip(runs, columns, strict=True)]
    curves = [curve for data in found for curve in data["values"].values()]
    for curve in curves:
        size = max(1, -(-len(curve["step"]) * 2 * len(curves) // _OWN_NUMBERS))
        curve |= {name: _thinned(numbers, size) for name, numbers in curve.items()}
    return found


def by_rank(step: Mapping[str, Any], name: str) -> dict[int, float]:
    """Return a figure of each rank in a line."""
    return {int(rank): float(value) for rank, value in (step.get(name) or {}).items()}


def shown_ranks(last: Mapping[int, float]) -> list[int]:
    """Return the ranks with a line of their own, the one with the largest last value first."""
    order = sorted(last, key=lambda rank: (-last[rank], rank))
    return order if len(order) <= _RANKS else [order[0], order[-1]]


def estimated_memory(record: Mapping[str, Any]) -> float | None:
    """Return the estimated bytes of the fullest rank; None without an estimate."""
    stages = record.get("estimated_memory") or []
    return max((sum(filter(None, map(number, parts.values()))) for parts in stages), default=None)


def alerts(steps: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, str]]:
    """Yield (step, what) for losses and norms that are not finite, and for losses far above those before them."""
    last: deque[float] = deque(maxlen=_WINDOW)
    for step in steps:
        for name in ("loss", "norm"):
            value = number(step.get(name))
            if value is not None and not math.isfinite(value):
                yield step["step"], f"{name} is {value}"
        loss = finite_number(step.get("loss"))
        if loss is None:
            continue
        if len(last) == _WINDOW:
            mean = sum(last) / _WINDOW
            spread = math.sqrt(sum((value - mean) ** 2 for value in last) / _WINDOW)
            if loss > mean + max(_SPIKE * spread, _FEWEST * abs(mean)):
                yield step["step"], f"the loss jumps from {mean:.4g} to {loss:.4g}"
        last.append(loss)


def _columns(steps: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """Return the figures that at least one line has: name -> a value for each line."""
    names = ("loss", "norm", "lr", "tokens_per_second", "seconds_per_step", "mfu", "behind", "waited", "rank_load")
    found = {name: [number(step.get(name)) for step in steps] for name in names}
    for name, of, unit in (("memory", "peak", GIB), ("busy", "busy", 1.0), ("read", "read", 1.0)):
        ranks = [{rank: value / unit for rank, value in by_rank(step, of).items()} for step in steps]
        found[name] = [max(values.values(), default=None) for values in ranks]
        last = next((values for values in reversed(ranks) if values), {})
        for rank in sorted(shown_ranks(last)):
            found[f"{name}/{rank}"] = [values.get(rank) for values in ranks]
    parts = [step.get("parts") or {} for step in steps]
    for part in PARTS:
        found[f"part/{part}"] = [number(values.get(part)) for values in parts]
    loads = [(step.get("expert_load") or {}).values() for step in steps]
    found["expert_load"] = [max(filter(None, map(number, values)), default=None) for values in loads]
    return {name: values for name, values in found.items() if any(value is not None for value in values)}


def _run_data(run: LoggedRun, columns: Mapping[str, Sequence[float | None]], size: int) -> Data:
    steps, records = run.records.steps, run.records
    times = [number(step.get("time")) for step in steps]
    since = min((time for time in [*times, *(number(one.get("time")) for one in records.runs)] if time), default=None)
    axes: dict[str, Sequence[float | None]] = {
        "step": [float(step["step"]) for step in steps],
        "tokens": _sums(number(step.get("tokens")) for step in steps),
        "hours": [None if time is None or since is None else (time - since) / 3600 for time in times],
    }
    return {
        "name": run.name,
        "points": size,
        "axes": {name: _thinned(values, size) for name, values in axes.items()},
        "columns": {name: _thinned(values, size) for name, values in columns.items()},
        "values": _values(records),
        "marks": _marks(records),
        "estimates": _estimates(records),
    }


def _sums(values: Iterable[float | None]) -> list[float | None]:
    total, found = 0.0, []
    for value in values:
        total += value or 0.0
        found.append(total)
    return [value if total else None for value in found]


def _thinned(values: Sequence[float | None], size: int) -> list[float | None]:
    """Return the mean of each ``size`` neighbours, in six digits; None for a mean that JSON cannot hold."""
    groups = [[v for v in values[at : at + size] if v is not None] for at in range(0, len(values), size)]
    means = [statistics.fmean(group) if group else None for group in groups]
    return [None if mean is None or not math.isfinite(mean) else float(f"{mean:.6g}") for mean in means]


def _values(records: RunRecords) -> dict[str, Data]:
    """Return the program's own numbers: name -> their steps and their values."""
    found: dict[str, Data] = {}
    for record in records.values:
        for name, text in (record.get("values") or {}).items():
            if (value := finite_number(text)) is not None:
                own = found.setdefault(name, {"step": [], "value": []})
                own["step"].append(record["step"])
                own["value"].append(value)
    return found


def _marks(records: RunRecords) -> list[Data]:
    starts = [(start["first_step"], "start", f"resumed after step {start['first_step']}") for start in records.runs]
    faults = [(step, "fault", str(fault.get("what"))[:400]) for fault in records.faults
              if (step := number(fault.get("step"))) is not None]  # fmt: skip
    warned = [(step, "alert", what) for step, what in alerts(records.steps)][:50]
    found = [*(start for start in starts if start[0]), *faults, *warned]
    return [{"step": step, "kind": kind, "text": text} for step, kind, text in sorted(found, key=lambda mark: mark[0])]


def _estimates(records: RunRecords) -> list[Data]:
    """Return the estimate of each start: the steps from which and up to which it holds, and its figures."""
    found = []
    firsts = [start["first_step"] for start in records.runs]
    for index, start in enumerate(records.runs):
        peak = estimated_memory(start)
        found.append(
            {
                "from": start["first_step"],
                "to": firsts[index + 1] if index + 1 < len(firsts) else None,
                "seconds": finite_number(start.get("estimated_seconds")),
                "memory": None if peak is None else finite_number(peak / GIB),
                "band": finite_number(start.get("band")),
            }
        )
    return found
