"""The memory of one device at the peak of a training step, part by part."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.planner.activations import Saved, saved_activations
from meshwright.planner.bucket_sizes import BUCKET_BYTES
from meshwright.planner.candidate import Candidate, Job, layers_of
from meshwright.planner.footprint import footprint
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
        stage: index of the pipeline stage.
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


def _saved(shape: ModelShape, plan: Candidate, job: Job) -> Saved:
    """Return the bytes that forward saves for one micro-batch on one context-parallel rank."""
    return saved_activations(shape, plan, seq_len=job.seq_len // plan.cp, element_bytes=job.activation_bytes)


def in_flight(plan: Candidate, stage: int) -> float:
    """Return the number of micro-batches whose activations a stage holds; an interleaved chunk counts 1 / interleave.

    Example:
        >>> in_flight(Candidate(pp=4, accumulation=16), 0)
        4
    """
    if plan.interleave == 1:
        return min(plan.accumulation, plan.pp - stage)
    warm = 2 * (plan.pp - stage - 1) + (plan.interleave - 1) * plan.pp + 1
    return min(plan.accumulation * plan.interleave, warm) / plan.interleave


def runtime_memory(shape: ModelShape, plan: Candidate, job: Job) -> Memory:
    """Return the peak memory of a rank of this version's runtime, with the process and the allocator."""
    held = footprint(shape, plan, seq_len=job.seq_len, element_bytes=job.weight_bytes, cpu=job.on_cpu)
    phase = max(held.peaks, key=lambda name: held.peaks[name])
    rest = held.peak - held.parameters - held.optimizer
    gradients = min(rest, held.gradients if phase == "optimizer" else held.accumulated)
    activations = 0.0 if phase == "optimizer" else min(rest - gradients, held.activations)
    groups = sum(size > 1 for size in (plan.dp, plan.tp))
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
    """Return the peak memory of one rank of a pipeline stage."""
    if job.own_runtime and plan.runs_today:
        return runtime_memory(shape, plan, job)
    t, layers = plan.tp, layers_of(plan, shape.layers)[stage]
    replicated = layers * shape.norm_parameters + shape.hidden
    split = layers * (shape.layer_parameters - shape.norm_parameters)
    first, last = stage == 0, stage == plan.pp - 1
    split += shape.embedding_parameters if first else 0
    if last and (not first or not shape.tied):
        split += shape.vocab * shape.hidden
    elements = split / t + replicated
    sharded = plan.shard * plan.cp if plan.zero_stage else 1
    weights = elements * job.weight_bytes / (sharded if plan.zero_stage >= 3 else 1)
    gradients = elements * job.gradient_bytes / (sharded if plan.zero_stage >= 2 else 1)
    optimizer = elements * _optimizer_bytes(plan, job) / sharded

    saved = _saved(shape, plan, job)
    whole, kept = saved.layer, saved.kept
    again = 0 if plan.recompute != "full" else layers if plan.recomputed is None else min(layers, plan.recomputed)
    activations = in_flight(plan, stage) * (again * kept + (layers - again) * whole)
    working = whole if again else 0.5 * whole
    logits = 0.0
    rows = plan.micro_batch * job.seq_len / plan.cp
    if last:
        # The 16-bit logits, a saved 32-bit copy, and two temporary 32-bit tensors in backward.
        logits = (12 + job.activation_bytes) * rows * shape.vocab / t
    unsharded = 0.0
    if plan.zero_stage >= 3 and sharded > 1:
        unit = max(shape.layer_parameters, shape.vocab * shape.hidden if first or last else 0) / t
        unsharded = 2 * unit * job.weight_bytes + unit * job.gradient_bytes
    step = 4 * elements / sharded  # the 32-bit update of one step, when the activations are already freed
    groups = sum(size > 1 for size in (plan.dp, plan.tp, plan.cp, plan.pp))
    communication = groups * _GROUP + (2 * BUCKET_BYTES if plan.dp > 1 else 0)
    # The backward of the head, the backward of the last layer and the optimizer step peak at different times.
    peak = max(working + activations, logits + activations, step)
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
        slack=_CONTEXT + _SLACK * held,
        stage=stage,
    )


def peak_memory(shape: ModelShape, plan: Candidate, job: Job) -> Memory:
    """Return the memory of the pipeline stage that needs the most.

    Example:
        >>> shape = ModelShape(name="7B", layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008,
        ...                    vocab=32000)
        >>> job = Job(seq_len=4096, global_batch=8)
        >>> plan = Candidate(shard=8, zero_stage=1, recompute="full")
        >>> peak_memory(shape, plan, job).total < peak_memory(shape, Candidate(replicate=8), job).total
        True
    """
    stages = range(plan.pp) if plan.pp <= 2 else (0, 1, plan.pp - 1)
    return max((stage_memory(shape, plan, job, stage) for stage in stages), key=lambda memory: memory.total)


def _optimizer_bytes(plan: Candidate, job: Job) -> int:
    """Return the optimizer's bytes per weight; this runtime has 32-bit copies of 16-bit weights only under ZeRO."""
    if not job.own_runtime:
        return job.optimizer_bytes
    return 2 * job.weight_bytes if plan.zero_stage == 0 else 8 if job.weight_bytes == 4 else 12
