"""Put the header, the diagrams and the tables on one self-contained HTML page."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from markupsafe import Markup

from meshwright.errors import PlanError
from meshwright.planner import explain
from meshwright.planner.cost import Budget, bill_line, bill_of
from meshwright.planner.formatting import gib, seconds
from meshwright.planner.page.data import as_script, page_data, planned
from meshwright.planner.page.front import pareto
from meshwright.planner.page.listing import Listed, listed_plans
from meshwright.planner.page.render import render, write_whole
from meshwright.planner.page.settings import PageSettings, ranges
from meshwright.planner.page.words import describe_plan, launch_command, plan_command
from meshwright.planner.search import Search

_REASONS = 5  # largest number of reasons that are shown unfolded
_SCRIPTS = (
    "text",
    "svg",
    "schedule",
    "choices",
    "bars",
    "timeline",
    "ranks",
    "front",
    "answers",
    "explain",
    "run",
    "trace",
    "address",
    "page",
)

_TIMES = "\u00d7"  # the multiplication sign


def page(
    found: Search,
    *,
    changed: Sequence[explain.Change] | None = None,
    model: str | None = None,
    profile: str | None = None,
    budget: Budget | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    compared: Sequence[tuple[str, ...]] = (),
) -> str:
    """Return the whole answer as one HTML page, which is also well-formed XML.

    Args:
        found: the outcome of a search.
        changed: result of ``explain.changes``; computed if not given.
        model: what the page's commands give to ``--model`` (default: the model's name).
        profile: what they give to ``--profile``; None for a search without one.
        budget: the tokens and the price with which the page's figures of a whole run begin.
        progress: a function that is called with the number of slider settings computed so far, and their total number.
        compared: the table of ways to train the model, its heading first.

    Raises:
        PlanError: no plan fits.
    """
    if not found.choices:
        raise explain.no_fit(found)
    changed = explain.changes(found) if changed is None else changed
    points, front = pareto(found)
    plans = listed_plans(found, points, front)
    settings = PageSettings(found=found, ranges=ranges(found))
    data = page_data(settings, plans, points, front, progress=progress)
    commands = {"plan": plan_command(found, shlex.quote(model or found.shape.name), profile)}
    rows = _changes(found, changed)
    run = {
        "tokens": f"{budget.tokens}" if budget else "",
        "price": f"{budget.price:g}" if budget and budget.price is not None else "",
    }
    data |= {"commands": commands, "changes": rows, "run": run}
    return render(
        Path(__file__).with_name("page.html.j2"),
        script=Markup(_script()),
        data=Markup(as_script(data)),
        header=_header(found),
        plans=_rows(found, plans),
        sliders=_sliders(settings),
        reasons=_reasons(found),
        changes=rows,
        compared={"head": compared[0], "rows": compared[1:]} if compared else None,
        run=run,
        bill=bill_line(bill_of(found, budget)) if budget else "",
        settings=f"{settings.ranges.count:,}",
        footer=f"{explain.error_band(found)} {found.considered:,} legal plans, {found.weighed:,} weighed, "
        f"{found.simulated:,} simulated.",
    )


def write_page(
    found: Search,
    path: str | Path,
    *,
    changed: Sequence[explain.Change] | None = None,
    model: str | None = None,
    profile: str | None = None,
    budget: Budget | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    compared: Sequence[tuple[str, ...]] = (),
) -> None:
    """Write the page atomically, so that readers of the file never see a part of the page.

    Args:
        found, changed, model, profile, budget, progress, compared: as in ``page``.
        path: the file.

    Raises:
        PlanError: no plan fits, or the file cannot be written.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise PlanError(f"--html {path}: there is no directory {path.parent}; create it, or choose another file")
    if path.is_dir():
        raise PlanError(f"--html {path} is a directory; choose a file in it")
    content = page(
        found, changed=changed, model=model, profile=profile, budget=budget, progress=progress, compared=compared
    )
    write_whole(content, path, option="--html")


def _header(found: Search) -> dict[str, object]:
    best, cluster, job, profile = found.choices[0], found.cluster, found.job, found.profile
    total, tied = best.time.total, explain.ties(found)
    nodes = f" in {cluster.nodes:,} nodes of {cluster.gpus_per_node}" if cluster.nodes > 1 else ""
    job_text = f"{job.global_batch:,} sequences of {job.seq_len:,} tokens per step, {job.precision}"
    job_text += "" if job.lora is None else f", {job.method}"
    job_text += "" if job.optimizer == "adamw" else f", {job.kind.name}"
    measured = f"{profile.rows} measured runs" if profile.rows else "nothing measured on this cluster"
    low, high = seconds(total / (1 + profile.band)), seconds(total * (1 + profile.band))
    others = tied - 1
    least = "+" if tied == len(found.choices) < found.considered else ""  # plans that were not kept may tie too
    tie = f"{others}{least} other{'s' if others > 1 or least else ''}" if others or least else "none"
    room = found.budget - best.memory.total
    tiles = [
        ("Step time", seconds(total), f"{low} to {high} (±{profile.band:.0%}; {measured})"),
        ("Tokens/s/GPU", f"{best.tokens_per_second:,.0f}", f"{best.tokens_per_second * cluster.gpus:,.0f} on all GPUs"),
        ("MFU", f"{best.mfu:.1%}", "model FLOPs / peak FLOPs"),
        ("Memory", gib(best.memory.total), f"{gib(room)} below the budget of {gib(found.budget)}"),
        ("Ties", tie, f"within {explain.TIE:.0%}, too close to rank" if others else "no other plan is as fast"),
    ]
    return {
        "name": found.shape.name,
        "job": f"{explain.parameters_text(found.shape)} on {cluster.gpus:,} {_TIMES} "
        f"{cluster.device.name}{nodes}, {job_text}",
        "label": best.plan.label,
        "is_future": not found.runs_today(best.plan),
        "plan": describe_plan(best.plan).replace(" x ", f" {_TIMES} "),
        "tiles": tiles,
        "command": launch_command(best.plan.label, cluster.nodes),
    }


def _script() -> str:
    """Return the page's JavaScript as one function, so that it adds no global name."""
    folder = Path(__file__).parent / "js"
    files = "".join((folder / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS)
    assert "]]>" not in files and "</script" not in files
    return f'(() => {{\n"use strict";\n{files}}})();\n'


def _rows(found: Search, plans: Sequence[Listed]) -> list[dict[str, object]]:
    """Return the rows of the table of plans."""
    best = plans[0].time.total
    return [
        {
            "label": listed.plan.label,
            "why": listed.why + ("" if found.runs_today(listed.plan) else ", not in this version yet"),
            "step": seconds(listed.time.total),
            "slower": f"+{listed.time.total / best - 1:.0%}" if listed.time.total > best else "",
            "speed": f"{listed.tokens_per_second:,.0f}",
            "mfu": f"{listed.mfu:.1%}",
            "memory": gib(listed.memory.total),
            "room": gib(found.budget - listed.memory.total),
        }
        for listed in plans
    ]


def _sliders(settings: PageSettings) -> list[dict[str, object]]:
    """Return the sliders: their names, and the index of the planned job on them."""
    found, values, start = settings.found, settings.ranges, planned(settings)
    return [
        {"name": name, "label": label, "most": len(of) - 1, "start": index, "text": text}
        for name, label, of, index, text in (
            ("batch", "Global batch", values.batches, start[0], f"{found.job.global_batch:,} sequences"),
            ("length", "Sequence length", values.lengths, start[1], f"{found.job.seq_len:,} tokens"),
            ("gpus", "GPUs", values.gpus, start[2], f"{found.cluster.gpus:,}"),
            ("micro", "Micro-batch", values.micro, start[3], "as planned"),
        )
    ]


def _reasons(found: Search) -> dict[str, object]:
    """Return the reasons against other plans: those to show, and those to fold away."""
    rows = list(explain.reasons(found)) or [("nothing", "no option was ruled out")]
    shown = _REASONS if len(rows) > _REASONS + 1 else len(rows)
    return {"shown": rows[:shown], "folded": rows[shown:]}


def _changes(found: Search, changed: Sequence[explain.Change]) -> list[tuple[str, str, str]]:
    rows = []
    for change in changed:
        plan, speed = "no plan fits", "none"
        if change.plan is not None:
            plan = "the same" if change.is_same(found.choices[0].plan) else change.plan.label
            speed = f"{change.speed:.2f}{_TIMES}"
        rows.append((change.what, plan, speed))
    return rows or [("nothing", "no changes were tried", "")]
