"""The memory of one device at the peak of a training step, part by part."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from meshwright.plan.context_methods import local_tokens
from meshwright.plan.flat_offsets import IN_FLIGHT
from meshwright.plan.schedule import most_held, rank_of_stage, stages_of_rank
from meshwright.planner.activations import Saved, saved_activations
from meshwright.planner.bucket_sizes import BUCKET_BYTES
from meshwright.planner.candidate import Candidate, Job, count_recomputed, rank_layers, stage_layers
from meshwright.planner.context_memory import attention_memory, embedding_memory
from meshwright.planner.footprint import footprint
from meshwright.planner.head_memory import after_head, head_peak, saved_by_head
from meshwright.planner.shapes import ModelShape

_CONTEXT = 0.6e9  # bytes of the device's context and kernels
_GROUP = 0.15e9  # bytes of the buffers of one communicator
_PROCESS = 0.4e9  # bytes of Python, torch and transformers
_SLACK = 0.03  # unfilled parts of the allocator's blocks, relative to the allocated memory


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory of one device at the peak, in bytes; the parts add up to ``total``.

    Args:
        weights: the weights as the layers read them.
        gradients: the gradients of the weights.
        optimizer: the optimizer state, including the 32-bit copy of the weights.
        activations: the tensors that forward saves for backward, for all micro-batches in flight.
        logits: the tensors of the head and the loss at their peak.
        unsharded: the layers that ZeRO-3 has gathered.
        working: the temporary tensors of the running layer and of the optimizer step.
        communication: the communicators and the gradient buckets.
        slack: the device's context, and the unfilled parts of the allocator's blocks.
        stage: the rank in the pipeline.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    unsharded: float
    working: float
    communication: float
    slack: float
    stage: int = 0

    @property
    def total(self) -> float:
        held = self.weights + self.gradients + self.optimizer + self.activations + self.logits
        return held + self.unsharded + self.working + self.communication + self.slack

    @property
    def parts(self) -> dict[str, float]:
        return {name: value for name, value in vars(self).items() if name != "stage"}


def layer_activations(shape: ModelShape, plan: Candidate, job: Job) -> float:
    """Return the bytes that one layer's forward saves for one micro-batch, without recompute.

    Example:
        >>> shape = ModelShape(name="7B", layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008,
        ...                    vocab=32000)
        >>> saved = layer_activations(shape, Candidate(), Job(seq_len=2048, global_batch=1))
        >>> round(saved / (2048 * 4096), 2)
        45.53
    """
    return _saved(shape, plan, job).layer


def layer_checkpoint(shape: ModelShape, plan: Candidate, job: Job) -> float:
    """Return the bytes of a layer's input, which is all that full recompute saves."""
    return _saved(shape, plan, job).kept


def least_memory(shape: ModelShape, plan: Candidate, job: Job) -> float:
    """Return a lower bound on ``peak_memory(shape, plan, job).total`` that costs little.

    It counts what one virtual stage saves for one micro-batch and the layer that backward recomputes. It leaves out the
    weights and the optimizer state, which ``state_memory`` bounds for all devices together.

    Example:
        >>> shape = ModelShape(name="7B", layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008,
        ...                    vocab=32000)
        >>> plan, job = Candidate(pp=4, accumulation=8), Job(seq_len=4096, global_batch=8)
        >>> 0.1 < least_memory(shape, plan, job) / peak_memory(shape, plan, job).total < 1
        True
    """
    saved = _saved(shape, plan, job)
    # If stages are even, ``peak_memory`` includes the first rank, but may leave out the rank of the longest stage.
    count = max(plan.stages) if plan.stages else stage_layers(plan, shape.layers)[0]
    if plan.recompute != "full":
        return count * saved.layer
    return count * saved.kept + (saved.layer - saved.kept if plan.recomputed is None else 0.0)


def _saved(shape: ModelShape, plan: Candidate, job: Job) -> Saved:
    """Return the bytes that forward saves for one micro-batch."""
    layout = Candidate(
        tp=plan.tp, sequence_parallel=plan.sequence_parallel, cp=plan.cp, context=plan.context, ulysses=plan.ulysses,
        micro_batch=plan.micro_batch,
    )  # fmt: skip
    return _saved_by_layout(shape, layout, job.seq_len, job.activation_bytes)


@lru_cache(maxsize=1024)  # in a search, many plans save the same bytes
def _saved_by_layout(shape: ModelShape, layout: Candidate, seq_len: int, element_bytes: int) -> Saved:
    return saved_activations(shape, layout, seq_len=seq_len, element_bytes=element_bytes)


def pending_weight_grads(shape: ModelShape, plan: Candidate, job: Job) -> float:
    """Return the bytes that one layer holds of a micro-batch of which only the gradients of the weights are missing.

    These are the input of each matmul and the gradient of its output; the rest of the layer is freed before.

    Example:
        >>> shape = ModelShape(name="7B", layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008,
        ...                    vocab=32000)
        >>> job = Job(seq_len=2048, global_batch=1)
        >>> round(pending_weight_grads(shape, Candidate(), job) / (2048 * 4096), 2)
        32.12
    """
    rows, t = plan.micro_batch * job.seq_len / plan.cp, plan.tp
    split = t if plan.sequence_parallel else 1
    query, keys, inner = shape.query_width / t, shape.local_kv_width(t), shape.ffn / t
    inputs = 2 * shape.hidden / split + query + inner
    gradients = query + 2 * keys + inner * (2 if shape.gated else 1) + 2 * shape.hidden / split
    return rows * job.activation_bytes * (inputs + gradients)


def held_activations(shape: ModelShape, plan: Candidate, job: Job, rank: int) -> float:
    """Return the bytes of the activations that a rank of the pipeline holds at most, of all micro-batches in flight.

    Example:
        >>> shape = ModelShape(name="7B", layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008,
        ...                    vocab=32000)
        >>> job = Job(seq_len=2048, global_batch=16)
        >>> held = [held_activations(shape, Candidate(pp=4, accumulation=16), job, rank) for rank in range(4)]
        >>> [value / held[-1] for value in held]
        [4.0, 3.0, 2.0, 1.0]
    """
    saved = _saved(shape, plan, job)
    held = rank_layers(plan, shape.layers)[rank]
    again = count_recomputed(plan, held)
    layer = (again * saved.kept + (held - again) * saved.layer) / max(1, held)  # no layer beside the embedding alone
    pending = pending_weight_grads(shape, plan, job) if plan.splits_backward else 0.0
    p, v = plan.pp, plan.chunks
    if p == 1:
        return held * layer
    counts = stage_layers(plan, shape.layers)
    layers = [counts[stage] for stage in stages_of_rank(plan.schedule, rank, p, v)]
    return max(
        sum(
            count * (active * layer + waiting * pending)
            for count, (active, waiting) in zip(layers, moment, strict=True)
        )
        for moment in _most_held(plan)[rank]
    )


def _most_held(plan: Candidate) -> tuple[tuple[tuple[tuple[int, int], ...], ...], ...]:
    p, m = plan.pp, plan.accumulation
    if plan.schedule == "gpipe":
        return ((((m, 0),),),) * p
    # In the steady state no rank holds more than at the end of its warm-up, so a shorter step holds as much.
    return most_held(plan.schedule, p, plan.chunks, min(m, 2 * p))


def runtime_memory(shape: ModelShape, plan: Candidate, job: Job) -> Memory:
    """Return the peak memory of a rank of this version's runtime, with the process and the allocator."""
    held = footprint(
        shape, plan, seq_len=job.seq_len, element_bytes=job.weight_bytes, cpu=job.on_cpu, logits=job.logits
    )
    phase = max(held.peaks, key=lambda name: held.peaks[name])
    rest = held.peak - held.parameters - held.optimizer
    gradients = min(rest, held.gradients if phase == "optimizer" else held.accumulated)
    activations = 0.0 if phase == "optimizer" else min(rest - gradients, held.activations)
    groups = _groups(plan)
    return Memory(
        weights=held.parameters,
        gradients=gradients,
        optimizer=held.optimizer,
        activations=activations,
        logits=0.0,
        unsharded=0.0,
        working=rest - gradients - activations,
        communication=0.0 if job.on_cpu else groups * _GROUP,
        slack=_PROCESS if job.on_cpu else _CONTEXT + _SLACK * held.peak,
    )


def stage_memory(shape: ModelShape, plan: Candidate, job: Job, stage: int) -> Memory:
    """Return the peak memory of one device of a rank of the pipeline."""
    if job.own_runtime and plan.runs_today and plan.pp == 1:
        return runtime_memory(shape, plan, job)
    t, layers = plan.tp, rank_layers(plan, shape.layers)[stage]
    replicated = layers * shape.norm_parameters + shape.hidden
    split = layers * (shape.layer_parameters - shape.norm_parameters)
    first, last = stage == 0, stage == rank_of_stage(plan.schedule, plan.pp * plan.chunks - 1, plan.pp)
    split += shape.embedding_parameters if first else 0
    if last and (not first or not shape.tied):
        split += shape.vocab * shape.hidden
    elements = split / t + replicated
    sharded = plan.shard * plan.cp if plan.zero_stage else 1
    weights = elements * job.weight_bytes / (sharded if plan.zero_stage >= 3 else 1)
    # This runtime sums the gradients of a pipeline's micro-batches in 32 bits.
    per_gradient = max(job.gradient_bytes, 4) if job.own_runtime and plan.pp > 1 else job.gradient_bytes
    gradients = elements * per_gradient / (sharded if plan.zero_stage >= 2 else 1)
    optimizer = elements * _optimizer_bytes(plan, job) / sharded

    saved = _saved(shape, plan, job)
    # When the backward of the last recomputed layer begins, the layers after it are freed already.
    again = count_recomputed(plan, layers) == layers
    activations = held_activations(shape, plan, job, stage)
    working = saved.layer if again else 0.5 * saved.layer
    if job.own_runtime:
        sizes_of_cp = {"seq_len": job.seq_len, "element_bytes": job.activation_bytes}
        working += max(attention_memory(shape, plan, **sizes_of_cp)) + embedding_memory(shape, plan, **sizes_of_cp)
    logits = 0.0
    rows = plan.micro_batch * job.seq_len / plan.cp
    if last and job.own_runtime and plan.schedule != "gpipe":
        sizes = shape, plan, plan.micro_batch * local_tokens(job.seq_len, plan.cp), job.activation_bytes
        logits = head_peak(*sizes, cpu=job.on_cpu, logits=job.logits)
        if job.logits != "chunked":
            logits = max(logits, saved_by_head(*sizes, job.logits) + after_head(*sizes, job.logits))
    elif last:
        # The 16-bit logits, a saved 32-bit copy, and two temporary 32-bit tensors in backward.
        logits = (12 + job.activation_bytes) * rows * shape.vocab / t
    unsharded = 0.0
    if plan.zero_stage >= 3 and sharded > 1:
        unit = max(shape.layer_parameters, shape.vocab * shape.hidden if first or last else 0) / t
        unsharded = 2 * unit * job.weight_bytes + unit * job.gradient_bytes
    step = 4 * elements / sharded  # the 32-bit update of one step, when the activations are already freed
    buckets = 2 * BUCKET_BYTES if plan.data_ranks > 1 else 0
    communication = 0.0 if job.on_cpu else _groups(plan) * _GROUP + buckets
    # The backward of the head, the backward of the last layer and the optimizer step peak at different times.
    peak = max(working + activations, logits + activations, step)
    if job.own_runtime and plan.pp > 1:
        passed = activations + working + _new_gradients(shape, plan, job, stage, elements)
        peak = max(peak, passed, _reduction(plan, job, elements))
    rest = peak - activations if peak > activations else 0.0
    is_logits = logits >= working
    held = weights + gradients + optimizer + unsharded + peak + communication
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=min(activations, peak),
        logits=rest if is_logits else 0.0,
        unsharded=unsharded,
        working=0.0 if is_logits else rest,
        communication=communication,
        slack=_PROCESS if job.on_cpu else _CONTEXT + _SLACK * held,
        stage=stage,
    )


def _new_gradients(shape: ModelShape, plan: Candidate, job: Job, stage: int, elements: float) -> float:
    """Return the memory that a backward pass in this runtime's pipeline adds to the sum of earlier gradients.

    At its end, the gradients of a virtual stage exist, and the activations of a micro-batch are free.
    """
    if plan.accumulation == 1:
        return 0.0
    saved = _saved(shape, plan, job)
    held = rank_layers(plan, shape.layers)[stage]
    again = count_recomputed(plan, held)
    freed = (again * saved.kept + (held - again) * saved.layer) / plan.chunks
    return max(0.0, elements / plan.chunks * job.weight_bytes - freed)


def _reduction(plan: Candidate, job: Job, elements: float) -> float:
    """Return the bytes of the buckets that are reduced at the same time over dp, when no activations are left."""
    if plan.data_ranks == 1 or not job.on_cpu:
        return 0.0
    # gloo exchanges copies of the buckets under ZeRO.
    return (2.0 if plan.zero_stage else 1.0) * min(4 * elements, IN_FLIGHT * BUCKET_BYTES)


def peak_memory(shape: ModelShape, plan: Candidate, job: Job) -> Memory:
    """Return the memory of the rank of the pipeline that needs the most.

    Example:
        >>> shape = ModelShape(name="7B", layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008,
        ...                    vocab=32000)
        >>> job = Job(seq_len=4096, global_batch=8)
        >>> plan = Candidate(shard=8, zero_stage=1, recompute="full")
        >>> peak_memory(shape, plan, job).total < peak_memory(shape, Candidate(replicate=8), job).total
        True
    """
    # If stages are as even as possible, the ranks after the second, except the last, need less memory than the second.
    uneven = plan.stages is not None or (plan.chunks > 1 and shape.layers % (plan.pp * plan.chunks))
    stages = range(plan.pp) if plan.pp <= 2 or uneven else (0, 1, plan.pp - 1)
    return max((stage_memory(shape, plan, job, stage) for stage in stages), key=lambda memory: memory.total)


def state_memory(shape: ModelShape, job: Job) -> float:
    """Return the bytes of one copy of the weights and of the optimizer state.

    The devices of any plan hold at least this much together, so no plan fits on fewer bytes.

    Example:
        >>> shape = ModelShape(name="7B", layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008,
        ...                    vocab=32000)
        >>> job = Job(seq_len=4096, global_batch=8)
        >>> plan = Candidate(shard=8, zero_stage=3, recompute="full")
        >>> 0.5 < state_memory(shape, job) / (8 * peak_memory(shape, plan, job).total) < 1
        True
    """
    # Without ZeRO, the optimizer of this runtime has the fewest bytes per weight.
    return shape.parameters * (job.weight_bytes + _optimizer_bytes(Candidate(), job))


def _groups(plan: Candidate) -> int:
    """Return the number of communicators of a rank."""
    parts_of_cp = 2 if plan.context == "hybrid" else 0
    return sum(size > 1 for size in plan.group_sizes.values()) + parts_of_cp


def _optimizer_bytes(plan: Candidate, job: Job) -> int:
    """Return the optimizer's bytes per weight; this runtime has 32-bit copies of 16-bit weights only under ZeRO."""
    if not job.own_runtime:
        return job.optimizer_bytes
    return 2 * job.weight_bytes if plan.zero_stage == 0 else 8 if job.weight_bytes == 4 else 12
