"""The tiles and the tables of the report, which show several runs beside each other."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from meshwright.monitor.line import clock
from meshwright.monitor.records import RunRecords, number
from meshwright.monitor.report_data import alerts, by_rank, estimated_memory
from meshwright.monitor.run_folders import LoggedRun
from meshwright.plan.text import format_plan
from meshwright.planner.formatting import memory, seconds

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
