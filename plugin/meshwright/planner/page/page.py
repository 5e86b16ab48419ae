"""Put the header, the diagrams and the tables on one self-contained HTML page."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

from meshwright.errors import PlanError
from meshwright.planner import explain
from meshwright.planner.candidate import Candidate
from meshwright.planner.formatting import gib, seconds
from meshwright.planner.page.bars import memory_bars, rank_groups, time_bars
from meshwright.planner.page.draw import AXES, HATCHED, Svg
from meshwright.planner.page.front import front_picture, pareto
from meshwright.planner.page.ranks import rank_picture, sizes
from meshwright.planner.page.style import style
from meshwright.planner.page.timeline import timeline, timeline_picture
from meshwright.planner.search import Search

_HALF, _FULL, _NARROW = 538, 1150, 336  # widths of diagrams: half a page of 1280 pixels, a full one, a phone's
_REASONS = 5  # rows that are always shown
_AXIS_NAMES = {"pp": "pipeline stage", "dp": "data", "cp": "context", "tp": "tensor"}

Draw = Callable[[float, str], Svg]


def page(found: Search, *, changed: Sequence[explain.Change] | None = None) -> str:
    """Return the whole answer as one HTML page, which is also well-formed XML.

    Args:
        found: the outcome of a search.
        changed: result of ``explain.changes``; computed if not given.

    Raises:
        PlanError: no plan fits.
    """
    if not found.choices:
        raise explain.no_fit(found)
    best = found.choices[0]
    name = escape(found.shape.name)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{name}: {escape(best.plan.label)}</title>\n<style>{style()}</style>\n</head>\n<body>\n"
        '<svg xmlns="http://www.w3.org/2000/svg" width="0" height="0" style="position:absolute" aria-hidden="true">'
        '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<path d="M3 0V6" class="hatch-line"/></pattern></defs></svg>\n'
        f"<main>\n{_header(found)}\n{_why_not(found)}\n"
        f"{_changes(found, explain.changes(found) if changed is None else changed)}\n"
        f"{_memory(found)}\n{_time(found)}\n{_timeline(found)}\n{_ranks(found)}\n{_front(found)}\n"
        f"<footer>{escape(explain.error_band(found))} {found.considered:,} legal plans, {found.fitting:,} fit, "
        f"{found.simulated:,} simulated.</footer>\n</main>\n</body>\n</html>\n"
    )


def write_page(found: Search, path: str | Path, *, changed: Sequence[explain.Change] | None = None) -> None:
    """Write the page as a whole: readers of the file never see a part of it.

    Args:
        found, changed: as in ``page``.
        path: the file.

    Raises:
        PlanError: no plan fits, or the file cannot be written.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise PlanError(f"--html {path}: there is no directory {path.parent}; create it, or name another file")
    if path.is_dir():
        raise PlanError(f"--html {path} is a directory; name a file in it")
    content = page(found, changed=changed)
    try:
        handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise PlanError(f"--html {path}: cannot write to {path.parent} ({error.strerror})") from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(content)
        os.chmod(draft, 0o644)
        os.replace(draft, path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def describe_plan(plan: Candidate) -> str:
    """Return a plan in words.

    Example:
        >>> describe_plan(Candidate(shard=8, tp=2, zero_stage=1, accumulation=4))
        '8 data-parallel x 2 tensor-parallel ranks, ZeRO-1, 4 micro-batches of 1 sequence'
    """
    kinds = {"dp": "data-parallel", "tp": "tensor-parallel", "cp": "context-parallel", "pp": "pipeline-parallel"}
    axes = [f"{size} {kinds[axis]}" for axis, size in sizes(plan).items() if size > 1] or ["one"]
    sequence = " with sequence parallelism" if plan.sequence_parallel else ""
    zero = f"ZeRO-{plan.zero_stage}" if plan.zero_stage else "no ZeRO"
    chunks = f", {plan.interleave} chunks of layers per stage" if plan.interleave > 1 else ""
    batches = "one micro-batch" if plan.accumulation == 1 else f"{plan.accumulation} micro-batches"
    again = {"none": "", "selective": ", attention recomputed", "full": ", all layers recomputed"}[plan.recompute]
    if plan.recomputed is not None:
        again = f", {plan.recomputed} layer{'s' if plan.recomputed > 1 else ''} of each stage recomputed"
    plural = "s" if plan.micro_batch > 1 else ""
    ranks = "rank" if plan.world_size == 1 else "ranks"
    return (
        f"{' x '.join(axes)} {ranks}{sequence}{chunks}, {zero}, {batches} of {plan.micro_batch} sequence{plural}{again}"
    )


def _header(found: Search) -> str:
    best, cluster, job, profile = found.choices[0], found.cluster, found.job, found.profile
    total, tied = best.time.total, explain.ties(found)
    nodes = f" in {cluster.nodes:,} nodes of {cluster.gpus_per_node}" if cluster.nodes > 1 else ""
    job_text = f"{job.global_batch:,} sequences of {job.seq_len:,} tokens per step, {job.precision}"
    measured = f"{profile.rows} measured runs" if profile.rows else "nothing measured here"
    low, high = seconds(total / (1 + profile.band)), seconds(total * (1 + profile.band))
    others = tied - 1
    least = "+" if tied == len(found.choices) < found.fitting else ""  # plans that were not kept may tie too
    tie = f"{others}{least} other{'s' if others > 1 or least else ''}" if others or least else "none"
    tiles = [
        ("Step time", seconds(total), f"{low} to {high} (±{profile.band:.0%}; {measured})"),
        ("Tokens/s/GPU", f"{best.tokens_per_second:,.0f}", f"{best.tokens_per_second * cluster.gpus:,.0f} in all"),
        ("MFU", f"{best.mfu:.1%}", "model FLOPs over the peak"),
        ("Memory", gib(best.memory.total), f"of {gib(found.budget)} budget, {gib(cluster.device.memory)} device"),
        ("Ties", tie, f"within {explain.TIE:.0%}; no estimate tells them apart" if others else "no other is as fast"),
    ]
    cells = "".join(f"<div><dt>{a}</dt><dd><b>{b}</b><small>{c}</small></dd></div>" for a, b, c in tiles)
    future = "" if best.plan.runs_today else '<span class="future">planned ahead: this version cannot run it yet</span>'
    return (
        f'<header class="card"><h1>{escape(found.shape.name)}</h1><p>{found.shape.parameters / 1e9:,.2f} B parameters '
        f"on {cluster.gpus:,} &#215; {escape(cluster.device.name)}{nodes}, {job_text}</p>"
        f'<div class="chosen"><code>{escape(best.plan.label)}</code>{future}'
        f"<span>{describe_plan(best.plan).replace(' x ', ' &#215; ')}</span></div><dl>{cells}</dl></header>"
    )


def _why_not(found: Search) -> str:
    rows = [f"<tr><td>{escape(name)}</td><td>{escape(reason)}</td></tr>" for name, reason in explain.reasons(found)]
    more = ""
    if len(rows) > _REASONS + 1:
        rest = "".join(rows[_REASONS:])
        more = f'<details><summary>{len(rows) - _REASONS} more</summary><table class="why">{rest}</table></details>'
        rows = rows[:_REASONS]
    if not rows:
        rows = ["<tr><td>nothing</td><td>no option was ruled out</td></tr>"]
    head = "<tr><th>option</th><th>what ruled it out</th></tr>"
    return f'<section class="card"><h2>Why not</h2><table class="why">{head}{"".join(rows)}</table>{more}</section>'


def _changes(found: Search, changed: Sequence[explain.Change]) -> str:
    rows = ""
    best = dataclasses.replace(found.choices[0].plan, accumulation=1)
    for change in changed:
        plan, speed = "no plan fits", "none"
        if change.plan is not None:
            same = dataclasses.replace(change.plan, accumulation=1) == best
            plan, speed = "the same" if same else change.plan.label, f"{change.speed:.2f}&#215;"
        rows += f'<tr><td>{escape(change.what)}</td><td>{escape(plan)}</td><td class="num">{speed}</td></tr>'
    rows = rows or "<tr><td>nothing</td><td>no changes were tried</td><td></td></tr>"
    head = '<tr><th>with</th><th>the best plan is</th><th class="num">tokens/s</th></tr>'
    return f'<section class="card"><h2>What would change the answer</h2><table>{head}{rows}</table></section>'


def _picture(draw: Draw, ident: str, width: float) -> str:
    return (
        f'<div class="picture">{draw(width, ident)}</div>'
        f'<div class="picture narrow">{draw(_NARROW, f"{ident}-narrow")}</div>'
    )


def _section(title: str, words: str, picture: str, *, legend: str = "", wide: bool = False) -> str:
    kind = "card wide" if wide else "card"
    return f'<section class="{kind}"><h2>{title}</h2><p>{words}</p>{picture}{legend}</section>'


def _legend(parts: Mapping[str, str]) -> str:
    """Return a legend with a colour swatch and a text for each part."""
    items = ""
    for part, words in parts.items():
        hatch = '<rect width="13" height="13" class="hatch"/>' if part in HATCHED else ""
        items += (
            '<li><svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 13 13" aria-hidden="true">'
            f'<rect width="13" height="13" class="f-{part}"/>{hatch}</svg><span>{words}</span></li>'
        )
    return f'<ul class="legend">{items}</ul>'


def _memory(found: Search) -> str:
    best = found.choices[0].memory
    groups = rank_groups(found)
    parts: dict[str, str] = {}
    for name, value in best.parts.items():
        most = max(memory.parts[name] for _, _, memory in groups)
        if most > 0:
            parts[name] = f"<b>{name}</b> {gib(value)}" if value > 0 else f"<b>{name}</b> {gib(most)} elsewhere"
    words = "Every rank needs the same memory." if len(groups) == 1 else (
        "By pipeline stage; the first stages hold the activations of more micro-batches. The legend gives the stage "
        "that needs the most."
    )  # fmt: skip
    picture = _picture(lambda width, ident: memory_bars(found, width, ident), "memory", _HALF)
    return _section("Memory of each rank at its peak", words, picture, legend=_legend(parts))


def _time(found: Search) -> str:
    best = found.choices[0].time
    names = [name for name in best.parts if any(choice.time.parts[name] > 0 for choice in found.choices)]
    parts = {name: f"<b>{name}</b> {seconds(value) if (value := best.parts[name]) else 'none'}" for name in names}
    picture = _picture(lambda width, ident: time_bars(found, width, ident), "time", _HALF)
    words = (
        "Blue is compute, warm colours are communication that compute does not hide. A plan with = ties with the "
        "first. The legend gives the parts of the first."
    )
    return _section("Where the time of a step goes", words, picture, legend=_legend(parts))


def _timeline(found: Search) -> str:
    line, plan = timeline(found), found.choices[0].plan
    parts = {"forward": "forward (F)", "backward": "backward (B)"}
    if line.again:
        parts["recompute"] = "recompute, at the start of a backward"
    parts |= {name: f"{name} communication" for name in (*line.communication, "data")}
    parts |= {"bubble": "bubble"} if plan.pp > 1 else {}
    parts |= {"optimizer": "optimizer", "other": "fixed cost and stragglers"}
    lanes = "Compute above, communication below" + (", for one rank of each stage." if plan.pp > 1 else ".")
    words = (
        f"{lanes} Within a micro-batch the two alternate layer by layer; here each is drawn in one piece. "
        "Communication that compute hides is not drawn. The hatched end is fixed cost and waiting, shortened if long."
    )
    picture = _picture(lambda width, ident: timeline_picture(found, width, ident), "timeline", _FULL)
    return _section("One step", words, picture, legend=_legend(parts), wide=True)


def _ranks(found: Search) -> str:
    shown = {axis: size for axis, size in sizes(found.choices[0].plan).items() if size > 1} or {"dp": 1}
    parts = {AXES[axis]: f"<b>{axis}</b> {_AXIS_NAMES[axis]}, 0 to {size - 1}" for axis, size in shown.items()}
    picture = _picture(lambda width, ident: rank_picture(found, width, ident), "ranks", _FULL)
    words = (
        "Each cell is a rank with its coordinate on each axis. Ranks that are close on the innermost axis share a node."
    )
    return _section("Where each rank sits", words, picture, legend=_legend(parts), wide=True)


def _front(found: Search) -> str:
    points, front = pareto(found)
    picture = _picture(lambda width, ident: front_picture(found, points, front, width, ident), "front", _FULL)
    words = (
        f"Each dot is one of {len(points):,} plans that fit, including those that recompute more than necessary. The "
        "line joins the plans that no other plan beats in both memory and time."
    )
    if not all(point.exact for point in points):
        words += " Pipeline plans far from the line are drawn at a lower bound of their time."
    return _section("Memory against time", words, picture, wide=True)
