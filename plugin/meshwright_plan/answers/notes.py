"""What is written below a table of plans: notes, warnings, and what would make a plan fit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from meshwright.errors import PlanError
from meshwright_plan.answers.cost import tokens_text
from meshwright_plan.context_cost import shares_keys
from meshwright_plan.formatting import gib
from meshwright_plan.job.adapters import Lora
from meshwright_plan.job.candidate import Candidate, Job
from meshwright_plan.job.shapes import ModelShape
from meshwright_plan.machine.devices import PUBLISHED_TIMES
from meshwright_plan.machine.hardware import Cluster
from meshwright_plan.memory.peak import peak_memory, state_memory
from meshwright_plan.search.search import Choice, Search, search

# Tokens per step of the largest batches of published training runs of dense models (Llama 3: 4 M, later 16 M).
LARGEST_BATCH = 2**24


def batch_warning(job: Job) -> str | None:
    """Return a warning about a batch beyond those of published training runs; None if the batch is not so large.

    Example:
        >>> batch_warning(Job(seq_len=4096, global_batch=65536))[:60]
        'a batch of 65,536 sequences of 4,096 tokens is 268 M tokens '
        >>> batch_warning(Job(seq_len=4096, global_batch=1024)) is None
        True
    """
    if job.tokens <= LARGEST_BATCH:
        return None
    most = max(1, LARGEST_BATCH // job.seq_len)
    return (
        f"a batch of {job.global_batch:,} sequences of {job.seq_len:,} tokens is {tokens_text(job.tokens)} tokens per "
        f"step, but published runs of dense models use at most {tokens_text(LARGEST_BATCH)}. A larger batch needs more "
        f"tokens for the same loss, so the time and cost of a run are higher than here. Write --global-batch {most}"
    )


def band_warning(found: Search) -> str | None:
    """Return a warning if published runs on the device left the band of the catalogue, which is all that is known."""
    name = found.cluster.device.name
    if found.profile.rows or name not in PUBLISHED_TIMES:
        return None
    runs, least, most = PUBLISHED_TIMES[name]
    return (
        f"{runs} published runs on {name} that were compared took {least:g} to {most:g} times as long as estimated. "
        "The error band does not cover that. Times and costs of a run may be off as much. Run meshwright "
        "calibrate --output profile.json on the cluster and pass --profile profile.json"
    )


def warnings_of(found: Search) -> list[str]:
    """Return the warnings about the model, the job and the device."""
    return list(filter(None, (found.shape.assumed, batch_warning(found.job), band_warning(found))))


def expert_line(found: Search, plan: Candidate) -> str:
    """Return the line on the experts of a model under a plan: their numbers, what an exchange sends, and the load."""
    shape, job = found.shape, found.job
    run = next(run for run in shape.runs if run.experts is not None)
    experts, layers = run.experts, sum(run.count for run in shape.runs if run.experts is not None)
    assert experts is not None
    words = f"Experts: {experts.count} in each of {layers} layers, {experts.chosen} for each token"
    if plan.ep == 1:
        return f"{words}; all of them on every rank of a layer"
    tokens = plan.micro_batch_size * job.seq_len / plan.cp / plan.sp
    size = experts.sent_bytes(tokens, plan.ep, job.element_bytes, job.expert_load) * (1 - 1 / plan.ep)
    count = 6 if plan.recompute == "full" else 4
    routing = "balanced routing" if job.expert_load == 1 else "rows of the fullest rank over the mean"
    return (
        f"{words}; {-(-experts.count // plan.ep)} on a rank, which sends {size / 2**20:,.0f} MiB in each of {count} "
        f"exchanges per layer and micro-batch; load {job.expert_load:g} ({routing})"
    )


def merged(choices: Sequence[Choice]) -> list[tuple[Choice, list[Choice]]]:
    """Return the choices that repeat no earlier one, each with the choices that repeat it.

    A plan repeats another one if only the ZeRO stages differ, and time and memory are equal.
    """
    found: list[tuple[Choice, list[Choice]]] = []
    for choice in choices:
        same = next((rest for first, rest in found if _is_repeated(first, choice)), None)
        if same is None:
            found.append((choice, []))
        else:
            same.append(choice)
    return found


def without_repetitions(found: Search, top: int) -> Search:
    """Return a search with at most ``top`` choices, none of which repeats another; ``repetitions`` keeps the others."""
    kept = merged(found.choices)[:top]
    return dataclasses.replace(
        found,
        choices=tuple(choice for choice, _ in kept),
        repetitions=tuple(tuple(other.plan for other in rest) for _, rest in kept),
    )


def measured_notes(shape: ModelShape, job: Job) -> Iterator[str]:
    """Yield what the estimates of mixers and towers rest on, and what they leave out."""
    towers, images = shape.towers, job.images
    if towers is not None and towers.image:
        weights = f"the {towers.elements / 1e6:,.1f} M parameters beside the decoder are whole on every rank of tp"
        if towers.saved is None:
            yield f"{weights}; memory and time have none of their activations: {towers.image}"
        else:
            if images * towers.tokens > job.seq_len:
                yield (
                    f"a sequence of {job.seq_len} tokens cannot hold {images:g} x {towers.image}, which takes "
                    f"{towers.tokens:,} tokens each: use a longer --seq-len, or fewer --images-per-row"
                )
            tower = "and their tower" if job.lora is None else "and the weights of their tower, which is frozen"
            yield (
                f"{weights}; memory counts {images:g} x {towers.image} per sequence, {towers.tokens:,} tokens each, "
                f"{tower}; the time of the tower is not estimated"
            )
    if any(run.measured is not None for run in shape.runs):
        yield "the memory of layers was measured in a pass without values, with torch's own kernels"


def notes(found: Search) -> Iterator[str]:
    """Yield the notes on the first choices: a precision that cannot run, merged plans, and other numerics of ties."""
    yield from measured_notes(found.shape, found.job)
    job, runs = found.job, found.shape.runs
    if job.plain_attention and any(shares_keys(run, x.plan, job.seq_len) for x in found.choices for run in runs):
        yield (
            "on CUDA, attention in float32 with fewer key heads than query heads has no fused kernel: it keeps the "
            "scores of all layers for backward, and is slow. Under bfloat16 autocast it is fused"
        )
    if not found.trains_today:
        what = "experts in " if found.job.trains_today else "in "
        yield (
            f"this version cannot train {what}{found.job.precision} yet: it would run these plans in bf16, and slower"
        )
    elif found.job.precision == "fp8":
        yield (
            "to train in fp8, convert the model before to_distributed, by torchao's convert_to_float8_training, or "
            "launch a script of accelerate with --mixed_precision fp8; otherwise these plans run in bf16, and slower"
        )
        yield (
            "the times are for one scale per tensor (tensorwise); with one per row (rowwise), published runs were 0.8 "
            "to 1.1 times as fast as in 16 bits"
        )
    for number, (choice, rest) in enumerate(zip(found.choices, found.repetitions, strict=False), 1):
        if rest:
            stages = " and ".join(f"zero{plan.zero_stage}" for plan in rest)
            takes = "takes" if len(rest) == 1 else "take"
            yield f"{number}: {stages} in place of zero{choice.plan.zero_stage} {takes} the same time and memory"
    if any(found.job.rounds_updates(choice.plan) for choice in found.choices):
        yield (
            "* zero0 updates the 16-bit weights themselves, so small updates are rounded away; zero1 to zero3 keep "
            "32-bit masters"
        )


def _is_repeated(one: Choice, other: Choice) -> bool:
    return (
        one.plan.copy(zero_stage=0, replicate=1) == other.plan.copy(zero_stage=0, replicate=1)
        and math.isclose(one.time.total, other.time.total, rel_tol=1e-6)
        and math.isclose(one.memory.total, other.memory.total, rel_tol=1e-6)
        and min(one.plan.zero_stage, other.plan.zero_stage) > 0
    )


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
        if job.element_bytes > 2:
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
            offloaded = plan.copy(offload="optimizer")
            is_lean = plan.offload is None and peak_memory(found.shape, offloaded, job).total <= found.budget
            if is_lean and found.space.refuses(offloaded) is None:
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
            space = dataclasses.replace(found.space, cluster=cluster, job=job)
            other = search(space, found.profile, top=1, budget=budget, explains=False)
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
