"""One step as a timeline: the compute and communication of each pipeline stage, by micro-batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from meshwright.pipeline.schedule import Kind
from meshwright.planner.candidate import recomputed_share
from meshwright.planner.formatting import seconds
from meshwright.planner.page.draw import Box, Svg, number, text_width, ticks
from meshwright.planner.search import Search
from meshwright.planner.simulate import Event, pipeline_events
from meshwright.planner.time import StepModel

_SHORT = 6  # micro-batches that are drawn one by one for a plan without a pipeline
_STAGES = 8  # largest number of stages to draw; if there are more, the middle ones are left out
_REST = 64  # largest width in pixels of the fixed cost and stragglers, which have no definite time in the step
_BREAK = 86  # width in pixels of the gap in place of omitted micro-batches


_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRAD: "backward to the input",
    Kind.WEIGHT_GRAD: "gradients of the weights",
}
Scale = Callable[[float], float]  # seconds to pixels


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One step of a plan.

    Args:
        events: forwards and backwards of each rank; after ``cut``, with their times and indices in the whole step.
        cut: (end of the first drawn part, start of the last drawn part), equal if nothing is left out.
        skipped: number of micro-batches left out between these parts.
        piped: seconds until the end of the last backward.
        tail: (part, seconds) of what follows the last backward.
        communication: kind of communication -> its share of the time of a forward or backward.
        again: share of a backward that is recompute.
    """

    events: tuple[Event, ...]
    cut: tuple[float, float]
    skipped: int
    piped: float
    tail: tuple[tuple[str, float], ...]
    communication: dict[str, float]
    again: float

    @property
    def lane(self) -> str:
        """What a lane shows: a stage, or a rank that holds several."""
        several = len({(event.rank, event.operation.stage) for event in self.events}) > len(
            {event.rank for event in self.events}
        )
        return "rank" if several else "stage"

    @property
    def total(self) -> float:
        return self.piped + sum(value for _, value in self.tail)


def timeline(found: Search) -> Timeline:
    """Return the step of the best plan; the middle of a long schedule, which repeats itself, is left out."""
    best, job = found.choices[0], found.job
    plan, parts = best.plan, best.time.parts
    model = StepModel(found.shape, found.cluster, found.profile.coefficients)
    layer = model.layer(plan, job)
    count = plan.accumulation
    short = count
    if plan.pp == 1:
        short = min(count, _SHORT if count > _SHORT + 2 else count)
    elif count > 3 * plan.pp:
        short = 2 * plan.pp + count % plan.pp  # whole rounds of an interleaved schedule
    events = list(pipeline_events(model.pipeline(plan, job), short))
    drawn = max(event.end for event in events)
    tail = [(name, parts[name]) for name in ("data", "optimizer", "other")]
    piped = best.time.total - sum(value for _, value in tail)
    middle = (drawn / 2, drawn / 2)
    if short < count:
        if plan.pp == 1:
            middle = (events[short - 1].end,) * 2  # between two micro-batches
        events = [piece for event in events for piece in _moved(event, middle[0], piped - drawn, count - short)]
        middle = (middle[0], middle[0] + piped - drawn)
    busy = layer.forward + layer.backward
    return Timeline(
        events=tuple(events),
        cut=middle,
        skipped=count - short,
        piped=piped,
        tail=tuple(tail),
        communication={name: getattr(layer, name) / busy for name in ("tensor", "context") if getattr(layer, name)},
        again=layer.recompute * (recomputed_share(plan, found.shape.layers) if plan.recompute == "full" else 1)
        / layer.backward,
    )  # fmt: skip


def _moved(event: Event, cut: float, by: float, micro_batches: int) -> list[Event]:
    """Return an event with its times in the whole step, as two pieces if the event crosses the cut."""
    moved = dataclasses.replace(event.operation, micro_batch=event.operation.micro_batch + micro_batches)
    later = dataclasses.replace(event, operation=moved, start=event.start + by, end=event.end + by)
    if event.start < cut < event.end:
        return [dataclasses.replace(event, end=cut), dataclasses.replace(later, start=cut + by)]
    return [event] if event.end <= cut else [later]


def timeline_picture(found: Search, width: float, ident: str) -> Svg:
    """Draw one step of the best plan."""
    line, plan = timeline(found), found.choices[0].plan
    stages: list[int | None] = list(range(plan.pp))
    if plan.pp > _STAGES:
        stages = [*range(_STAGES // 2), None, *range(plan.pp - _STAGES // 2, plan.pp)]
    tall, thin = (40, 16) if plan.pp == 1 else (20, 7)
    left = (106 if plan.pp == 1 else 66) if width > 480 else 60 if plan.pp == 1 else 42
    gap = _BREAK if line.skipped else 0
    heights = [22 if stage is None else tall + thin + (6 if plan.pp == 1 else 9) for stage in stages]
    svg = Svg(
        ident=ident, width=width, height=6 + sum(heights) + 44, title="One step",
        description=f"{plan.accumulation} micro-batches on {plan.pp} pipeline stages take {seconds(line.piped)}; then "
        + ", ".join(f"{name} {seconds(value)}" for name, value in line.tail) + ".",
    )  # fmt: skip
    first, second = line.cut
    room, rest = width - left - gap - 4, line.tail[-1][1]
    shown = line.total - (second - first)
    scale = room / shown
    if rest * scale > _REST:
        scale = (room - _REST) / (shown - rest)
    done = line.total - rest

    def at(time: float) -> float:
        if time <= first:
            return left + time * scale
        if time > done:
            return width - 4 - (line.total - time) / rest * (width - 4 - at(done))
        return left + gap + (time - second + first) * scale

    y, base = 6.0, 6.0 + sum(heights)
    for stage, height in zip(stages, heights, strict=True):
        if stage is None:
            svg.text(0, y + 15, f"… {plan.pp - _STAGES} more {line.lane}s", "muted")
        else:
            _lane(svg, line, stage, plan.pp, at, (left, y, tall, thin, width))
        y += height
    if line.skipped:
        _break(svg, left + first * scale, gap, base, line.skipped)
    step = ticks(0, (width - left - gap) / scale, 4 if width < 480 else 9)
    pace = step[1] - step[0] if len(step) > 1 else line.total
    marks = [pace * index for index in range(int(line.total / pace) + 1)]
    for time in [time for time in marks if time <= first or second <= time <= done]:
        x = at(time)
        svg.line(x, base, x, base + 5, "tick")
        if x < width - 50 and not (gap and left + first * scale - 26 < x < left + first * scale + gap + 8):
            svg.text(x, base + 19, f"{time:g}", "axis", anchor="middle")
    svg.line(left, base, width - 4, base, "tick")
    svg.text(width - 2, base + 19, seconds(line.total), "strong num", anchor="end")
    svg.text(left, base + 38, "seconds since the step began", "axis")
    return svg


def _lane(svg: Svg, line: Timeline, stage: int, pp: int, at: Scale, place: tuple[float, ...]) -> None:
    left, y, tall, thin, width = place
    low = y + tall + 2
    if pp == 1:
        svg.text(0, y + tall / 2 + 4, "compute", "label")
        svg.text(0, low + thin / 2 + 4, "communication" if left > 100 else "comm.", "label")
    else:
        svg.text(0, y + tall / 2 + 5, f"{line.lane} {stage}" if left > 50 else f"{line.lane[:1]}. {stage}", "label")
    if pp > 1:
        svg.part(Box(left, y, at(line.piped) - left, tall), "bubble")
    else:
        svg.rect(Box(left, y, at(line.piped) - left, tall), "lane")
    svg.rect(Box(left, low, width - 4 - left, thin), "lane")
    moved = sum(line.communication.values())
    for event in line.events:
        if event.rank != stage:
            continue
        x, length = at(event.start), at(event.end) - at(event.start)
        busy = length * (1 - moved)
        operation = event.operation
        name = _NAMES[operation.kind]
        color = "forward" if operation.kind is Kind.FORWARD else "backward"
        lasts = seconds(event.end - event.start)
        title = f"{name} of micro-batch {operation.micro_batch}, stage {operation.stage}: {lasts}"
        edge = "part " if length > 6 else ""  # an edge would hide a narrow rectangle
        svg.rect(Box(x, y, busy, tall), f"{edge}f-{color}", title=title)
        again = line.again * busy if operation.kind is Kind.BACKWARD else 0.0
        if again > 1:
            svg.part(Box(x, y, again, tall), "recompute", title=f"recompute, {line.again:.0%} of the {title}")
        label = f"{operation.kind.value}{operation.micro_batch}"
        if text_width(label, 11) + 5 < busy - again:
            svg.text(x + (busy + again) / 2, y + tall / 2 + 4, label, f"inside t-{color}", anchor="middle")
        x += busy
        if pp > 1 and length - busy > 1:
            svg.rect(Box(x, y, length - busy, tall), "lane")  # waiting for communication is not a bubble
        for part, share in line.communication.items():
            if share * length > 0.2:
                kind = "part " if share * length > 6 else ""
                box = Box(x, low, share * length, thin)
                svg.rect(box, f"{kind}f-{part}", title=f"{part}: {share:.0%} of {label}")
            x += share * length
    start = line.piped
    for name, value in line.tail:
        top, height = (low, thin) if name == "data" else (y, tall)
        x, length = at(start), at(start + value) - at(start)
        svg.part(Box(x, top, length, height), name, title=f"{name}: {seconds(value)}")
        if pp == 1 and text_width(name, 11.5) + 8 < length:
            svg.text(x + 5, top + height / 2 + 4, name, f"inside t-{name}")
        start += value


def _break(svg: Svg, x: float, gap: float, base: float, skipped: int) -> None:
    """Draw a torn strip in place of the omitted micro-batches."""
    pairs = max(1, round((base - 2) / 20))
    high = number((base - 2) / pairs / 2)
    svg.path(f"M{number(x)} 2{f'l5 {high}l-5 {high}' * pairs}h{number(gap)}{f'l5 -{high}l-5 -{high}' * pairs}z", "torn")
    svg.text(x + gap / 2, base / 2 - 2, "…", "strong", anchor="middle")
    svg.text(x + gap / 2, base / 2 + 13, f"{skipped} more", "label", anchor="middle")
