"""Notes and warnings below a table of plans: what it leaves out, what must be called first, and what may be wrong."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from meshwright.planner.answers.cost import tokens_text
from meshwright.planner.context_cost import shares_keys
from meshwright.planner.job.candidate import Candidate, Job
from meshwright.planner.job.shapes import ModelShape
from meshwright.planner.machine.devices import PUBLISHED_TIMES
from meshwright.planner.search.search import Choice, Search

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
    tokens = plan.micro_batch * job.seq_len / plan.cp / plan.sp
    size = experts.sent_bytes(tokens, plan.ep, job.activation_bytes, job.expert_load) * (1 - 1 / plan.ep)
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
        _without_zero(one.plan) == _without_zero(other.plan)
        and math.isclose(one.time.total, other.time.total, rel_tol=1e-6)
        and math.isclose(one.memory.total, other.memory.total, rel_tol=1e-6)
        and min(one.plan.zero_stage, other.plan.zero_stage) > 0
    )


def _without_zero(plan: Candidate) -> Candidate:
    return dataclasses.replace(plan, zero_stage=0, replicate=1, shard=plan.dp)
