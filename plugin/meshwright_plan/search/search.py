"""Finds the fastest plans that fit into memory, best first by lower bounds, with the simplest of nearly equal ones in
front.

A slot is a layout of the ranks and a micro-batch size. Each slot gets a lower bound on the time of its pipeline, and
the walk opens the slots in the order of their bounds. Each plan of an opened slot gets a bound that includes its
communication. If the plan may be among the fastest, its memory is computed, and then its time is simulated.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from meshwright.errors import PlanError
from meshwright_plan.job.candidate import Candidate, Job, rank_layers
from meshwright_plan.job.shapes import ModelShape
from meshwright_plan.machine.hardware import Cluster, HardwareProfile
from meshwright_plan.memory.peak import Memory, least_memory, peak_memory
from meshwright_plan.search.space import Space, check_plan
from meshwright_plan.time.layer import StepTime
from meshwright_plan.time.step import StepModel

TIE = 0.03  # relative difference in time below which two plans tie, since runs of one plan differ as much
SIMPLER = 0.10  # time that a simpler plan may cost if it is preferred
BESIDE_DP = ("tp", "cp", "pp", "ep")  # the axes beside dp, each of which makes a plan less simple
_Choice = TypeVar("_Choice", bound="Choice")


def axes_of(plan: Candidate) -> tuple[str, ...]:
    """Return the axes of a plan beside dp.

    Example:
        >>> axes_of(Candidate(dp=4, tp=2))
        ('tp',)
    """
    return tuple(name for name in BESIDE_DP if getattr(plan, name) > 1)


def complexity(plan: Candidate) -> tuple[int, ...]:
    """Return a key that is smaller for a simpler plan.

    It has the axes, uneven or interleaved stages, ZeRO-3, schedule and recompute. Of plans that are alike in these,
    that with fewer micro-batches is simpler: each has overheads of its own, which the estimate counts only in part.

    Example:
        >>> complexity(Candidate(dp=8, zero_stage=1)) < complexity(Candidate(dp=4, tp=2, zero_stage=1))
        True
    """
    uneven = plan.stages is not None and len(set(plan.stages)) > 1
    is_usual, stage = plan.pp == 1 or plan.schedule == "1f1b", plan.zero_stage
    of_pipeline = (int(uneven), plan.stages_per_rank, int(not is_usual))
    again = int(plan.recompute != "none")
    return (len(axes_of(plan)), *of_pipeline, int(stage == 3), again, stage, plan.gradient_accumulation_steps)


def tie_key(plan: Candidate, seconds: float, fastest: float, *, within: float = TIE) -> tuple[Any, ...]:
    """Return a key in whose order plans are chosen: those within a share of the fastest by simplicity, others by time.

    Example:
        >>> tie_key(Candidate(tp=2), 1.0, 1.0) > tie_key(Candidate(), 1.02, 1.0)
        True
    """
    is_close = seconds <= fastest * (1 + within)
    return not is_close, complexity(plan) if is_close else (), seconds


def in_order(choices: Sequence[_Choice], job: Job, *, within: float = TIE) -> list[_Choice]:
    """Return plans in the order in which they are shown.

    Plans without 32-bit masters come last, if the job prefers masters. Of the others, those within a share of the
    fastest are ordered by simplicity, and the rest by time.
    """

    def last(choice: _Choice) -> bool:
        return job.prefers_masters and job.rounds_updates(choice.plan)

    fastest = {kind: min((c.time.total for c in choices if last(c) is kind), default=0.0) for kind in (False, True)}

    def key(choice: _Choice) -> tuple[Any, ...]:
        return last(choice), *tie_key(choice.plan, choice.time.total, fastest[last(choice)], within=within)

    return sorted(choices, key=key)


_Slot = tuple[Candidate, int]  # a layout of the ranks, and a micro-batch size
_Zero = tuple[int, int]


@dataclass(order=True)
class _Entry:
    """A node of the walk: a slot to open, or a plan.

    Args:
        bound: a lower bound on the seconds of every plan below the node.
        order: the number of the slot, of the ZeRO stage, and whether the stages are uneven, which breaks ties.
        plan: the plan; None for a slot.
        slower: the same plan with more recompute, the fastest first.
    """

    bound: float
    order: tuple[int, int, int]
    plan: Candidate | None = field(default=None, compare=False)
    slower: tuple[Candidate, ...] = field(default=(), compare=False)


class BestFirst:
    """A walk through the plans of a space.

    Args:
        space: the plans.
        model: estimates their times.
        budget: memory per device that a plan may fill, in bytes.
    """

    def __init__(self, space: Space, model: StepModel, budget: float):
        self.space, self.model, self.budget = space, model, budget
        self.slots: list[_Slot] = [
            (region, micro) for region in space.regions() for micro in space.micro_batches(region)
        ]
        self.weights: dict[Candidate, Memory] = {}
        self._evens: dict[tuple[_Slot, _Zero], tuple[Candidate, ...]] = {}
        self.simulated = 0

    def count(self) -> int:
        """Return the number of plans, apart from uneven stages and from recompute of some layers."""
        return sum(len(self.space.zero(region)) * len(self.space.recompute(region)) for region, _ in self.slots)

    def weigh(self, plan: Candidate) -> Memory:
        """Return the memory of a plan."""
        if plan not in self.weights:
            self.weights[plan] = peak_memory(self.space.shape, plan, self.space.job)
        return self.weights[plan]

    def fastest(self, top: int) -> list[tuple[Candidate, StepTime]]:
        """Return the fastest plans that fit with their times, best first; with masters first if the job says so."""
        if not self.space.job.prefers_masters:
            return self.fastest_of(top)
        found = self.fastest_of(top, rounds=False)
        return found + self.fastest_of(top - len(found), rounds=True)

    def fastest_of(
        self, top: int, *, rounds: bool | None = None, axes: Collection[str] = BESIDE_DP, slowest: float = math.inf
    ) -> list[tuple[Candidate, StepTime]]:
        """Return the fastest plans that fit, of some.

        Args:
            top: number of plans.
            rounds: whether the plans have no masters; None for plans with and without.
            axes: the axes beside dp that they may have.
            slowest: seconds that a plan may take.
        """
        if top < 1:
            return []
        model, job = self.model, self.space.job
        heap = [
            _Entry(self._bound(slot), (index, -1, 0))
            for index, slot in enumerate(self.slots)
            if set(axes_of(slot[0])) <= set(axes) and self._least(self._leanest(slot)) <= self.budget
        ]
        heapq.heapify(heap)
        best: list[tuple[float, tuple[int, int, int], Candidate, StepTime]] = []
        while heap:
            entry = heapq.heappop(heap)
            if entry.bound > min(slowest, best[-1][0] if len(best) >= top else math.inf):
                break
            if entry.plan is None:
                for inner in self._opened(entry.order[0]):
                    if rounds is None or (inner.plan and job.rounds_updates(inner.plan)) == rounds:
                        heapq.heappush(heap, inner)
            elif self._fits(entry.plan) and self._runs(entry.plan):
                time = model.step(entry.plan, job)
                self.simulated += 1
                best = sorted([*best, (time.total, entry.order, entry.plan, time)], key=lambda item: item[:2])[:top]
            elif entry.slower:
                plan = self._fewest_recomputed(entry.slower[0])
                heapq.heappush(heap, _Entry(model.bound(plan, job), entry.order, plan, entry.slower[1:]))
        return [(plan, time) for seconds, _, plan, time in best if seconds <= slowest]

    def binding(self) -> dict[str, tuple[Candidate, Memory]]:
        """Return each axis value with which no plan fits, and the plan with this value that needs the least memory."""
        fit = {name for plan, memory in self.weights.items() if memory.total <= self.budget for name in _axes(plan)}
        found: dict[str, tuple[Candidate, Memory]] = {}
        by_axis: dict[str, list[Candidate]] = {}
        for slot in self.slots:
            for zero in self.space.zero(slot[0]):
                leanest = self._leanest(slot, zero)
                for name in _axes(leanest):
                    by_axis.setdefault(name, []).append(leanest)
        for name, plans in by_axis.items():
            if name in fit:
                continue
            plans.sort(key=lambda plan: (plan.micro_batch_size, -plan.zero_stage))
            lowest = (float("inf"), 0)  # bytes, and the place in the list, which decides between equal ones
            # Few activations first, since one plan that fits settles the value.
            for least, place in sorted((self._least(plan), place) for place, plan in enumerate(plans)):
                if least > lowest[0]:
                    break
                plan, memory = plans[place], self.weigh(plans[place])
                if memory.total <= self.budget:
                    fit.update(_axes(plan))
                    found.pop(name, None)
                    break
                if (memory.total, place) < lowest:
                    lowest, found[name] = (memory.total, place), (plan, memory)
        return {name: value for name, value in found.items() if name not in fit}

    def _least(self, plan: Candidate) -> float:
        return least_memory(self.space.shape, plan, self.space.job)

    def _runs(self, plan: Candidate) -> bool:
        """Return whether the runtime takes a plan."""
        if (reason := self.space.refuses(plan)) is not None:
            self.space.refused.setdefault(plan.label, reason)
        return reason is None

    def _fits(self, plan: Candidate) -> bool:
        return self.weigh(plan).total <= self.budget

    def _bound(self, slot: _Slot) -> float:
        """Return a lower bound on the times of all plans of a slot."""
        plan = self._even(slot, self.space.zero(slot[0])[0])[0]
        ways = [plan, self.model.balanced(plan, self.space.job) if plan.pp > 1 else None]
        return min(self.model.pipe_bound(way, self.space.job) for way in ways if way is not None)

    def _opened(self, index: int) -> Iterator[_Entry]:
        """Yield the plans of a slot with the least recompute, one for each ZeRO stage, with even and uneven stages."""
        model, job, slot = self.model, self.space.job, self.slots[index]
        for number, zero in enumerate(self.space.zero(slot[0])):
            even = self._even(slot, zero)
            yield _Entry(model.bound(even[0], job), (index, number, 0), even[0], even[1:])
            if even[0].pp > 1:
                first, *slower = (model.balanced(plan, job) for plan in even)
                if first is not None:
                    others = tuple(plan for plan in slower if plan is not None)
                    yield _Entry(model.bound(first, job), (index, number, 1), first, others)

    def _leanest(self, slot: _Slot, zero: _Zero | None = None) -> Candidate:
        """Return the plan of a slot, and of a ZeRO stage, with even stages and the most recompute."""
        return self._even(slot, zero or self.space.zero(slot[0])[0])[-1]

    def _even(self, slot: _Slot, zero: _Zero) -> tuple[Candidate, ...]:
        """Return the plans of a slot and a ZeRO stage with even stages, by kind of recompute, the fastest first."""
        if (slot, zero) not in self._evens:
            (region, micro), space = slot, self.space
            kinds = (space.candidate(region, micro, zero, kind) for kind in space.recompute(region))
            self._evens[slot, zero] = tuple(kinds)
        return self._evens[slot, zero]

    def _fewest_recomputed(self, plan: Candidate) -> Candidate:
        """Return the fitting plan that recomputes the fewest layers, if a plan that recomputes all of them fits."""
        if plan.recompute != "full" or not self._fits(plan) or self.space.refuses(plan.copy(recomputed_layers=1)):
            return plan
        low, high, best = 0, max(rank_layers(plan, self.space.shape)), plan
        while high - low > 1:
            middle = (low + high) // 2
            trial = plan.copy(recomputed_layers=middle)
            if self._fits(trial):
                high, best = middle, trial
            else:
                low = middle
        return best


def _axes(plan: Candidate) -> tuple[str, ...]:
    sizes = (f"{name}={size}" for name, size in plan.sizes_beside_dp.items())
    experts = (f"ep={plan.ep}",) if plan.ep > 1 else ()
    return (*sizes, *experts, f"zero={plan.zero_stage}", f"micro_batch={plan.micro_batch_size}")


TIED = 64  # fastest plans among which the simplest is looked for, so that the first one is the same for any ``top``
HEADROOM = 0.90  # share of the device's memory that a plan may fill; with more, the first unusual batch fails


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One plan with its estimates.

    Args:
        plan: the plan.
        time: the time of a step.
        memory: the memory of the device that needs the most.
        tokens_per_second: tokens per second per device.
        mfu: model FLOPs per second, divided by the peak; causal attention counts half, recompute does not count.
    """

    plan: Candidate
    time: StepTime
    memory: Memory
    tokens_per_second: float
    mfu: float


@dataclass(frozen=True, kw_only=True)
class Search:
    """The outcome of a search.

    Args:
        space: what was searched.
        profile: the coefficients.
        choices: the fastest plans that fit, best first.
        considered: number of legal plans, apart from uneven stages and from recompute of some layers.
        weighed, fitting, simulated: numbers of plans whose memory was estimated, of those that fit, and of plans whose
            time was simulated.
        budget: memory per device that a plan may fill, in bytes.
        smallest: the weighed plan that needs the least memory, of those that run; if none fits, all were weighed.
        binding: for each value that no fitting plan has (such as "tp=1" or "micro_batch=64"), the plan with this value
            that needs the least memory, and its memory.
        repetitions: for each choice, plans with the same time and memory that were left out, if these were looked for.
        within: the share of the fastest plan's time within which simpler plans come first.
    """

    space: Space
    profile: HardwareProfile
    choices: tuple[Choice, ...]
    considered: int
    weighed: int
    fitting: int
    simulated: int
    budget: float
    smallest: tuple[Candidate, Memory]
    binding: dict[str, tuple[Candidate, Memory]]
    repetitions: tuple[tuple[Candidate, ...], ...] = ()
    within: float = 0.0

    @property
    def shape(self) -> ModelShape:
        return self.space.shape

    @property
    def cluster(self) -> Cluster:
        return self.space.cluster

    @property
    def job(self) -> Job:
        return self.space.job

    def runs_today(self, plan: Candidate) -> bool:
        """Whether this version's runtime can run a plan in the precision of the job."""
        return plan.runs_today and self.trains_today

    @property
    def trains_today(self) -> bool:
        """Whether this version's runtime can train the model in the precision of the job; not experts in 8 bits."""
        return self.job.trains_today and not (self.job.precision == "fp8" and self.shape.experts)


def search(
    space: Space,
    profile: HardwareProfile | None = None,
    *,
    top: int = 5,
    budget: float | None = None,
    explains: bool = True,
    within: float | None = None,
) -> Search:
    """Return the fastest plans that fit.

    The search is complete: no legal plan that fits is faster than the returned ones. If a plan fits, the same plan with
    more recompute is slower and is left out.

    Args:
        space: the model, the devices and the job, and which plans to include.
        profile: the coefficients (default: the catalogue's).
        top: number of plans to return.
        budget: memory per device that a plan may fill, in bytes (default: 90 % of the device's memory).
        explains: whether to find out with which values no plan fits, which weighs more plans.
        within: the share of the fastest plan's time within which simpler plans come first. There may be many faster
            plans than the simplest, which is looked for among more plans than ``top``, and among those with one axis
            beside dp at most (default: the fastest plans alone, by their time).

    Raises:
        PlanError: there is no legal plan.
    """
    shape, cluster, job = space.shape, space.cluster, space.job
    profile = profile or HardwareProfile(name="catalogue")
    budget = budget if budget is not None else HEADROOM * cluster.device.memory
    walk = BestFirst(space, StepModel(shape, cluster, profile.coefficients), budget)
    if not walk.slots:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in itertools.islice(space.pruned.items(), 6))
        raise PlanError(
            f"no legal plan for {shape.name} on {cluster.gpus} devices with a global batch of {job.global_batch}: "
            f"{reasons}. Change --global-batch to a multiple of the number of devices, or change --gpus"
        )
    wanted = top if within is None else max(top, TIED)
    choices = [choice_of(space, plan, time, walk.weigh(plan)) for plan, time in walk.fastest(wanted)]
    if within is not None and choices:
        choices = _with_simplest(walk, choices, within, top)
    binding = walk.binding() if explains else {}  # weighs more plans
    return outcome(
        space, profile, budget, choices, walk.weights, binding=binding, considered=walk.count(),
        simulated=walk.simulated, within=within or 0.0,
    )  # fmt: skip


def weigh(
    space: Space, profile: HardwareProfile | None, plans: Sequence[Candidate], *, budget: float | None = None
) -> Search:
    """Return the given plans as the choices of a search, in the given order, whether they fit or not.

    Args:
        space: the model, the devices and the job.
        profile: the coefficients (default: the catalogue's).
        plans: the plans.
        budget: memory per device that a plan may fill, in bytes (default: 90 % of the device's memory).

    Raises:
        PlanError: a plan needs another number of devices, or cannot split the model, or has no estimate.
    """
    shape, cluster, job = space.shape, space.cluster, space.job
    profile = profile or HardwareProfile(name="catalogue")
    budget = budget if budget is not None else HEADROOM * cluster.device.memory
    for plan in plans:
        if plan.world_size != cluster.gpus:
            raise PlanError(
                f"{plan.label} needs {plan.world_size} devices, but --gpus is {cluster.gpus}; write --gpus "
                f"{plan.world_size}, or a plan of {cluster.gpus} devices"
            )
        check_plan(shape, plan)
        if (reason := space.reason_against("tp", plan.tp)) is not None:
            raise PlanError(f"{plan.label}: {reason}")
        if (reason := space.too_narrow(plan.tp)) is not None:
            raise PlanError(f"{plan.label}: {reason}; write a smaller tp, or --precision bf16")
    model = StepModel(shape, cluster, profile.coefficients)
    weights = {plan: peak_memory(shape, plan, job) for plan in plans}
    choices = [choice_of(space, plan, model.step(plan, job), weights[plan]) for plan in plans]
    return outcome(
        space, profile, budget, choices, weights, binding={}, considered=len(weights), simulated=len(weights)
    )


def _with_simplest(walk: BestFirst, choices: Sequence[Choice], within: float, top: int) -> list[Choice]:
    """Return the simplest plan that ties with the fastest ones, and ``top`` of these, in the order of the table."""
    space, job = walk.space, walk.space.job
    first = in_order(choices, job, within=within)[0]
    rounds = job.rounds_updates(first.plan) if job.prefers_masters else None
    alike = [choice for choice in choices if rounds is None or job.rounds_updates(choice.plan) == rounds]
    slowest = (1 + within) * min(choice.time.total for choice in alike)
    fewest = len(axes_of(first.plan))
    found = {choice.plan: choice for choice in choices}
    # A plan with as many axes as the first one is not looked for.
    for axes in ((), *((name,) for name in BESIDE_DP))[: fewest if fewest < 2 else None]:
        for plan, time in walk.fastest_of(len(choices), rounds=rounds, axes=axes, slowest=slowest):
            found.setdefault(plan, choice_of(space, plan, time, walk.weigh(plan)))
    simplest = in_order(list(found.values()), job, within=within)[0]
    return in_order(list({each.plan: each for each in (simplest, *choices[:top])}.values()), job, within=within)


def outcome(
    space: Space,
    profile: HardwareProfile,
    budget: float,
    choices: Iterable[Choice],
    weights: Mapping[Candidate, Memory],
    *,
    binding: dict[str, tuple[Candidate, Memory]],
    considered: int,
    simulated: int,
    within: float = 0.0,
) -> Search:
    """Return the outcome of a search whose weighed plans have the memory ``weights``; the rest is as in ``Search``."""
    leanest = sorted(weights.items(), key=lambda item: item[1].total)
    return Search(
        space=space, profile=profile, choices=tuple(choices), considered=considered, weighed=len(weights),
        fitting=sum(memory.total <= budget for memory in weights.values()), simulated=simulated, budget=budget,
        smallest=next((item for item in leanest if space.refuses(item[0]) is None), leanest[0]), binding=binding,
        within=within,
    )  # fmt: skip


def choice_of(space: Space, plan: Candidate, time: StepTime, memory: Memory) -> Choice:
    """Return a plan with its estimates and the speed that follows from them.

    Args:
        space: the model, the cluster and the job.
        plan, time, memory: the plan and its estimates.
    """
    cluster, job = space.cluster, space.job
    peak = space.shape.flops(job.seq_len, lora=job.lora) * job.tokens / (cluster.device.flops * cluster.gpus)
    speed = job.tokens / time.total / cluster.gpus
    return Choice(plan=plan, time=time, memory=memory, mfu=peak / time.total, tokens_per_second=speed)
