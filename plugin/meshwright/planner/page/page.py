"""Put the header, the diagrams and the tables on one self-contained HTML page."""

from __future__ import annotations

import dataclasses
import functools
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

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

_HALF, _FULL, _NARROW = 538, 1150, 336  # widths of diagrams in pixels: half a page of 1280 pixels, a full page, a phone
_REASONS = 5  # largest number of reasons that are shown unfolded
_AXIS_NAMES = {"pp": "pipeline stage", "dp": "data", "cp": "context", "tp": "tensor"}

_TIMES = "\u00d7"  # the multiplication sign

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
    changed = explain.changes(found) if changed is None else changed
    template = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    ).get_template("page.html.j2")
    return template.render(
        style=Markup(style()),
        header=_header(found),
        reasons=_reasons(found),
        changes=_changes(found, changed),
        sections=[_memory(found), _time(found), _timeline(found), _ranks(found), _front(found)],
        footer=f"{explain.error_band(found)} {found.considered:,} legal plans, {found.weighed:,} weighed, "
        f"{found.simulated:,} simulated.",
    )


def write_page(found: Search, path: str | Path, *, changed: Sequence[explain.Change] | None = None) -> None:
    """Write the page atomically, so that readers of the file never see a part of the page.

    Args:
        found, changed: as in ``page``.
        path: the file.

    Raises:
        PlanError: no plan fits, or the file cannot be written.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise PlanError(f"--html {path}: there is no directory {path.parent}; create it, or choose another file")
    if path.is_dir():
        raise PlanError(f"--html {path} is a directory; choose a file in it")
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
    schedule = ""
    if plan.pp > 1:
        chunks = f" with {plan.chunks} stages on each rank" if plan.chunks > 1 else ""
        schedule = f", schedule {plan.schedule}{chunks}"
    batches = "one micro-batch" if plan.accumulation == 1 else f"{plan.accumulation} micro-batches"
    again = {"none": "", "selective": ", attention recomputed", "full": ", all layers recomputed"}[plan.recompute]
    if plan.recomputed is not None:
        again = f", {plan.recomputed} layer{'s' if plan.recomputed > 1 else ''} of each stage recomputed"
    plural = "s" if plan.micro_batch > 1 else ""
    ranks = "rank" if plan.world_size == 1 else "ranks"
    rows = f"{batches} of {plan.micro_batch} sequence{plural}"
    return f"{' x '.join(axes)} {ranks}{sequence}{schedule}, {zero}, {rows}{again}"


def _header(found: Search) -> dict[str, Any]:
    best, cluster, job, profile = found.choices[0], found.cluster, found.job, found.profile
    total, tied = best.time.total, explain.ties(found)
    nodes = f" in {cluster.nodes:,} nodes of {cluster.gpus_per_node}" if cluster.nodes > 1 else ""
    job_text = f"{job.global_batch:,} sequences of {job.seq_len:,} tokens per step, {job.precision}"
    measured = f"{profile.rows} measured runs" if profile.rows else "nothing measured on this cluster"
    low, high = seconds(total / (1 + profile.band)), seconds(total * (1 + profile.band))
    others = tied - 1
    least = "+" if tied == len(found.choices) < found.considered else ""  # plans that were not kept may tie too
    tie = f"{others}{least} other{'s' if others > 1 or least else ''}" if others or least else "none"
    tiles = [
        ("Step time", seconds(total), f"{low} to {high} (±{profile.band:.0%}; {measured})"),
        ("Tokens/s/GPU", f"{best.tokens_per_second:,.0f}", f"{best.tokens_per_second * cluster.gpus:,.0f} on all GPUs"),
        ("MFU", f"{best.mfu:.1%}", "model FLOPs / peak FLOPs"),
        ("Memory", gib(best.memory.total), f"of {gib(found.budget)} budget, {gib(cluster.device.memory)} device"),
        ("Ties", tie, f"within {explain.TIE:.0%}, too close to rank" if others else "no other plan is as fast"),
    ]
    return {
        "name": found.shape.name,
        "job": f"{found.shape.parameters / 1e9:,.2f} B parameters on {cluster.gpus:,} {_TIMES} "
        f"{cluster.device.name}{nodes}, {job_text}",
        "label": best.plan.label,
        "is_future": not best.plan.runs_today,
        "plan": describe_plan(best.plan).replace(" x ", f" {_TIMES} "),
        "tiles": tiles,
    }


def _reasons(found: Search) -> dict[str, Any]:
    """Return the reasons against other plans: those to show, and those to fold away."""
    rows = list(explain.reasons(found)) or [("nothing", "no option was ruled out")]
    shown = _REASONS if len(rows) > _REASONS + 1 else len(rows)
    return {"shown": rows[:shown], "folded": rows[shown:]}


def _changes(found: Search, changed: Sequence[explain.Change]) -> list[tuple[str, str, str]]:
    rows = []
    best = dataclasses.replace(found.choices[0].plan, accumulation=1)
    for change in changed:
        plan, speed = "no plan fits", "none"
        if change.plan is not None:
            same = dataclasses.replace(change.plan, accumulation=1) == best
            plan, speed = "the same" if same else change.plan.label, f"{change.speed:.2f}{_TIMES}"
        rows.append((change.what, plan, speed))
    return rows or [("nothing", "no changes were tried", "")]


@dataclass(frozen=True)
class _Entry:
    """One entry of a legend.

    Args:
        part: the part of the step's time or memory, or the mesh axis, that the entry explains, as a key of
            ``PALETTE``; it has the same colour in all pictures.
        words: a description of the part, or its size.
        name: the name in bold, before the words.
    """

    part: str
    words: str
    name: str = ""

    @property
    def is_hatched(self) -> bool:
        return self.part in HATCHED


@dataclass(frozen=True)
class _Section:
    """A card with a picture. The template renders the card; ``draw`` makes the picture.

    Args:
        ident: unique prefix of the picture's ids.
        draw: function that draws the picture, given its width and the prefix of its ids.
        is_wide: whether the card takes the page's whole width.
    """

    title: str
    words: str
    ident: str
    draw: Draw
    legend: Sequence[_Entry] = ()
    is_wide: bool = False

    @property
    def picture(self) -> Markup:
        return Markup(self.draw(_FULL if self.is_wide else _HALF, self.ident))

    @property
    def narrow_picture(self) -> Markup:
        return Markup(self.draw(_NARROW, f"{self.ident}-narrow"))


def _memory(found: Search) -> _Section:
    best = found.choices[0].memory
    groups = rank_groups(found)
    legend = []
    for name, value in best.parts.items():
        most = max(memory.parts[name] for _, _, memory in groups)
        if most > 0:
            legend.append(_Entry(name, gib(value) if value > 0 else f"{gib(most)} in other stages", name))
    words = "Every rank needs the same memory." if len(groups) == 1 else (
        "Each bar is one or more pipeline stages; the first stages hold the activations of more micro-batches. The "
        "legend gives the memory of the stage that needs the most."
    )  # fmt: skip
    draw = functools.partial(memory_bars, found)
    return _Section("Memory of each rank at its peak", words, "memory", draw, legend)


def _time(found: Search) -> _Section:
    best = found.choices[0].time
    names = [name for name in best.parts if any(choice.time.parts[name] > 0 for choice in found.choices)]
    legend = [_Entry(name, seconds(value) if (value := best.parts[name]) else "none", name) for name in names]
    words = (
        "Blue is compute, warm colours are communication that compute does not hide. A plan with = ties with the first "
        "plan. The legend gives the times of the first plan."
    )
    draw = functools.partial(time_bars, found)
    return _Section("Where the time of a step goes", words, "time", draw, legend)


def _timeline(found: Search) -> _Section:
    line, plan = timeline(found), found.choices[0].plan
    parts = {"forward": "forward (F)", "backward": "backward (B)"}
    if line.again:
        parts["recompute"] = "recompute, at the start of a backward"
    parts |= {name: f"{name} communication" for name in (*line.communication, "data")}
    parts |= {"bubble": "bubble"} if plan.pp > 1 else {}
    parts |= {"optimizer": "optimizer", "other": "fixed cost and stragglers"}
    lanes = "Compute is above, communication is below" + (", for one rank of each stage." if plan.pp > 1 else ".")
    words = (
        f"{lanes} Within a micro-batch the two alternate layer by layer, but each is drawn as one piece. Communication "
        "that compute hides is not drawn. The hatched end is fixed cost and waiting. If it is long, it is shortened."
    )
    draw = functools.partial(timeline_picture, found)
    legend = [_Entry(part, text) for part, text in parts.items()]
    return _Section("One step", words, "timeline", draw, legend, is_wide=True)


def _ranks(found: Search) -> _Section:
    shown = {axis: size for axis, size in sizes(found.choices[0].plan).items() if size > 1} or {"dp": 1}
    legend = [_Entry(AXES[axis], f"{_AXIS_NAMES[axis]}, 0 to {size - 1}", axis) for axis, size in shown.items()]
    words = (
        "Each cell is a rank with its coordinate on each axis. Ranks that are close on the innermost axis share a node."
    )
    draw = functools.partial(rank_picture, found)
    return _Section("Where each rank sits", words, "ranks", draw, legend, is_wide=True)


def _front(found: Search) -> _Section:
    points, front = pareto(found)
    words = (
        f"Each dot is one of {len(points):,} plans that fit, including those that recompute more than necessary. The "
        "line joins the plans that no other plan beats in both memory and time."
    )
    if not all(point.exact for point in points):
        words += " Pipeline plans far from the line are drawn at a lower bound of their time."
    draw = functools.partial(front_picture, found, points, front)
    return _Section("Memory against time", words, "front", draw, is_wide=True)
