"""Find the fastest plans that fit into memory, and the axis values with which no plan fits."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.errors import PlanError
from meshwright.planner.job.candidate import Candidate, Job
from meshwright.planner.job.shapes import ModelShape
from meshwright.planner.machine.hardware import Cluster, HardwareProfile
from meshwright.planner.memory.peak import Memory
from meshwright.planner.search.best_first import BestFirst
from meshwright.planner.search.simplicity import BESIDE_DP, axes_of, in_order
from meshwright.planner.search.space import Space
from meshwright.planner.time.breakdown import StepTime
from meshwright.planner.time.step import StepModel

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
        shape, cluster, job, profile, allow_future, no_stages, no_tensor: the arguments of the search.
        choices: the fastest plans that fit, best first.
        pruned: axis value that was left out -> the reason.
        considered: number of legal plans, apart from uneven stages and from recompute of some layers.
        weighed, fitting, simulated: numbers of plans whose memory was estimated, of those that fit, and of plans whose
            time was simulated.
        budget: memory per device that a plan may fill, in bytes.
        smallest: the weighed plan that needs the least memory, and its memory; if none fits, all were weighed.
        binding: for each value that no fitting plan has (such as "tp=1" or "micro_batch=64"), the plan with this value
            that needs the least memory, and its memory.
        repetitions: for each choice, plans with the same time and memory that were left out, if these were looked for.
        within: the share of the fastest plan's time within which simpler plans come first.
    """

    shape: ModelShape
    cluster: Cluster
    job: Job
    profile: HardwareProfile
    allow_future: bool
    no_stages: str | None
    no_tensor: str | None
    choices: tuple[Choice, ...]
    pruned: dict[str, str]
    considered: int
    weighed: int
    fitting: int
    simulated: int
    budget: float
    smallest: tuple[Candidate, Memory]
    binding: dict[str, tuple[Candidate, Memory]]
    repetitions: tuple[tuple[Candidate, ...], ...] = ()
    within: float = 0.0

    def runs_today(self, plan: Candidate) -> bool:
        """Whether this version's runtime can run a plan in the precision of the job."""
        return plan.runs_today and self.trains_today

    @property
    def trains_today(self) -> bool:
        """Whether this version's runtime can train the model in the precision of the job; not experts in 8 bits."""
        return self.job.trains_today and not (self.job.precision == "fp8" and self.shape.experts)

    def space(self, cluster: Cluster, job: Job, *, allow_future: bool = False) -> Space:
        """Return the candidates for the same model on another cluster, or for another job."""
        return Space(
            shape=self.shape,
            cluster=cluster,
            job=job,
            allow_future=allow_future or self.allow_future,
            no_stages=self.no_stages,
            no_tensor=self.no_tensor,
        )


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
        for plan, time in walk.fastest_with(axes, len(choices), slowest=slowest, rounds=rounds):
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
    return Search(
        shape=space.shape, cluster=space.cluster, job=space.job, profile=profile, allow_future=space.allow_future,
        no_stages=space.no_stages, no_tensor=space.no_tensor, choices=tuple(choices), pruned=space.pruned,
        considered=considered, weighed=len(weights),
        fitting=sum(memory.total <= budget for memory in weights.values()), simulated=simulated, budget=budget,
        smallest=min(weights.items(), key=lambda item: item[1].total), binding=binding, within=within,
    )  # fmt: skip


def choice_of(of: Space | Search, plan: Candidate, time: StepTime, memory: Memory) -> Choice:
    """Return a plan with its estimates and the speed that follows from them.

    Args:
        of: the space or the search with the model, the cluster and the job.
        plan, time, memory: the plan and its estimates.
    """
    cluster, job = of.cluster, of.job
    peak = of.shape.flops(job.seq_len, lora=job.lora) * job.tokens / (cluster.device.flops * cluster.gpus)
    speed = job.tokens / time.total / cluster.gpus
    return Choice(plan=plan, time=time, memory=memory, mfu=peak / time.total, tokens_per_second=speed)
