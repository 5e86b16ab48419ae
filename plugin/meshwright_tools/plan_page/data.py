"""The data of the page: what its JavaScript draws, the plans in words, and the commands that the page gives to copy.

Every listed plan is in the data at every setting, as compact JSON.
"""

from __future__ import annotations

import base64
import itertools
import json
import zlib
from collections.abc import Callable, Hashable, Sequence

from meshwright.mesh.rank_grid import AXES
from meshwright.plan.schedule import stages_of_rank
from meshwright.printable import shell_word
from meshwright_plan.answers import explain
from meshwright_plan.job.candidate import Candidate, stage_layers
from meshwright_plan.machine.devices import CATALOGUE, spec_of
from meshwright_plan.memory.peak import Memory
from meshwright_plan.search.search import SIMPLER, Search, complexity
from meshwright_tools.plan_page.listing import Listed, Point, drawn_points
from meshwright_tools.plan_page.render import HATCHED, PART_OF_AXIS
from meshwright_tools.plan_page.settings import Elsewhere, Outcome, PageSettings, StageWork

_MIB = 2**20
_HEAD, _TAIL = 7, 3  # bars at each end of a long pipeline; between them, only the fullest stage has one


class _Table:
    """A list without duplicates: each entry is stored once, and named by its index."""

    def __init__(self) -> None:
        self.entries: list[object] = []
        self._indices: dict[Hashable, int] = {}

    def index(self, key: Hashable, entry: Callable[[], object]) -> int:
        """Return the index of the entry with this key; a new key makes an entry."""
        if key not in self._indices:
            self._indices[key] = len(self.entries)
            self.entries.append(entry())
        return self._indices[key]


def page_data(
    settings: PageSettings,
    plans: Sequence[Listed | Elsewhere],
    points: Sequence[Point],
    front: Sequence[Point],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, object]:
    """Return the data of an answer of the page, whose numbers are MiB and milliseconds.

    Args:
        settings: the outcome of a search, and the sliders.
        plans: the plans of the table.
        points, front: result of ``pareto``.
        progress: a function that is called with the number of settings computed so far, and their total number.
    """
    found, sliders = settings.found, settings.ranges
    simplest = sorted({complexity(listed.plan) for listed in plans})
    tables = {name: _Table() for name in ("words", "ranks", "rows", "labels", "memories", "works", "reasons")}
    total, done = len(plans) * sliders.count, 0
    rows = []
    for listed in plans:
        outcomes = []
        for outcome in settings.outcomes(listed.plan):
            outcomes.append(_point(outcome, tables))
            done += 1
            progress(done, total)
        label = tables["labels"].index(listed.plan.label, lambda plan=listed.plan: _label(plan, tables))  # type: ignore[misc]
        about = {"label": label, "simple": simplest.index(complexity(listed.plan)), "points": outcomes}
        rows.append({**_plan(found, listed), **about})
    cluster, job, profile = found.cluster, found.job, found.profile
    return {
        "device": {"name": cluster.device.name, "memory": _mib(cluster.device.memory), "flops": cluster.device.flops},
        "gpusPerNode": cluster.gpus_per_node,
        "budget": _mib(found.budget),
        "layers": found.shape.layers,
        "band": profile.band,
        "tie": explain.TIE,
        "within": found.within,
        "sliders": {"batch": sliders.batches, "length": sliders.lengths, "gpus": sliders.gpus, "micro": sliders.micro},
        "planned": settings.planned,
        "flopsPerToken": [found.shape.flops(length, lora=job.lora) for length in sliders.lengths],
        "memoryParts": [name for name in Memory.__dataclass_fields__ if name != "stage"],
        "timeParts": list(found.choices[0].time.parts),
        "hatched": sorted(HATCHED),
        "axes": PART_OF_AXIS,
        "precision": job.precision,
        "plans": rows,
        "points": _dots(found, points, front, tables["words"]),
        **{name: table.entries for name, table in tables.items()},
    }


def packed(data: object) -> str:
    """Return JSON, compressed, as base64. A browser unpacks it, and no text in it can be markup."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def _plan(found: Search, listed: Listed | Elsewhere) -> dict[str, object]:
    plan = listed.plan
    return {
        "why": listed.why,
        **plan.sizes_beside_dp,
        "ep": plan.ep,
        "context": plan.context if plan.ulysses is None else f"{plan.context}-{plan.ulysses}",
        "schedule": plan.schedule,
        "chunks": plan.stages_per_rank,
        "stages": stage_layers(plan, found.shape),
        "held": [stages_of_rank(plan.schedule, rank, plan.pp, plan.stages_per_rank) for rank in range(plan.pp)],
        "zero": plan.zero_stage,
        "rounds": found.job.rounds_updates(plan),
        "runs": found.runs_today(plan),
    }


def _point(outcome: Outcome | str, tables: dict[str, _Table]) -> object:
    """Return a plan at a setting: the index of the reason against it, or the indices of its parts and its times."""
    if isinstance(outcome, str):
        return tables["reasons"].index(outcome, lambda: outcome)
    plan = outcome.plan
    label = tables["labels"].index(plan.label, lambda: _label(plan, tables))
    memory = tables["memories"].index(outcome.memory, lambda: _memory(outcome.memory))
    if outcome.time is None or outcome.work is None:
        return [label, memory]
    work = outcome.work
    times = [_milliseconds(value) for value in outcome.time.parts.values()]
    return [label, memory, tables["works"].index(work, lambda: _work(work)), *times]


def _label(plan: Candidate, tables: dict[str, _Table]) -> list[object]:
    ranks, rows = describe_ranks(plan), describe_rows(plan)
    return [
        _coded(plan.label, tables["words"]),
        tables["ranks"].index(ranks, lambda: ranks),
        tables["rows"].index(rows, lambda: rows),
        plan.dp,
        plan.replicate if plan.zero_stage else 1,
        plan.micro_batch_size,
        plan.gradient_accumulation_steps,
    ]


def _coded(label: str, words: _Table) -> list[int]:
    """Return the indices of a label's words, since most labels share theirs."""
    return [words.index(word, lambda word=word: word) for word in label.split()]  # type: ignore[misc]


def _memory(groups: Sequence[tuple[int, int, Memory]]) -> list[object]:
    """Return (first stage, last stage, parts) of each bar; for stages without a bar, their least and largest memory."""
    fullest = max(range(len(groups)), key=lambda index: groups[index][2].total)
    shown = {*range(_HEAD), fullest, *range(len(groups) - _TAIL, len(groups))}
    if len(groups) <= _HEAD + _TAIL + 2:
        shown = set(range(len(groups)))
    rows: list[object] = []
    for is_shown, run in itertools.groupby(range(len(groups)), lambda index: index in shown):
        members = [groups[index] for index in run]
        if is_shown:
            rows += [[first, last, [_mib(value) for value in each.parts.values()]] for first, last, each in members]
        else:
            totals = [_mib(each.total) for _, _, each in members]
            rows.append([members[0][0], members[-1][1], [min(totals), max(totals)]])
    return rows


def _work(work: StageWork) -> list[object]:
    return [
        [_milliseconds(value) for value in work.layer],
        [_milliseconds(value) for value in work.head],
        _milliseconds(work.transfer),
        _milliseconds(work.shared),
        [_short(value) for value in work.shares],
        _short(work.again),
        [[phase, int(is_repeated), _milliseconds(whole), _milliseconds(exposed)]
         for phase, is_repeated, whole, exposed in work.data],
    ]  # fmt: skip


def _dots(found: Search, points: Sequence[Point], front: Sequence[Point], words: _Table) -> dict[str, object]:
    """Return the plans of the diagram of memory against time: those to draw, and the front."""
    drawn = drawn_points(found, points)
    return {
        "count": len(points),
        "slower": sum(point.time > drawn.slowest for point in points),
        "memory": [round(point.memory / _MIB) for point in drawn.points],
        "time": [_milliseconds(point.time) for point in drawn.points],
        "label": [_coded(point.plan.label, words) for point in drawn.points],
        "bound": [index for index, point in enumerate(drawn.points) if not point.exact],
        "front": [[_mib(point.memory), _milliseconds(point.time), point.plan.label] for point in front],
    }


def _mib(value: float) -> float:
    return _trimmed(round(value / _MIB, 1))


def _milliseconds(value: float) -> float:
    return _short(1e3 * value)


def _short(value: float) -> float:
    """Return a number with six digits, which is more than a picture or a text shows."""
    return _trimmed(float(f"{value:.6g}"))


def _trimmed(value: float) -> float:
    return int(value) if value == int(value) else value


def describe_plan(plan: Candidate) -> str:
    """Return a plan in words.

    Example:
        >>> describe_plan(Candidate(dp=8, tp=2, zero_stage=1, gradient_accumulation_steps=4))
        '8 data-parallel x 2 tensor-parallel ranks, ZeRO-1, 4 micro-batches of 1 sequence'
    """
    return f"{describe_ranks(plan)}, {describe_rows(plan)}"


def describe_ranks(plan: Candidate) -> str:
    """Return the first part of ``describe_plan``, which the micro-batches do not change."""
    axes = [f"{size} {AXES[axis]}-parallel" for axis, size in plan.sizes.items() if size > 1] or ["one"]
    sequence = " with sequence parallelism" if plan.sequence_parallel else ""
    zero = f"ZeRO-{plan.zero_stage}" if plan.zero_stage else "no ZeRO"
    schedule = ""
    if plan.pp > 1:
        chunks = f" with {plan.stages_per_rank} stages on each rank" if plan.stages_per_rank > 1 else ""
        schedule = f", schedule {plan.schedule}{chunks}"
    ranks = "rank" if plan.world_size == 1 else "ranks"
    experts = f", experts over {plan.ep} ranks" if plan.ep > 1 else ""
    return f"{' x '.join(axes)} {ranks}{sequence}{experts}{schedule}, {zero}"


def describe_rows(plan: Candidate) -> str:
    """Return the second part of ``describe_plan``: the micro-batches and what is recomputed."""
    count, size = plan.gradient_accumulation_steps, plan.micro_batch_size
    batches = "one micro-batch" if count == 1 else f"{count} micro-batches"
    again = {"none": "", "selective": ", attention recomputed", "full": ", all layers recomputed"}.get(
        plan.recompute, f", recompute {plan.recompute}"
    )
    if plan.recomputed_layers is not None:
        again = f", {plan.recomputed_layers} layer{'s' if plan.recomputed_layers > 1 else ''} of each stage recomputed"
    return f"{batches} of {size} sequence{'s' if size > 1 else ''}{again}"


def launch_command(plan: str, nodes: int) -> str:
    """Return the command that runs a script under a plan in words.

    Example:
        >>> launch_command("dp2 tp2", 1)
        'meshwright launch --plan "dp2 tp2" train.py'
    """
    machines = f"--num_machines {nodes} --machine_rank $RANK --main_process_ip $HOST " if nodes > 1 else ""
    return f'meshwright launch {machines}--plan "{plan}" train.py'


def plan_command(found: Search, model: str, profile: str | None = None) -> str:
    """Return the command that plans another job, with fields in braces for the page's sliders.

    Args:
        found: the outcome of a search.
        model: the value of ``--model``.
        profile: the value of ``--profile``; None for a search without one.
    """
    cluster, job = found.cluster, found.job
    device, is_known = "", CATALOGUE.get(cluster.device.name) == cluster.device
    if found.profile.device is None:
        device = f" --gpu {cluster.device.name}" if is_known else f" --gpu-spec {shell_word(spec_of(cluster.device))}"
    device += "" if profile is None else f" --profile {shell_word(profile)}"
    device += "" if cluster.slow_link is None else f" --interconnect {8e-9 * cluster.slow_link:g}"
    is_usual = cluster.gpus_per_node == 8 and found.profile.device is None  # a profile's own number of devices differs
    in_node = "" if is_usual else f" --gpus-per-node {cluster.gpus_per_node}"
    precision = "" if job.precision == "bf16" else f" --precision {job.precision}"
    options = "" if job.expert_load == 1 else f" --expert-load {job.expert_load:g}"
    options += "" if job.images == 1 else f" --images-per-row {job.images:g}"
    options += "" if job.optimizer == "adamw" else f" --optimizer {job.kind.name}"
    if job.lora is not None:
        options += f" --lora {job.lora.rank}"
        options += "" if job.lora.quantised is None else f" --quantised {job.lora.quantised}"
        options += " --double-quant" * job.lora.double
    share = found.budget / cluster.device.memory
    options += "" if abs(share - 0.9) < 1e-9 else f" --memory {share:.4g}"
    options += " --allow-future" if found.space.allow_future else ""
    options += " --gather-logits" if job.logits == "gathered" else ""
    options += " --simple" if found.within == SIMPLER else ""
    return (
        f"meshwright plan --model {model} --gpus {{gpus}}{device}{in_node} --seq-len {{length}} "
        f"--global-batch {{batch}}{precision}{options} --html plan.html"
    )
