"""The data of the report: columns for its plots, and its tiles and tables."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from meshwright.monitor.figures import PARTS, clock
from meshwright.monitor.records import RunRecords, finite_number, number
from meshwright.plan.text import format_plan
from meshwright_plan.formatting import memory, seconds
from meshwright_tools.report.run_folders import LoggedRun

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


_STRAGGLERS = 8  # rows of the table of slow ranks of each run
_EVENTS = 30  # rows of the table of events of each run
_TIMES = "\u00d7"
# Settings that are not read as a setting of training.
_NO_SETTINGS = {"output_dir", "logging_dir", "run_name", "report_to", "optim_args"}


def header(runs: Sequence[LoggedRun]) -> dict[str, Any]:
    """Return the title, the plan and the tiles of the run that has logged last."""
    newest = max(runs, key=lambda run: _last_time(run.records))
    found = newest.records
    run = found.runs[-1] if found.runs else {}
    last = found.steps[-1] if found.steps else {}
    steps = f"{last.get('step', 0):,}" + (f" of {run['max_steps']:,}" if run.get("max_steps") else "")
    speeds, mfus = (_known(found, name)[1:] for name in ("tokens_per_second", "mfu"))
    speed = statistics.median_high(speeds) if speeds else number(last.get("tokens_per_second"))
    peaks = by_rank(last, "peak")
    loss, left = number(last.get("loss")), number(last.get("left"))
    ranks, of_device = run.get("ranks"), run.get("device", "unknown")
    tiles = [
        ("Step", steps, f"{clock(left)} left" if left else "the last line"),
        ("Loss", "unknown" if loss is None else f"{loss:.4f}", "of the last line"),
        ("Tokens/s", "unknown" if speed is None else f"{speed:,.0f}", ""
         if speed is None else f"median; {speed / ranks:,.0f} per device" if ranks else "median"),
        ("MFU", f"{statistics.median_high(mfus):.1%}" if mfus else "unknown",
         "median; model FLOPs / peak FLOPs" if mfus else f"the peak of the device ({of_device}) is not known"),
        ("Memory", memory(max(peaks.values())) if peaks else "unknown",
         f"rank {max(peaks, key=lambda rank: peaks[rank])}, the fullest" if peaks else ""),
    ]  # fmt: skip
    mesh = f" {_TIMES} ".join(f"{name}={size}" for name, size in (run.get("mesh") or {}).items() if size and size > 1)
    beside = f"{newest.name}, the newest of {len(runs)} runs" if len(runs) > 1 else ""
    count = run.get("parameters")
    job = f"{parameters(count)} on {ranks or 1} {_TIMES} {of_device}" if count else newest.name
    return {
        "name": str(run.get("model", "A run")),
        "job": "; ".join(filter(None, (job, beside))),
        "label": plan_words(run.get("plan")),
        "why": "; ".join(filter(None, (mesh, str(run.get("why", ""))))),
        "tiles": tiles,
    }


def parameters(count: int) -> str:
    """Return a number of parameters as text.

    Example:
        >>> parameters(22_176), parameters(8_030_000_000)
        ('22,176 parameters', '8.03 B parameters')
    """
    units = ((1e9, " B"), (1e6, " M"))
    size, unit = next(((size, unit) for size, unit in units if count >= size), (1, ""))
    return f"{count / size:,.4g}{unit} parameters" if unit else f"{count:,} parameters"


def plan_words(plan: object) -> str:
    """Return a plan as words, from a log that has its words or its fields."""
    if isinstance(plan, Mapping):
        try:
            return format_plan(plan)
        except (ValueError, KeyError, TypeError):  # of another version
            return "a plan of another version"
    return str(plan or "no plan in its log")


def stragglers(runs: Sequence[LoggedRun]) -> list[tuple[str, str, str]]:
    """Return (rank, how often it was the slowest, by how much on average), most often first."""
    rows = []
    for run in runs:
        behind: dict[int, list[float]] = {}
        for step in run.records.steps:
            rank, value = step.get("slowest"), number(step.get("behind"))
            if rank is not None and value is not None:
                behind.setdefault(rank, []).append(value)
        for rank in sorted(behind, key=lambda rank: -sum(behind[rank]))[:_STRAGGLERS]:
            often = f"slowest in {len(behind[rank])} of {len(run.records.steps)} lines"
            mean = sum(behind[rank]) / len(behind[rank])
            rows.append((_of(runs, run, f"rank {rank}"), often, f"+{seconds(mean)} per step"))
    return rows


def estimates(runs: Sequence[LoggedRun]) -> list[tuple[str, str, str]]:
    """Return (what, estimated, measured) of the last comparison of each run, and of all of its lines."""
    rows: list[tuple[str, str, str]] = []
    for run in runs:
        found = run.records
        last: Mapping[str, Any] = found.estimates[-1] if found.estimates else {}
        time, measured = number(last.get("estimated_seconds")), number(last.get("measured_seconds"))
        band = number(last.get("band")) or 0.0
        if time and measured:
            what = _of(runs, run, "time per step")
            rows.append((what, f"{seconds(time)} \u00b1{band:.0%}", f"{seconds(measured)} {_ratio(measured, time)}"))
        rows += [(_of(runs, run, what), guess, words) for what, guess, words in _of_all_lines(found)]
        most, peak = estimated_memory(last), number(last.get("measured_peak"))
        if most and peak:
            what = _of(runs, run, "memory of the fullest rank")
            rows.append((what, memory(most), f"{memory(peak)} {_ratio(peak, most)}"))
        rows += [(_of(runs, run, "hint"), str(hint), "") for hint in last.get("hints") or []]
    return rows


def _of_all_lines(found: RunRecords) -> list[tuple[str, str, str]]:
    """Return the row that compares the newest estimate with all lines of its start but the first."""
    start = found.runs[-1] if found.runs else {}
    time, band = number(start.get("estimated_seconds")), number(start.get("band"))
    lines = [step for step in found.steps if step["step"] > start.get("first_step", 0)][1:]
    measured = [value for step in lines if (value := number(step.get("seconds_per_step")))]
    if not time or not measured:
        return []
    middle = statistics.median(measured)
    spread = f"{seconds(min(measured))} to {seconds(max(measured))}"
    inside = sum(time / (1 + (band or 0)) <= value <= time * (1 + (band or 0)) for value in measured)
    words = f"median {seconds(middle)} {_ratio(middle, time)}, {spread}; {inside} of {len(measured)} lines in the band"
    return [(f"time per step of {len(measured)} lines", seconds(time), words)]


def events(runs: Sequence[LoggedRun]) -> dict[str, Any] | None:
    """Return the table of restarts and alerts; None if there are none."""
    rows = []
    for run in runs:
        found = [(one["first_step"], "start", _start_words(one)) for one in run.records.runs if one["first_step"]]
        found += [(step, "alert", what) for step, what in alerts(run.records.steps)]
        found.sort(key=lambda event: event[0])
        rows += [(_of(runs, run, kind), what, f"step {step:,}") for step, kind, what in found[-_EVENTS:]]
        if len(found) > _EVENTS:
            rows.append((_of(runs, run, "earlier"), f"{len(found) - _EVENTS} more", ""))
    return {"head": ("event", "what", "at"), "rows": rows} if rows else None


def faults(runs: Sequence[LoggedRun]) -> list[tuple[str, str]]:
    """Return (step, what) of the faults that ranks have had."""
    return [
        (_of(runs, run, str(fault.get("step", ""))), str(fault.get("what", "")))
        for run in runs
        for fault in run.records.faults
    ]


def facts(runs: Sequence[LoggedRun]) -> dict[str, Any]:
    """Return the table of what each run is: its plan, its code and its settings, and which rows differ."""
    own = [_facts(run.records) | {"log": str(run.path)} for run in runs]
    names = list(dict.fromkeys(name for found in own for name in found))
    rows = []
    for name in names:
        values = [found.get(name, "\u2013") for found in own]
        rows.append((name, values, name != "log" and len(set(values)) > 1))
    return {"names": [run.name for run in runs], "rows": rows}


def footer(runs: Sequence[LoggedRun]) -> str:
    """Return the last line of the page."""
    torn = sum(run.records.torn for run in runs)
    lines, starts = (sum(len(getattr(run.records, name)) for run in runs) for name in ("steps", "runs"))
    words = f" {torn} line(s) of the log are no records, such as one that was cut off." if torn else ""
    return f"{lines:,} lines, {starts} start{'s' if starts != 1 else ''} of the program.{words}"


def _facts(found: RunRecords) -> dict[str, str]:
    run: Mapping[str, Any] = found.runs[-1] if found.runs else {}
    batch = [run.get(name) for name in ("rows_per_rank", "row_tokens")]
    known = {
        "plan": plan_words(run.get("plan")),
        "why": run.get("why"),
        "model": run.get("model"),
        "parameters": f"{run['parameters']:,}" if run.get("parameters") else None,
        "devices": f"{run['ranks']} {_TIMES} {run.get('device')}" if run.get("ranks") else None,
        "rows per rank": f"{batch[0]} of {batch[1]} tokens" if all(batch) else None,
        "git revision": run.get("revision"),
        "command": run.get("command"),
        "versions": ", ".join(f"{name} {version}" for name, version in (run.get("versions") or {}).items()),
    }
    chosen = {name: value for name, value in (run.get("settings") or {}).items() if name not in _NO_SETTINGS}
    return {name: str(value) for name, value in {**known, **chosen}.items() if value not in (None, "", "None")}


def _start_words(start: Mapping[str, Any]) -> str:
    return f"the program went on from this step under {plan_words(start.get('plan'))}"


def _of(runs: Sequence[LoggedRun], run: LoggedRun, what: str) -> str:
    return what if len(runs) == 1 else f"{run.name}: {what}"


def _ratio(measured: float, estimated: float) -> str:
    return f"({measured / estimated:.2f}{_TIMES})"


def _known(found: RunRecords, name: str) -> list[float]:
    values: Iterable[float | None] = (number(step.get(name)) for step in found.steps)
    return [value for value in values if value is not None]


def _last_time(found: RunRecords) -> float:
    times = (number(one.get("time")) for one in (*found.runs, *found.steps))
    return max(filter(None, times), default=0.0)
