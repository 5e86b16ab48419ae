"""The memory of one device at the peak of a training step, part by part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from meshwright.plan.parts import IN_FLIGHT, Method
from meshwright.plan.schedule import most_held, rank_of_stage, stages_of_rank
from meshwright_plan.job.candidate import Candidate, Job, count_recomputed, rank_runs, stage_runs
from meshwright_plan.job.layer_shape import LayerShape
from meshwright_plan.job.shapes import ModelShape
from meshwright_plan.memory.activations import (
    Saved,
    after_head,
    attention_memory,
    embedding_memory,
    head_peak,
    saved_activations,
    saved_by_head,
)
from meshwright_plan.memory.footprint import footprint
from meshwright_plan.memory.held_states import (
    BUCKET_BYTES,
    master_bytes,
    optimizer_bytes,
    staged_exchange,
    staged_states,
    whole_states,
)

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


def least_memory(shape: ModelShape, plan: Candidate, job: Job) -> float:
    """Return a lower bound on ``peak_memory(shape, plan, job).total`` that costs little.

    It counts what one virtual stage saves for one micro-batch and the layer that backward recomputes. It leaves out the
    weights and the optimizer state, which ``state_memory`` bounds for all devices together.

    Example:
        >>> shape = ModelShape.of(name="7B", layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008,
        ...                       vocab=32000)
        >>> plan, job = Candidate(pp=4, gradient_accumulation_steps=8), Job(seq_len=4096, global_batch=8)
        >>> 0.1 < least_memory(shape, plan, job) / peak_memory(shape, plan, job).total < 1
        True
    """
    saved = saved_by_stage(shape, plan, job)
    # If stages are even, ``peak_memory`` includes the first rank, but may leave out the rank of the longest stage.
    held = stage_runs(plan, shape)[plan.stages.index(max(plan.stages)) if plan.stages else 0]
    if plan.recompute != "full":
        return sum(saved.held(held, 0))
    again = min(run.layer - run.kept for run in saved.runs) if plan.recomputed_layers is None else 0.0
    return sum(saved.held(held, sum(held))) + again


def saved_by_stage(shape: ModelShape, plan: Candidate, job: Job) -> Saved:
    """Return the bytes that forward saves for one micro-batch, apart from those of the head."""
    ep = plan.ep if job.expert_load > 1 else 1
    layout = plan.tp, plan.sequence_parallel, plan.cp, plan.context, plan.ulysses, ep, plan.micro_batch_size
    return _saved_by_layout(shape, job, *layout)


@lru_cache(maxsize=1024)  # in a search, many plans save the same bytes
def _saved_by_layout(
    shape: ModelShape, job: Job, tp: int, sp: bool, cp: int, context: Method, ulysses: int | None, ep: int, rows: int
) -> Saved:
    layout = Candidate(
        tp=tp, sequence_parallel=sp, cp=cp, context=context, ulysses=ulysses, ep=ep, micro_batch_size=rows
    )  # fmt: skip
    return saved_activations(shape, layout, job)


def pending_weight_grads(layer: LayerShape, plan: Candidate, job: Job) -> float:
    """Return the bytes that one layer holds of a micro-batch of which only the gradients of the weights are missing.

    These are the input of each matmul and the gradient of its output; the rest of the layer is freed before.

    Example:
        >>> layer = LayerShape(count=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008)
        >>> job = Job(seq_len=2048, global_batch=1)
        >>> round(pending_weight_grads(layer, Candidate(), job) / (2048 * 4096), 2)
        32.12
    """
    rows, t = plan.micro_batch_size * job.seq_len / plan.cp, plan.tp
    query, keys, inner = layer.query_width / t, layer.local_kv_width(t), layer.ffn / t
    inputs = 2 * layer.hidden / plan.sp + query + inner
    gradients = query + 2 * keys + inner * layer.mlp_inputs + 2 * layer.hidden / plan.sp
    return rows * job.element_bytes * (inputs + gradients)


def held_activations(shape: ModelShape, plan: Candidate, job: Job, rank: int, saved: Saved | None = None) -> float:
    """Return the bytes of the activations that a rank of the pipeline holds at most, of all micro-batches in flight.

    Args:
        shape, plan, job: the model, the plan and the job.
        rank: the rank.
        saved: what forward saves for one micro-batch, if it is not what ``saved_by_stage`` says.

    Example:
        >>> shape = ModelShape.of(name="7B", layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008,
        ...                       vocab=32000)
        >>> job = Job(seq_len=2048, global_batch=16)
        >>> plan = Candidate(pp=4, gradient_accumulation_steps=16)
        >>> held = [held_activations(shape, plan, job, rank) for rank in range(4)]
        >>> [value / held[-1] for value in held]
        [4.0, 3.0, 2.0, 1.0]
    """
    counts = rank_runs(plan, shape)[rank]
    held = (saved or saved_by_stage(shape, plan, job)).held(counts, count_recomputed(plan, sum(counts)))
    each = [size / max(1, count) for size, count in zip(held, counts, strict=True)]  # no layer beside the embedding
    if plan.pp == 1:
        return sum(count * size for count, size in zip(counts, each, strict=True))
    pending = [pending_weight_grads(run, plan, job) if plan.splits_backward else 0.0 for run in shape.runs]
    stages = stage_runs(plan, shape)
    own = [stages[stage] for stage in stages_of_rank(plan.schedule, rank, plan.pp, plan.stages_per_rank)]
    return max(
        sum(
            count * (active * size + waiting * later)
            for runs, (active, waiting) in zip(own, moment, strict=True)
            for count, size, later in zip(runs, each, pending, strict=True)
        )
        for moment in _most_held(plan)[rank]
    )


def _most_held(plan: Candidate) -> tuple[tuple[tuple[tuple[int, int], ...], ...], ...]:
    p, m = plan.pp, plan.gradient_accumulation_steps
    if plan.schedule == "gpipe":
        return ((((m, 0),),),) * p
    # In the steady state no rank holds more than at the end of its warm-up, so a shorter step holds as much.
    return most_held(plan.schedule, p, plan.stages_per_rank, min(m, 2 * p))


def _whole_memory(shape: ModelShape, plan: Candidate, job: Job) -> Memory:
    """Return the peak memory of a rank without pipeline stages, with the process and the allocator."""
    held = footprint(shape, plan, job)
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
    if plan.runs_today and plan.pp == 1:
        return _whole_memory(shape, plan, job)
    return Stage(shape=shape, plan=plan, job=job, rank=stage).memory()


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One rank of a pipeline, or of a plan that this version cannot run: its memory by a formula for each part."""

    shape: ModelShape
    plan: Candidate
    job: Job
    rank: int

    @cached_property
    def of_layout(self) -> tuple[tuple[float, float], float, float]:
        """What ZeRO and recompute do not change: the parameters, and the bytes of attention and of the logits."""
        known, key = _known_stages(self.shape, self.job), (type(self), self.rank, self.plan.layout)
        if key not in known:
            known[key] = self.count(), self.attention(), self.logits()
        return known[key]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of layers of each run that the rank holds."""
        return rank_runs(self.plan, self.shape)[self.rank]

    @cached_property
    def is_last(self) -> bool:
        plan = self.plan
        return self.rank == rank_of_stage(plan.schedule, plan.pp * plan.stages_per_rank - 1, plan.pp)

    @property
    def shards(self) -> int:
        """The number of ranks over which ZeRO shards."""
        return self.plan.shard * self.plan.cp if self.plan.zero_stage else 1

    @property
    def elements(self) -> tuple[float, float]:
        """The parameters of the rank beside its experts, and of these, before ZeRO shards them."""
        return self.of_layout[0]

    def count(self) -> tuple[float, float]:
        """Return ``elements``."""
        shape, held = self.shape, list(zip(self.counts, self.shape.runs, strict=True))
        replicated = sum(count * (run.norm_parameters + run.router_parameters) for count, run in held) + shape.hidden
        dense = sum(count * run.dense_parameters for count, run in held) + shape.hidden
        split = dense - replicated + (shape.embedding_parameters if self.rank == 0 else 0)
        if self.is_last and (self.rank > 0 or not shape.tied):
            split += shape.outputs * shape.hidden
        experts = sum(count * run.expert_parameters for count, run in held)
        if all(run.held for run in shape.runs):
            split -= sum(count * (run.dense_parameters - run.norm_parameters) for count, run in held)
            layers = (run.held_by(self.plan.tp, self.plan.sequence_parallel) for run in shape.runs)
            replicated = shape.hidden + sum(
                count * sum(numel for numel, _ in weights) for count, weights in zip(self.counts, layers, strict=True)
            )
        if shape.towers is not None and self.rank == 0:
            replicated += shape.towers.elements
        return split / self.plan.tp + replicated, experts / self.plan.ep

    @cached_property
    def trained(self) -> tuple[float, float]:
        """The trained parameters of the rank beside its experts, and of these, before ZeRO shards them."""
        lora, held = self.job.lora, zip(self.counts, self.shape.runs, strict=True)
        if lora is None:
            return self.elements
        return sum(count * lora.elements(run, self.plan.tp) for count, run in held), 0.0

    def kept(self, stage: int) -> float:
        """Return the trained elements of a kind of state that ZeRO shards from a stage on."""
        dense, experts = self.trained
        if self.plan.zero_stage < stage:
            return dense + experts
        return dense / self.shards + experts / self.plan.expert_shard

    def frozen(self) -> float:
        """Return the bytes of the frozen weights, which ZeRO-3 shards unless they are quantised."""
        lora, plan, b = self.job.lora, self.plan, self.job.element_bytes
        if lora is None:
            return 0.0
        held, (dense, experts) = zip(self.counts, self.shape.runs, strict=True), self.elements
        packed = sum(count * lora.packed_elements(run, plan.tp) for count, run in held)
        if plan.zero_stage < 3:
            return lora.frozen_bytes(packed, dense + experts - packed, b)
        return lora.frozen_bytes(packed, (dense - packed) / self.shards + experts / plan.expert_shard, b)

    def states(self) -> float:
        """Return the bytes of the optimizer's state, with the 32-bit masters."""
        shape, plan, job = self.shape, self.plan, self.job
        if plan.offload is not None:
            return 0.0  # the host has it
        if job.optimizer == "adamw":
            return self.kept(1) * optimizer_bytes(plan, job)
        return self.kept(1) * master_bytes(plan, job) + staged_states(shape, plan, job, self.trained, self.kept(1))

    def stepped(self) -> float:
        """Return the bytes of the update of one step, when the activations are already freed."""
        plan, job = self.plan, self.job
        update = 0.0 if plan.offload is not None else 4 * self.kept(1)  # with offload the host has it
        return max(update, staged_exchange(self.shape, plan, job, sum(self.counts)))

    @cached_property
    def saved(self) -> Saved:
        """What forward saves for one micro-batch."""
        return saved_by_stage(self.shape, self.plan, self.job)

    def in_layer(self) -> float:
        """Return the temporary bytes of a layer's backward, beside those of attention."""
        largest = max(run.layer for run in self.saved.runs)
        lora, t, b = self.job.lora, self.plan.tp, self.job.element_bytes
        unpacked = 0.0 if lora is None else max(lora.unpacked(run, t, b) for run in self.shape.runs)
        # When the backward of the last recomputed layer begins, the layers after it are freed already.
        is_whole = count_recomputed(self.plan, sum(self.counts)) == sum(self.counts)
        return unpacked + (largest if is_whole else 0.5 * largest)

    def attention(self) -> float:
        """Return the temporary bytes of attention that is not one fused kernel, and those of whole embeddings."""
        shape, plan, job = self.shape, self.plan, self.job
        return max(max(attention_memory(run, plan, job)) for run in shape.runs) + embedding_memory(shape, plan, job)

    def logits(self) -> float:
        """Return the bytes of the head and the loss at their peak."""
        shape, plan, job = self.shape, self.plan, self.job
        if not self.is_last:
            return 0.0
        if plan.schedule == "gpipe":
            return self.whole_logits()
        logits = head_peak(shape, plan, job)
        if job.logits == "chunked":
            return logits
        return max(logits, saved_by_head(shape, plan, job) + after_head(shape, plan, job))

    def whole_logits(self) -> float:
        """Return the bytes of 16-bit logits, a saved 32-bit copy, and two temporary 32-bit tensors in backward."""
        rows = self.plan.micro_batch_size * self.job.seq_len / self.plan.cp
        return (12 + self.job.element_bytes) * rows * self.shape.outputs / self.plan.tp

    def unsharded(self) -> float:
        """Return the bytes of the layers that ZeRO-3 has gathered."""
        shape, plan, job = self.shape, self.plan, self.job
        if plan.zero_stage < 3 or self.shards == 1:
            return 0.0
        rows = shape.vocab if self.rank == 0 else shape.outputs if self.is_last else 0
        unit = max(rows * shape.hidden / plan.tp, *(sum(run.rank_parameters(plan.tp, plan.ep)) for run in shape.runs))
        return 2 * unit * job.element_bytes + unit * self.gradient_bytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes per gradient of a micro-batch."""
        return self.job.element_bytes

    @property
    def sums_gradients(self) -> bool:
        """Whether backward adds the gradients of each micro-batch to a sum, which is reduced at the end."""
        return self.plan.pp > 1

    def new_gradients(self, elements: float) -> float:
        """Return the memory that a backward in a pipeline adds to the sum of earlier gradients.

        At its end, the gradients of a virtual stage exist, and the activations of a micro-batch are free.
        """
        plan, counts = self.plan, self.counts
        if plan.gradient_accumulation_steps == 1:
            return 0.0
        freed = sum(self.saved.held(counts, count_recomputed(plan, sum(counts)))) / plan.stages_per_rank
        return max(0.0, elements / plan.stages_per_rank * self.job.trained_bytes - freed)

    def memory(self) -> Memory:
        """Return the memory at the peak."""
        plan, job, elements = self.plan, self.job, sum(self.trained)
        weights = self.kept(3) * job.trained_bytes + self.frozen()
        # The gradients of a pipeline's micro-batches are summed in 32 bits.
        gradients = self.kept(2) * (max(self.gradient_bytes, 4) if self.sums_gradients else self.gradient_bytes)
        optimizer, unsharded = self.states(), self.unsharded()
        activations = held_activations(self.shape, plan, job, self.rank, self.saved)
        if self.rank == 0:
            activations += self.saved.towers * min(plan.gradient_accumulation_steps, plan.pp)
        _, attention, logits = self.of_layout
        working = self.in_layer() + attention
        buckets = 2 * BUCKET_BYTES if plan.data_ranks > 1 else 0
        communication = 0.0 if job.on_cpu else _groups(plan) * _GROUP + buckets
        # The backward of the head, the backward of the last layer and the optimizer step peak at different times.
        peak = max(working + activations, logits + activations, self.stepped())
        if self.sums_gradients:
            passed = activations + working + self.new_gradients(elements)
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
            stage=self.rank,
        )


def _reduction(plan: Candidate, job: Job, elements: float) -> float:
    """Return the bytes of the buckets that are reduced at the same time over dp, when no activations are left."""
    if plan.data_ranks == 1 or not job.on_cpu:
        return 0.0
    # gloo exchanges copies of the buckets under ZeRO.
    return (2.0 if plan.zero_stage else 1.0) * min(4 * elements, IN_FLIGHT * BUCKET_BYTES)


def fullest_stages(shape: ModelShape, plan: Candidate) -> Sequence[int]:
    """Return the ranks of a pipeline of which one needs the most memory."""
    # If stages are as even as possible, the ranks after the second, except the last, need less memory than the second.
    uneven = plan.stages is not None or (plan.stages_per_rank > 1 and shape.layers % (plan.pp * plan.stages_per_rank))
    return range(plan.pp) if plan.pp <= 2 or uneven else (0, 1, plan.pp - 1)


def peak_memory(shape: ModelShape, plan: Candidate, job: Job) -> Memory:
    """Return the memory of the rank of the pipeline that needs the most.

    Example:
        >>> shape = ModelShape.of(name="7B", layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008,
        ...                       vocab=32000)
        >>> job = Job(seq_len=4096, global_batch=8)
        >>> plan = Candidate(dp=8, zero_stage=1, recompute="full")
        >>> peak_memory(shape, plan, job).total < peak_memory(shape, Candidate(dp=8), job).total
        True
    """
    known = _known(shape, job)
    if plan not in known:
        stages = (stage_memory(shape, plan, job, stage) for stage in fullest_stages(shape, plan))
        known[plan] = max(stages, key=lambda memory: memory.total)
    return known[plan]


@lru_cache(maxsize=2)
def _known_stages(shape: ModelShape, job: Job) -> dict[object, tuple[tuple[float, float], float, float]]:
    return {}


@lru_cache(maxsize=2)  # for the searches of one question, most of which are about the same job
def _known(shape: ModelShape, job: Job) -> dict[Candidate, Memory]:
    return {}


def state_memory(shape: ModelShape, job: Job) -> float:
    """Return the bytes of one copy of the weights and of the optimizer state.

    The devices of any plan hold at least this much together, so no plan fits on fewer bytes.

    Example:
        >>> shape = ModelShape.of(name="7B", layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008,
        ...                       vocab=32000)
        >>> job = Job(seq_len=4096, global_batch=8)
        >>> plan = Candidate(dp=8, zero_stage=3, recompute="full")
        >>> 0.25 < state_memory(shape, job) / (8 * peak_memory(shape, plan, job).total) < 1
        True
    """
    lora, b = job.lora, job.element_bytes
    if lora is not None:
        adapters = sum(run.count * lora.elements(run) for run in shape.runs)
        packed = sum(run.count * lora.packed_elements(run, 1) for run in shape.runs)
        return lora.frozen_bytes(packed, shape.parameters - packed, b) + adapters * job.trained_bytes
    # Without ZeRO, the optimizer has the fewest bytes per weight.
    if job.optimizer == "adamw":
        return shape.parameters * (b + optimizer_bytes(Candidate(), job))
    return shape.parameters * b + whole_states(shape, job, unit=b)


def _groups(plan: Candidate) -> int:
    """Return the number of communicators of a rank."""
    parts_of_cp = 2 if plan.context == "hybrid" else 0
    of_experts = 2 if plan.ep > 1 else 0  # those that share experts, and those that hold the same ones
    return sum(size > 1 for size in plan.group_sizes.values()) + parts_of_cp + of_experts
