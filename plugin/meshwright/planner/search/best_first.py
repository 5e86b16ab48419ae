"""The walk of the search: best first, by lower bounds on the time of a step.

A slot is a layout of the ranks and a micro-batch size. Each slot gets a lower bound on the time of its pipeline, and
the walk opens the slots in the order of their bounds. Each plan of an opened slot gets a bound that includes its
communication. If the plan may be among the fastest, its memory is computed, and then its time is simulated.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

from meshwright.planner.job.candidate import Candidate, rank_layers
from meshwright.planner.memory.peak import Memory, least_memory, peak_memory
from meshwright.planner.search.simplicity import BESIDE_DP, axes_of
from meshwright.planner.search.space import Space
from meshwright.planner.time.breakdown import StepTime
from meshwright.planner.time.step import StepModel

_Slot = tuple[Candidate, int]  # a layout of the ranks, and a micro-batch size
_Zero = tuple[int, int, int]


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
            return self._fastest(top)
        found = self._fastest(top, rounds=False)
        return found + self._fastest(top - len(found), rounds=True)

    def fastest_with(
        self, axes: Collection[str], top: int, *, slowest: float, rounds: bool | None
    ) -> list[tuple[Candidate, StepTime]]:
        """Return the fastest plans that fit and have no axis beside dp but some.

        Args:
            axes: these axes.
            top: number of plans.
            slowest: seconds that a plan may take.
            rounds: whether the plans have no masters; None for plans with and without.
        """
        return self._fastest(top, rounds=rounds, axes=axes, slowest=slowest)

    def _fastest(
        self, top: int, *, rounds: bool | None = None, axes: Collection[str] = BESIDE_DP, slowest: float = math.inf
    ) -> list[tuple[Candidate, StepTime]]:
        """Return the fastest plans, of those that the arguments leave."""
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
            elif self._fits(entry.plan):
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
            plans.sort(key=lambda plan: (plan.micro_batch, -plan.zero_stage))
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
        region, micro = slot
        return tuple(self.space.candidate(region, micro, zero, kind) for kind in self.space.recompute(region))

    def _fewest_recomputed(self, plan: Candidate) -> Candidate:
        """Return the fitting plan that recomputes the fewest layers, if a plan that recomputes all of them fits."""
        if plan.recompute != "full" or not self.space.recomputes_some or not self._fits(plan):
            return plan
        low, high, best = 0, max(rank_layers(plan, self.space.shape)), plan
        while high - low > 1:
            middle = (low + high) // 2
            trial = replace(plan, recomputed=middle)
            if self._fits(trial):
                high, best = middle, trial
            else:
                low = middle
        return best


def _axes(plan: Candidate) -> tuple[str, ...]:
    sizes = (f"{name}={size}" for name, size in plan.sizes_beside_dp.items())
    experts = (f"ep={plan.ep}",) if plan.ep > 1 else ()
    return (*sizes, *experts, f"zero={plan.zero_stage}", f"micro_batch={plan.micro_batch}")
