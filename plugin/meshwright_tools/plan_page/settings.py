"""The plans at other settings of the page's sliders: batches, sequence lengths, GPUs and micro-batches.

The page holds the planner's own answer for each setting, so that it shows what ``meshwright plan`` would print.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from meshwright.errors import PlanError
from meshwright_plan.job.candidate import Candidate, Job, recomputed_share
from meshwright_plan.memory.peak import Memory, stage_memory, state_memory
from meshwright_plan.search.search import TIE, BestFirst, Search, choice_of
from meshwright_plan.search.space import Space
from meshwright_plan.time.layer import StepTime
from meshwright_plan.time.step import StepModel
from meshwright_tools.plan_page.listing import Listed, in_table_order

_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
_LENGTH_FACTORS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
_MICRO_FACTORS = (0.5, 1.0, 2.0, 4.0)
_SHORTEST = 128  # tokens of the shortest sequence on the slider
_SAME = 2**26  # a smaller difference in bytes is not visible in a bar

_Layout = tuple[object, ...]  # what a plan has in common with the same plan at other settings


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """The values of the sliders; the planned job is among them.

    Args:
        batches: global batch sizes.
        lengths: tokens per sequence.
        gpus: numbers of devices.
        micro: micro-batch sizes, relative to each plan's own.
    """

    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    gpus: tuple[int, ...]
    micro: tuple[float, ...] = _MICRO_FACTORS

    @property
    def count(self) -> int:
        """The number of settings."""
        return math.prod(len(values) for values in vars(self).values())

    def indices(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield the index of each setting on each slider; that of the micro-batch changes fastest."""
        batches, lengths, gpus, micro = (range(len(values)) for values in vars(self).values())
        return itertools.product(batches, lengths, gpus, micro)


def ranges(found: Search) -> Ranges:
    """Return quarters to quadruples of the planned job, and halves to 32-fold lengths, as far as they exist."""
    cluster, job = found.cluster, found.job

    def legal(gpus: int) -> bool:
        try:
            dataclasses.replace(cluster, gpus=gpus)
        except PlanError:
            return False
        return True

    return Ranges(
        batches=_scaled(job.global_batch, 1),
        lengths=_scaled(job.seq_len, min(job.seq_len, _SHORTEST), _LENGTH_FACTORS),
        gpus=tuple(gpus for gpus in _scaled(cluster.gpus, 1) if legal(gpus)),
    )


def _scaled(value: int, least: int, factors: tuple[float, ...] = _FACTORS) -> tuple[int, ...]:
    return tuple(int(value * factor) for factor in factors if value * factor % 1 == 0 and value * factor >= least)


@dataclass(frozen=True, kw_only=True)
class StageWork:
    """Seconds of one micro-batch, from which the page draws the timeline.

    Args:
        layer, head: seconds of forward, of backward and of its weight gradients, for one layer and for the head.
        transfer: seconds to send activations to the next rank of the pipeline.
        shared: seconds by which a transfer slows the compute that runs at the same time.
        shares: share of a layer's time that is tensor and context communication, communication over cp that attention
            hides, and exchanges between ranks that share experts.
        again: share of a backward that is recompute.
        data: (phase, whether for each micro-batch, seconds, exposed seconds) of the communication over dp.
    """

    layer: tuple[float, float, float]
    head: tuple[float, float, float]
    transfer: float
    shared: float
    shares: tuple[float, float, float, float]
    again: float
    data: tuple[tuple[str, bool, float, float], ...]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A plan at one setting.

    Args:
        plan: the plan with the sizes of the setting.
        memory: (first stage, last stage, memory) of each run of pipeline stages with equal memory.
        time: the step; None if the plan does not fit.
        work: what the timeline shows; None if the plan does not fit.
    """

    plan: Candidate
    memory: tuple[tuple[int, int, Memory], ...]
    time: StepTime | None
    work: StageWork | None


@dataclass(kw_only=True)
class PageSettings:
    """Evaluates plans at the settings of the sliders, with the planner's own formulas.

    Args:
        found: the outcome of the search.
        ranges: the values of the sliders.
    """

    found: Search
    ranges: Ranges
    _spaces: dict[tuple[int, int, int], tuple[Space, dict[_Layout, Candidate]]] = field(default_factory=dict)
    _models: dict[int, StepModel] = field(default_factory=dict)
    _weights: dict[tuple[Candidate, int], tuple[tuple[int, int, Memory], ...]] = field(default_factory=dict)

    @property
    def planned(self) -> tuple[int, int, int, int]:
        """The setting of the planned job, as an index on each slider."""
        job, values = self.found.job, self.ranges
        batch, length = values.batches.index(job.global_batch), values.lengths.index(job.seq_len)
        return batch, length, values.gpus.index(self.found.cluster.gpus), values.micro.index(1.0)

    def space_at(self, at: tuple[int, int, int]) -> Space:
        """Return the plans of the job with a batch, a length and a number of GPUs."""
        return self._space(*at)[0]

    def model_at(self, gpus: int) -> StepModel:
        """Return the model of the step on the number of GPUs with an index on the slider."""
        size = self.ranges.gpus[gpus]
        if size not in self._models:
            cluster = dataclasses.replace(self.found.cluster, gpus=size)
            self._models[size] = StepModel(self.found.shape, cluster, self.found.profile.coefficients)
        return self._models[size]

    def outcomes(self, plan: Candidate) -> Iterator[Outcome | str]:
        """Yield a plan at each setting, or the reason why it cannot run there, in the order of ``Ranges.indices``."""
        for setting in self.ranges.indices():
            try:
                yield self.outcome(plan, setting)
            except PlanError as error:
                yield str(error)

    def outcome(self, plan: Candidate, setting: tuple[int, int, int, int]) -> Outcome:
        """Return a plan at one setting.

        Args:
            plan: a plan of the search.
            setting: the index on each slider.

        Raises:
            PlanError: the plan cannot have these sizes.
        """
        at = self.at(plan, setting)
        found, length = self.found, self.ranges.lengths[setting[1]]
        memory = self._memory(at, length)
        if max(each.total for _, _, each in memory) > found.budget:
            return Outcome(plan=at, memory=memory, time=None, work=None)
        model, job = self.model_at(setting[2]), self._job(length)
        return Outcome(plan=at, memory=memory, time=model.step(at, job), work=stage_work(model, at, job))

    def at(self, plan: Candidate, setting: tuple[int, int, int, int]) -> Candidate:
        """Return the plan with the sizes of a setting: another dp and other micro-batches.

        Raises:
            PlanError: the plan cannot have these sizes.
        """
        space, regions = self._space(*setting[:3])
        region = regions.get(_layout(plan))
        if region is None:
            raise PlanError(_missing(plan, space))
        micro = plan.micro_batch_size * self.ranges.micro[setting[3]]
        rows = space.job.global_batch // region.dp
        if micro not in space.micro_batches(region):
            raise PlanError(_no_micro_batch(region, rows, micro))
        ways = [way for way in space.zero(region) if way[0] == plan.zero_stage]
        # A plan that shards its state inside a node alone keeps doing so.
        ways = [way for way in ways if not plan.zero_stage or (way[1] > 1) == (plan.replicate > 1)]
        if not ways:
            raise PlanError(f"zero{plan.zero_stage} has nothing to shard over with {region.dp * region.cp} data rank")
        at = space.candidate(region, int(micro), ways[0], plan.recompute, plan.recomputed_layers)
        return dataclasses.replace(at, stages=plan.stages)

    def _space(self, batch: int, length: int, gpus: int) -> tuple[Space, dict[_Layout, Candidate]]:
        if (batch, length, gpus) not in self._spaces:
            job = dataclasses.replace(
                self.found.job, global_batch=self.ranges.batches[batch], seq_len=self.ranges.lengths[length]
            )
            cluster = dataclasses.replace(self.found.cluster, gpus=self.ranges.gpus[gpus])
            space = dataclasses.replace(self.found.space, cluster=cluster, job=job)
            regions = {_layout(region): region for region in space.regions()}
            self._spaces[batch, length, gpus] = space, regions
        return self._spaces[batch, length, gpus]

    def _job(self, length: int) -> Job:
        """Return the job of a sequence length. The plan holds the batch, and the estimates ask the plan."""
        return dataclasses.replace(self.found.job, seq_len=length)

    def _memory(self, plan: Candidate, length: int) -> tuple[tuple[int, int, Memory], ...]:
        # More micro-batches than these need no more memory.
        enough = 3 if plan.pp == 1 else 3 * plan.pp + plan.gradient_accumulation_steps % plan.pp
        key = plan.copy(gradient_accumulation_steps=min(plan.gradient_accumulation_steps, enough)), length
        if key not in self._weights:
            job = self._job(length)
            self._weights[key] = tuple(
                merged([stage_memory(self.found.shape, key[0], job, stage) for stage in range(plan.pp)])
            )
        return self._weights[key]


def merged(stages: Sequence[Memory]) -> list[tuple[int, int, Memory]]:
    """Return (first stage, last stage, memory) of each run of stages with equal memory."""
    groups: list[tuple[int, int, Memory]] = []
    for stage, memory in enumerate(stages):
        if groups and all(abs(value - groups[-1][2].parts[name]) < _SAME for name, value in memory.parts.items()):
            groups[-1] = (groups[-1][0], stage, groups[-1][2])
        else:
            groups.append((stage, stage, memory))
    return groups


def stage_work(model: StepModel, plan: Candidate, job: Job) -> StageWork:
    """Return what the timeline of a plan shows."""
    layer, head = model.layer(plan, job), model.head(plan, job)
    share = recomputed_share(plan, model.shape)
    backward = layer.backward - (1 - share) * layer.recompute
    forwards, backwards = model.stages(plan, job)
    slowest = max(range(len(forwards)), key=lambda stage: forwards[stage] + backwards[stage])
    transfer = model.transfer(plan, job) if plan.pp > 1 else 0.0
    busy = layer.forward + backward
    return StageWork(
        layer=(layer.forward, backward, layer.weight_grad),
        head=(head.forward, head.backward, head.weight_grad),
        transfer=transfer,
        shared=(1 - model.k.overlap) * transfer,
        shares=(layer.tensor / busy, layer.context / busy, layer.hidden / busy, layer.experts / busy),
        again=share * layer.recompute / backward,
        data=tuple(
            (overlap.phase, overlap.is_repeated, overlap.seconds, overlap.exposed)
            for overlap in model.overlaps(plan, job, forwards[slowest], backwards[slowest])
        ),
    )


def _layout(plan: Candidate) -> _Layout:
    """Return the sizes and the methods of a plan's layout of the ranks, without dp."""
    return *plan.sizes_beside_dp.values(), plan.context, plan.ulysses, plan.ep, plan.schedule, plan.stages_per_rank


def _missing(plan: Candidate, space: Space) -> str:
    """Return why a space has no layout like a plan's."""
    gpus, batch = space.cluster.gpus, space.job.global_batch
    together = plan.world_size // plan.dp
    if gpus % together:
        return f"needs a multiple of {together} GPUs, not {gpus}"
    dp = gpus // together
    method = plan.context if plan.ulysses is None else f"{plan.context}-{plan.ulysses}"
    sizes = [f"{name}={size}" for name, size in plan.sizes_beside_dp.items()]
    for name in (*sizes, f"dp={dp}", f"cp={plan.cp}({method})"):
        if name in space.pruned:
            return f"{name}: {space.pruned[name]}"
    if not (at := plan.copy(dp=dp)).can_share_experts(plan.ep):
        return f"ep={plan.ep} cannot spread over {at.product('dp', 'cp', 'tp')}"
    return f"schedule={plan.schedule} does not exist for {batch // dp} sequences per data-parallel rank"


def _no_micro_batch(region: Candidate, rows: int, micro: float) -> str:
    size = f"micro-batches of {micro:g}"
    if micro < 1 or rows % micro:
        return f"{rows} sequences per data-parallel rank do not split into {size}"
    return f"{rows} sequences in {size} are too few for the {region.pp} stages of pp={region.pp}"


_Setting = tuple[int, int, int]  # the index on the sliders of the batch, the length and the GPUs


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """A plan of the table that cannot run, or does not fit, in the planned job.

    Args:
        plan: the plan at the setting for which it is listed.
        why: the reason for which it is listed.
    """

    plan: Candidate
    why: str


def with_each_length(settings: PageSettings, plans: Sequence[Listed], most: int) -> list[Listed | Elsewhere]:
    """Return the table with a plan that fits at each length of the planned batch and GPUs, if there is one.

    A length at which no plan of the table fits is searched. If there are too many plans, the search's choices stay,
    then the plans of the nearest lengths.

    Args:
        settings: the outcome of a search, and the sliders.
        plans: the plans of the table.
        most: largest number of plans on the table, unless the search has more choices.
    """
    found, (batch, planned, gpus, micro) = settings.found, settings.planned
    chosen = {choice.plan for choice in found.choices}
    kept: list[Listed | Elsewhere] = [each for each in plans if each.plan in chosen]

    def seconds(each: Listed | Elsewhere, length: int) -> float:
        with contextlib.suppress(PlanError):
            if (time := settings.outcome(each.plan, (batch, length, gpus, micro)).time) is not None:
                return time.total
        return math.inf

    for length in sorted(range(len(settings.ranges.lengths)), key=lambda length: abs(length - planned)):
        if any(seconds(each, length) < math.inf for each in kept):
            continue
        fastest = min(plans, key=lambda each: seconds(each, length))
        if seconds(fastest, length) < math.inf:
            kept.append(fastest)
        else:
            at = batch, length, gpus
            kept += [_planned(settings, plan, at) for plan in _faster(settings, at, math.inf, math.inf)]
    rows = [*kept, *(each for each in plans if each not in kept)][: max(most, len(chosen))]
    return _ordered(
        settings,
        [each for each in rows if isinstance(each, Listed)],
        [each for each in rows if isinstance(each, Elsewhere)],
    )


def with_every_setting(
    settings: PageSettings, plans: Sequence[Listed], most: int, progress: Callable[[int, int], None]
) -> tuple[list[Listed | Elsewhere], bool]:
    """Return the table with the plans that a search finds at other settings, and whether none is missing.

    A plan is added if it is more than a tie faster than the fastest of the table at a setting, or if no plan of the
    table fits there. The settings next to the planned one come first.

    Args:
        settings: the outcome of a search, and the sliders.
        plans: the plans of the table.
        most: largest number of plans on the table.
        progress: a function that is called with the number of searches so far, and their total number.
    """
    values, start, job = settings.ranges, settings.planned, settings.found.job
    batches, lengths, gpus = (range(len(of)) for of in (values.batches, values.lengths, values.gpus))
    every: list[_Setting] = sorted(
        itertools.product(batches, lengths, gpus),
        key=lambda at: sum(abs(one - two) for one, two in zip(at, start, strict=False)),
    )
    fastest: dict[tuple[_Setting, bool], float] = {}  # the second: without 32-bit masters, if the job prefers them
    listed: list[Listed] = list(plans)
    elsewhere: list[Elsewhere] = []

    def note(plan: Candidate) -> None:
        for at in every:
            try:
                outcome = settings.outcome(plan, (*at, start[3]))
            except PlanError:
                continue
            if outcome.time is not None:
                key = at, job.prefers_masters and job.rounds_updates(outcome.plan)
                fastest[key] = min(fastest.get(key, math.inf), outcome.time.total)

    for each in plans:
        note(each.plan)
    for number, at in enumerate(every):
        progress(number + 1, len(every))
        for plan in _faster(settings, at, *(fastest.get((at, rounds), math.inf) for rounds in (False, True))):
            if len(listed) + len(elsewhere) >= most:
                return _ordered(settings, listed, elsewhere), False
            note(plan)
            here = _planned(settings, plan, at)
            if isinstance(here, Listed):
                listed.append(here)
            else:
                elsewhere.append(here)
    return _ordered(settings, listed, elsewhere), True


def _faster(settings: PageSettings, at: _Setting, best: float, without_masters: float) -> Iterator[Candidate]:
    """Yield the fastest plan of a setting, if it is more than a tie faster than those of the table.

    Args:
        settings: the search, and the sliders.
        at: the setting.
        best: seconds of the fastest plan of the table; infinite if none fits.
        without_masters: seconds of its fastest plan without 32-bit masters, if the job prefers these.
    """
    space, model, found = settings.space_at(at), settings.model_at(at[2]), settings.found
    if state_memory(found.shape, space.job) > space.cluster.gpus * found.budget:
        return  # no plan fits, but a search would weigh them all
    walk = BestFirst(space, model, found.budget)
    prefers = found.job.prefers_masters
    fastest = walk.fastest_of(1, slowest=best / (1 + TIE), rounds=False if prefers else None)
    if not fastest and prefers and math.isinf(best):
        fastest = walk.fastest_of(1, slowest=without_masters / (1 + TIE), rounds=True)
    for plan, _ in fastest:
        yield plan


def _planned(settings: PageSettings, plan: Candidate, at: _Setting) -> Listed | Elsewhere:
    """Return the row of the fastest plan of another setting."""
    found, values = settings.found, settings.ranges
    batch, length, size = values.batches[at[0]], values.lengths[at[1]], values.gpus[at[2]]
    why = f"fastest at {batch:,} x {length:,} tokens, {size:,} GPU{'s' if size > 1 else ''}"
    try:
        outcome = settings.outcome(plan, settings.planned)
    except PlanError:
        return Elsewhere(plan=plan, why=why)
    if outcome.time is None:
        return Elsewhere(plan=plan, why=why)
    memory = max((memory for _, _, memory in outcome.memory), key=lambda memory: memory.total)
    return Listed(**vars(choice_of(found.space, outcome.plan, outcome.time, memory)), why=why)


def _ordered(
    settings: PageSettings, listed: Sequence[Listed], elsewhere: Sequence[Elsewhere]
) -> list[Listed | Elsewhere]:
    return [*in_table_order(settings.found, listed), *elsewhere]
