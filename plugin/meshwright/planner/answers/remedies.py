"""Say what would make a plan fit, after the planner itself has found that it would."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from meshwright.errors import PlanError
from meshwright.planner.formatting import gib
from meshwright.planner.job.adapters import Lora
from meshwright.planner.job.candidate import Candidate, Job
from meshwright.planner.machine.hardware import Cluster
from meshwright.planner.memory.peak import peak_memory, state_memory
from meshwright.planner.search.search import Search, search

_GROWTH = 12  # doublings of the cluster to try if no plan fits
_DEVICES_A_SEQUENCE = 128  # largest number of devices that may share one sequence
_SHORTEST = 256  # tokens below which no shorter sequence is tried
_RANK = 16  # rank of the adapters to try
_SIZES = 7  # sizes of the cluster to try between one that is too small and its double


def no_fit(found: Search) -> PlanError:
    """Return the error for a search in which no plan fits, with the missing memory and the changes that would help."""
    plan, memory = found.smallest
    largest = sorted(memory.parts.items(), key=lambda item: -item[1])[:2]
    where = " and ".join(f"{name} {gib(value)}" for name, value in largest)
    return PlanError(
        f"no plan fits: the leanest plan, {plan.label}, needs {gib(memory.total)}, but may fill {gib(found.budget)} of "
        f"each {found.cluster.device.name}, so it needs {gib(memory.total - found.budget)} too much ({where}). "
        f"What would make one fit: {'; '.join(_Remedies(found).all())}"
    )


def masters_line(found: Search) -> list[str]:
    """Return the line on what would make a plan with 32-bit masters fit; nothing if one does."""
    job = found.job
    if not job.prefers_masters or not found.choices or not job.rounds_updates(found.choices[0].plan):
        return []
    remedies = _Remedies(found, keeps_masters=True)
    return [f"   No plan with 32-bit masters fits. What would make one fit: {'; '.join(remedies.few())}"]


class _Remedies:
    """What would make a plan fit, each found by a search.

    Args:
        found: a search without a plan that fits.
        keeps_masters: whether a plan must keep 32-bit masters.
    """

    def __init__(self, found: Search, *, keeps_masters: bool = False):
        self.found, self.keeps_masters = found, keeps_masters
        self.plans: dict[tuple[Cluster, Job], Candidate | None] = {}

    def all(self) -> Iterator[str]:
        found, cluster, job = self.found, self.found.cluster, self.found.job
        yield from self.few()
        shorter = [dataclasses.replace(job, seq_len=length) for length in _halves(job.seq_len)]
        if shorter and self.best(cluster, shorter[-1]):  # if the shortest does not fit, no longer one does
            yield f"--seq-len {next(each.seq_len for each in shorter if self.best(cluster, each))}"
        yield f"devices with {gib(found.smallest[1].total * cluster.device.memory / found.budget)} of memory"

    def few(self) -> Iterator[str]:
        """Yield adapters, the state on the host, and more devices."""
        yield from self.trainings()
        yield from self.offload()
        yield from self.devices()

    def trainings(self) -> Iterator[str]:
        """Yield the adapters with which a plan fits."""
        cluster, job = self.found.cluster, self.found.job
        if job.activation_bytes > 2:
            return
        ways: list[Lora] = []
        if job.lora is None:
            ways.append(Lora(rank=_RANK))
        if job.lora is None or job.lora.quantised is None:
            ways.append(Lora(rank=_RANK if job.lora is None else job.lora.rank, quantised="nf4"))
        for lora in ways:
            if label := self.best(cluster, dataclasses.replace(job, lora=lora)):
                yield f"--lora {lora.rank}{' --quantised nf4' if lora.quantised else ''} ({label})"
                break

    def offload(self) -> Iterator[str]:
        """Yield a plan that fits with the optimizer's state on the host."""
        found, job = self.found, self.found.job
        lean = [found.smallest[0], *(plan for plan, _ in found.binding.values())]
        for plan in sorted((plan for plan in lean if plan.zero_stage and plan.runs_today), key=lambda p: -p.zero_stage):
            offloaded = dataclasses.replace(plan, offload="optimizer")
            if plan.offload is None and peak_memory(found.shape, offloaded, job).total <= found.budget:
                yield offloaded.label
                return

    def devices(self) -> Iterator[str]:
        """Yield the smallest number of devices with which a plan fits, and with which one with masters does."""
        cluster, job, below = self.found.cluster, self.found.job, self.found.cluster.gpus
        for gpus in _more_devices(cluster, job):
            if label := self.best(dataclasses.replace(cluster, gpus=gpus), job):
                for fewer in _between(below, gpus, cluster.gpus_per_node):
                    if least := self.best(dataclasses.replace(cluster, gpus=fewer), job):
                        gpus, label = fewer, least
                        break
                yield f"--gpus {gpus} ({label})"
                if " *" in label:
                    stricter = _Remedies(self.found, keeps_masters=True)
                    stricter.plans = self.plans
                    yield from stricter.devices()
                return
            below = gpus

    def best(self, cluster: Cluster, job: Job) -> str | None:
        """Return the fastest plan that fits, those with masters first; None without one."""
        if (cluster, job) not in self.plans:
            self.plans[cluster, job] = self.searched(cluster, job)
        plan = self.plans[cluster, job]
        if plan is None or not job.rounds_updates(plan):
            return None if plan is None else plan.label
        return None if self.keeps_masters else f"{plan.label} *, without 32-bit masters"

    def searched(self, cluster: Cluster, job: Job) -> Candidate | None:
        """Return the first plan of a search; None if no plan fits."""
        found = self.found
        budget = found.budget * cluster.device.memory / found.cluster.device.memory
        if state_memory(found.shape, job) > cluster.gpus * budget:
            return None  # a search would find none either, but only after it has weighed every plan
        try:
            other = search(found.space(cluster, job), found.profile, top=1, budget=budget, explains=False)
        except PlanError:
            return None
        return other.choices[0].plan if other.choices else None


def _halves(length: int) -> list[int]:
    """Return shorter sequences to try, the longest first, all of which tp can share.

    Example:
        >>> _halves(2048), _halves(6000)
        ([1024, 512, 256], [3000])
    """
    found = []
    while length % 16 == 0 and length > _SHORTEST:
        length //= 2
        found.append(length)
    return found


def _more_devices(cluster: Cluster, job: Job) -> Iterator[int]:
    for doubling in range(1, _GROWTH):
        gpus = cluster.gpus << doubling
        gpus = -(-gpus // cluster.gpus_per_node) * cluster.gpus_per_node if gpus > cluster.gpus_per_node else gpus
        if gpus > job.global_batch * _DEVICES_A_SEQUENCE:
            return
        yield gpus


def _between(low: int, high: int, per_node: int) -> Iterator[int]:
    """Yield sizes of a cluster between two, ascending: whole nodes, or any size inside of one.

    Example:
        >>> list(_between(16, 64, 8)), list(_between(2, 4, 8))
        ([24, 32, 40, 48, 56], [3])
    """
    step = 1 if high <= per_node else per_node
    sizes = range((low // step + 1) * step, high, step)
    yield from sizes[:: max(1, -(-len(sizes) // _SIZES))]
