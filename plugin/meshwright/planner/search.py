"""Find the fastest plans that fit into memory.

Every plan that fits gets a lower bound on its step time. A plan is simulated only if its bound is not above the best
times found so far.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.errors import PlanError
from meshwright.planner.breakdown import StepTime
from meshwright.planner.candidate import Candidate, Job, rank_layers
from meshwright.planner.hardware import Cluster, HardwareProfile
from meshwright.planner.memory import Memory, peak_memory
from meshwright.planner.shapes import ModelShape
from meshwright.planner.space import Region, Space
from meshwright.planner.time import StepModel

_HEADROOM = 0.90  # share of the device's memory that a plan may fill; with more, the first unusual batch fails


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
        shape, cluster, job, profile, allow_future, no_stages: the arguments of the search.
        choices: the fastest plans that fit, best first.
        pruned: axis value that was left out -> the reason.
        considered, fitting, simulated: numbers of plans that are legal, that fit, and that were simulated.
        budget: memory per device that a plan may fill, in bytes.
        smallest: the legal plan that needs the least memory, and its memory.
        binding: for each value that no fitting plan has (such as "tp=1" or "micro_batch=64"), the plan with this value
            that needs the least memory, and its memory.
    """

    shape: ModelShape
    cluster: Cluster
    job: Job
    profile: HardwareProfile
    allow_future: bool
    no_stages: str | None
    choices: tuple[Choice, ...]
    pruned: dict[str, str]
    considered: int
    fitting: int
    simulated: int
    budget: float
    smallest: tuple[Candidate, Memory]
    binding: dict[str, tuple[Candidate, Memory]]

    def space(self, cluster: Cluster, job: Job, *, allow_future: bool = False) -> Space:
        """Return the candidates for the same model on another cluster, or for another job."""
        return Space(
            shape=self.shape,
            cluster=cluster,
            job=job,
            allow_future=allow_future or self.allow_future,
            no_stages=self.no_stages,
        )


def search(
    space: Space, profile: HardwareProfile | None = None, *, top: int = 5, budget: float | None = None
) -> Search:
    """Return the fastest plans that fit.

    The search is complete: it covers every legal plan. Two rules save work without changing the answer. If a plan fits,
    the same plan with more recompute is slower and is skipped. A plan is not simulated if its lower bound is above
    the times of the best plans found so far.

    Args:
        space: the model, the devices and the job, and which plans to include.
        profile: the coefficients (default: the catalogue's).
        top: number of plans to return.
        budget: memory per device that a plan may fill, in bytes (default: 90 % of the device's memory).

    Raises:
        PlanError: there is no legal plan.
    """
    shape, cluster, job = space.shape, space.cluster, space.job
    profile = profile or HardwareProfile(name="catalogue")
    budget = budget if budget is not None else _HEADROOM * cluster.device.memory
    model = StepModel(shape, cluster, profile.coefficients)
    considered = 0
    bounded: list[tuple[float, int, Candidate, Memory]] = []
    tightest: dict[str, tuple[Candidate, Memory]] = {}
    fits: set[str] = set()
    for region in space.regions():
        for plan, memory, weighed in _fitting(space, region, budget):
            considered += weighed
            is_fit = memory.total <= budget
            for name in _axes(plan):
                if is_fit:
                    fits.add(name)
                if name not in tightest or memory.total < tightest[name][1].total:
                    tightest[name] = (plan, memory)
            if is_fit:
                bounded.append((model.bound(plan, job), len(bounded), plan, memory))
                uneven = model.balanced(plan, job) if plan.pp > 1 else None
                if uneven is not None:
                    considered += 1
                    memory = peak_memory(shape, uneven, job)
                    if memory.total <= budget:
                        bounded.append((model.bound(uneven, job), len(bounded), uneven, memory))
    if not considered:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in itertools.islice(space.pruned.items(), 6))
        raise PlanError(
            f"no legal plan for {shape.name} on {cluster.gpus} devices with a global batch of {job.global_batch}: "
            f"{reasons}. Change --global-batch to a multiple of the number of devices, or change --gpus"
        )

    fitting = len(bounded)
    heapq.heapify(bounded)
    best: list[tuple[float, int, Candidate, Memory, StepTime]] = []
    simulated = 0
    while bounded:
        bound, index, plan, memory = heapq.heappop(bounded)
        if len(best) >= top and bound > best[-1][0]:
            break
        time = model.step(plan, job)
        simulated += 1
        best = sorted([*best, (time.total, index, plan, memory, time)], key=lambda item: item[:2])[:top]
    peak = shape.flops(job.seq_len) * job.tokens / (cluster.device.flops * cluster.gpus)
    return Search(
        shape=shape,
        cluster=cluster,
        job=job,
        profile=profile,
        allow_future=space.allow_future,
        no_stages=space.no_stages,
        choices=tuple(
            Choice(
                plan=plan, time=time, memory=memory, mfu=peak / total,
                tokens_per_second=job.tokens / total / cluster.gpus,
            )
            for total, _, plan, memory, time in best
        ),
        pruned=space.pruned,
        considered=considered,
        fitting=fitting,
        simulated=simulated,
        budget=budget,
        smallest=min(tightest.values(), key=lambda item: item[1].total),
        binding={name: value for name, value in tightest.items() if name not in fits},
    )  # fmt: skip


def _fitting(space: Space, region: Region, budget: float) -> Iterator[tuple[Candidate, Memory, int]]:
    """Yield (plan, memory, number of plans tried) for each micro-batch size and ZeRO stage of a region.

    The plan has the fastest kind of recompute that fits or, if none fits, the kind that needs the least memory.
    """
    shape, job = space.shape, space.job
    for micro in space.micro_batches(region):
        any_fits = False
        for zero in space.zero(region):
            weighed = 0
            for kind in space.recompute(region):
                plan = space.candidate(region, micro, zero, kind)
                memory = peak_memory(shape, plan, job)
                weighed += 1
                if memory.total <= budget:
                    break
            if memory.total <= budget and plan.recompute == "full" and space.allow_future:
                plan, memory, more = _fewest_recomputed(space, plan, memory, budget)
                weighed += more
            any_fits = any_fits or memory.total <= budget
            yield plan, memory, weighed
        if not any_fits:
            return  # a larger micro-batch needs even more memory


def _fewest_recomputed(space: Space, plan: Candidate, memory: Memory, budget: float) -> tuple[Candidate, Memory, int]:
    """Return the fitting plan that recomputes the fewest layers, its memory, and the number of plans tried.

    Each recomputed layer takes time.
    """
    low, high, weighed = 0, max(rank_layers(plan, space.shape.layers)), 0
    best = (plan, memory)
    fields = vars(plan)
    while high - low > 1:
        middle = (low + high) // 2
        trial = Candidate(**{**fields, "recomputed": middle})
        needed = peak_memory(space.shape, trial, space.job)
        weighed += 1
        if needed.total <= budget:
            high, best = middle, (trial, needed)
        else:
            low = middle
    return (*best, weighed)


def _axes(plan: Candidate) -> tuple[str, ...]:
    return (
        f"tp={plan.tp}",
        f"cp={plan.cp}",
        f"pp={plan.pp}",
        f"zero={plan.zero_stage}",
        f"micro_batch={plan.micro_batch}",
    )
