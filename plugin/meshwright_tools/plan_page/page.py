"""Put the header, the diagrams and the tables on one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from meshwright.errors import PlanError
from meshwright.outside_files import write_whole
from meshwright.printable import shell_word
from meshwright_plan.answers import explain
from meshwright_plan.answers.cost import Budget, bill_line, bill_of
from meshwright_plan.formatting import gib, seconds
from meshwright_plan.search.search import Search
from meshwright_tools.plan_page.data import describe_plan, launch_command, packed, page_data, plan_command
from meshwright_tools.plan_page.listing import PLANS, Listed, listed_plans, pareto
from meshwright_tools.plan_page.render import render
from meshwright_tools.plan_page.settings import Elsewhere, PageSettings, ranges, with_each_length, with_every_setting

_REASONS = 5  # largest number of reasons that are shown unfolded
_ROWS = 48  # plans of all answers of a page together
_BYTES = 1_000_000  # of a page: opened at once, and small enough to mail
_PARTS = 1000  # of the progress of an answer
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
    "menus",
    "page",
)

_TIMES = "\u00d7"  # the multiplication sign


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A search for one GPU and one precision, with what the page shows of it.

    Args:
        found: the outcome of the search.
        changed: result of ``explain.changes``; computed if not given.
        budget: the tokens and the price with which the figures of a whole run begin.
        compared: the table of ways to train the model, its heading first.
    """

    found: Search
    changed: Sequence[explain.Change] | None = None
    budget: Budget | None = None
    compared: Sequence[tuple[str, ...]] = ()

    @property
    def name(self) -> tuple[str, str]:
        """The GPU and the precision."""
        return self.found.cluster.device.name, self.found.job.precision


def page(
    answers: Sequence[Answer],
    *,
    model: str | None = None,
    profile: str | None = None,
    refused: Sequence[str] = (),
    every_setting: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> str:
    """Return the whole answer as one HTML page, which is also well-formed XML.

    Args:
        answers: the answers among which the page's menus choose, the first of which it shows at the start. They have
            one model, number of devices, batch and sequence length.
        model: what the page's commands give to ``--model`` (default: the model's name).
        profile: what they give to ``--profile``; None for a search without one.
        refused: why other GPUs and precisions have no answer.
        every_setting: whether each setting of the sliders is searched.
        progress: a function that is called with the work done so far, and the total.

    Raises:
        PlanError: no plan fits, or a page of the fewest plans is too large.
    """
    first = answers[0].found
    if not first.choices:
        raise explain.no_fit(first)
    most = _ROWS // len(answers)
    while True:
        parts, rows = [], list[Listed]()
        for number, answer in enumerate(answers):

            def each(done: int, total: int, number: int = number) -> None:
                progress(_PARTS * number + _PARTS * done // total, _PARTS * len(answers))

            data, listed = _answer_data(answer, most, every_setting, model=model, profile=profile, progress=each)
            parts.append(data)
            rows = rows or listed
        plans = max(len(part["plans"]) for part in parts)
        text = _filled(answers, parts, rows, refused, f"{plans} plans" if most < _ROWS // len(answers) else "")
        if (size := len(text.encode())) <= _BYTES:
            return text
        if plans > most:  # the search has more choices
            raise PlanError(
                f"--html: a page of {plans} plans for each GPU and precision has {size / 1e6:.2g} MB, and the limit is "
                f"{_BYTES / 1e6:g} MB; give fewer values of --gpu or --precision, or a smaller --top"
            )
        most = min(plans - 1, plans * _BYTES // size)


def _filled(
    answers: Sequence[Answer],
    parts: Sequence[dict[str, Any]],
    rows: Sequence[Listed],
    refused: Sequence[str],
    fewer: str,
) -> str:
    """Return the template, filled with the data of the answers, and the plans of the first one that fit."""
    first, start, budget = answers[0].found, parts[0], answers[0].budget
    settings = PageSettings(found=first, ranges=ranges(first))
    return render(
        Path(__file__).with_name("page.html.j2"),
        script=Markup(_script()),
        data=packed(parts),
        header=_header(first),
        plans=_rows(first, rows),
        menus=_menus(answers),
        refused=refused,
        fewer=fewer,
        sliders=_sliders(settings),
        reasons=_folded(start["why"]),
        changes=start["changes"],
        compared={"head": answers[0].compared[0], "rows": answers[0].compared[1:]} if answers[0].compared else None,
        run=start["run"],
        bill=bill_line(bill_of(first, budget)) if budget else "",
        settings=f"{settings.ranges.count:,}",
        every=all(part["isComplete"] for part in parts),
        footer=start["footer"],
    )


def write_page(answers: Sequence[Answer], path: str | Path, **options: Any) -> None:
    """Write the page atomically, so that readers of the file never see a part of the page.

    Args:
        answers: as in ``page``.
        path: the file.
        options: the other arguments of ``page``.

    Raises:
        PlanError: no plan fits, or the file cannot be written.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise PlanError(f"--html {path}: there is no directory {path.parent}; create it, or choose another file")
    if path.is_dir():
        raise PlanError(f"--html {path} is a directory; choose a file in it")
    write_whole(path, page(answers, **options), option="--html")


def _answer_data(
    answer: Answer,
    most: int,
    every: bool,
    *,
    model: str | None,
    profile: str | None,
    progress: Callable[[int, int], None],
) -> tuple[dict[str, Any], list[Listed]]:
    """Return the data of an answer, and the plans that fit in the planned job.

    Args:
        answer: the answer.
        most: largest number of plans, unless the search has more choices.
        every: whether each setting is searched, or only the lengths at which no plan of the table fits.
        model, profile: as in ``page``.
        progress: a function that is called with the work done so far, and the total.
    """
    found, budget = answer.found, answer.budget
    points, front = pareto(found)
    settings = PageSettings(found=found, ranges=ranges(found))
    listed = listed_plans(found, points, front, most=min(PLANS, most) if every else PLANS)
    plans: Sequence[Listed | Elsewhere]
    if every:
        plans, is_complete = with_every_setting(settings, listed, most, lambda done, total: progress(done, 2 * total))
    else:
        plans, is_complete = with_each_length(settings, listed, most), False
    halves = 2 if every else 1

    def drawn(done: int, total: int) -> None:
        progress(done + total * (halves - 1), total * halves)

    data = page_data(settings, plans, points, front, progress=drawn)
    run = {
        "tokens": f"{budget.tokens}" if budget else "",
        "price": f"{budget.price:g}" if budget and budget.price is not None else "",
    }
    changed = explain.changes(found) if answer.changed is None else answer.changed
    data |= {
        "commands": {"plan": plan_command(found, shell_word(model or found.shape.name), profile)},
        "changes": _changes(found, changed),
        "run": run,
        "job": _header(found)["job"],
        "why": list(explain.reasons(found)) or [("nothing", "no option was ruled out")],
        "compared": list(answer.compared[1:]),
        "isComplete": is_complete,
        "footer": " ".join((explain.error_band(found), *filter(None, explain.warnings(found))))
        + f" {found.considered:,} legal plans, {found.weighed:,} weighed, {found.simulated:,} simulated.",
    }
    return data, [each for each in plans if isinstance(each, Listed)]


def _menus(answers: Sequence[Answer]) -> list[dict[str, object]]:
    """Return the menus: their names, and the values that an answer has."""
    menus: list[dict[str, object]] = []
    for at, (name, label) in enumerate((("gpu", "GPU"), ("precision", "Precision"))):
        options = list(dict.fromkeys(answer.name[at] for answer in answers))
        menus.append({"name": name, "label": label, "options": options})
    return menus if len(answers) > 1 else []


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
    """Return the page's JavaScript as one function, so that it adds no global name; it awaits the unpacked data."""
    folder = Path(__file__).parent / "js"
    files = "".join((folder / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS)
    assert "]]>" not in files and "</script" not in files
    return f'(async () => {{\n"use strict";\n{files}}})();\n'


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
    found, values, start = settings.found, settings.ranges, settings.planned
    return [
        {"name": name, "label": label, "most": len(of) - 1, "start": index, "text": text}
        for name, label, of, index, text in (
            ("batch", "Global batch", values.batches, start[0], f"{found.job.global_batch:,} sequences"),
            ("length", "Sequence length", values.lengths, start[1], f"{found.job.seq_len:,} tokens"),
            ("gpus", "GPUs", values.gpus, start[2], f"{found.cluster.gpus:,}"),
            ("micro", "Micro-batch", values.micro, start[3], "as planned"),
        )
    ]


def _folded(rows: Sequence[tuple[str, str]]) -> dict[str, object]:
    """Return the reasons against other plans: those to show, and those to fold away."""
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
