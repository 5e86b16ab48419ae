"""The memory of one rank of this version's runtime during a step: the tensors that it holds, and the peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, groupby

from meshwright.plan.parts import IN_FLIGHT, flat_offsets, sharded_length
from meshwright_plan.job.adapters import ADAPTER_BYTES, Lora
from meshwright_plan.job.candidate import Candidate, Job, count_recomputed
from meshwright_plan.job.layer_shape import LayerShape
from meshwright_plan.job.shapes import ModelShape
from meshwright_plan.memory.activations import (
    Saved,
    after_head,
    attention_memory,
    embedding_memory,
    head_peak,
    measured_share,
    rank_tokens,
    saved_activations,
)
from meshwright_plan.memory.held_states import (
    TOWER,
    Parameter,
    buckets,
    exchanged,
    held_states,
    parameters,
    trained_members,
    units,
)

# By layer, of each gradient in the order of arrival: its elements, the elements that have arrived so far, the bytes of
# all gradients and their buffers when it arrives, and their most bytes while a reduction starts.
_Gradients = tuple[tuple[int, tuple[tuple[int, int, float, float], ...]], ...]


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The memory of one rank, in bytes.

    Args:
        parameters: the weights; under ZeRO-3, this rank's shard in 32 bits.
        gradients: the gradients after backward.
        optimizer: Adam's state and, in ZeRO stages 1 and 2, the 32-bit copy of 16-bit weights.
        activations: the tensors that forward saves for backward.
        accumulated: the sum of the gradients of all micro-batches but the last; 0 for a single micro-batch.
        peaks: phase -> peak, including everything above. The phases are "forward", "backward" and "optimizer".
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    accumulated: float
    peaks: dict[str, float]

    @property
    def peak(self) -> float:
        return max(self.peaks.values())


def footprint(shape: ModelShape, plan: Candidate, job: Job) -> Footprint:
    """Return the memory of the first rank.

    Args:
        shape: the model.
        plan: a plan without pipeline stages that this version can run.
        job: the job. On CPU, gloo's reductions and torch's optimizers use other buffers.

    Example:
        >>> shape = ModelShape.of(name="m", layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=128, vocab=100)
        >>> job = Job(seq_len=16, global_batch=1).in_32_bits()
        >>> held = footprint(shape, Candidate(), job)
        >>> held.optimizer == 2 * held.parameters
        True
        >>> footprint(shape, Candidate(zero_stage=1, offload="optimizer"), job).optimizer
        0
    """
    b, lora, cpu = job.element_bytes, job.lora, job.on_cpu
    layout = Candidate(
        dp=plan.data_ranks, tp=plan.tp, sequence_parallel=plan.sequence_parallel, zero_stage=plan.zero_stage,
        reduce_dtype=plan.reduce_dtype, ep=plan.ep,
    )  # fmt: skip
    counted = _Elements.of(shape, layout, lora)
    elements = counted.whole
    saved = saved_activations(shape, plan, job)
    is_sharded = plan.zero_stage > 0 and plan.data_ranks > 1
    trained = job.trained_bytes
    state = 4 if is_sharded else trained
    own = counted.own if is_sharded else elements
    is_gathered = is_sharded and plan.zero_stage == 3
    states = held_states(shape, layout, job.optimizer, lora, unit=state)
    optimizer_state = states.bytes
    if is_sharded and trained < 4 and not is_gathered:
        optimizer_state += 4 * counted.own_padded
    gradients = own * state
    if plan.offload is not None:
        optimizer_state = 0  # the host has it
    kept = trained if plan.offload is not None else state
    weights = counted.own_padded * kept if is_gathered else (counted.padded if is_sharded else elements) * trained
    if lora is not None:
        weights += _frozen(shape, layout, lora, b)
    held = weights + optimizer_state
    gathered = _Gathered.of(shape, layout, lora, b) if is_gathered else _Gathered()
    recomputed = count_recomputed(plan, shape.layers)
    # All micro-batches but the last run backward within the model's call and add their gradients in 32 bits.
    micro = _MicroBatch(shape=shape, plan=plan, job=job, saved=saved, recomputed=recomputed, gathered=gathered)
    unpacked = 0.0 if lora is None else max(lora.unpacked(run, plan.tp, b) for run in shape.runs)
    forward = _forward(micro) + unpacked
    backward = unpacked + _backward(micro, counted, _gradients(shape, layout, lora, trained, cpu))
    accumulated: float = 4 * elements if plan.gradient_accumulation_steps > 1 else 0
    if accumulated and is_sharded and plan.zero_stage > 1:
        # ZeRO-2 and 3 reduce gradients as they arrive, and each rank adds up its shard.
        accumulated = 4 * counted.own
        inner = backward if plan.gradient_accumulation_steps == 2 else backward + accumulated
        forward = max(accumulated + forward, inner)
        backward += accumulated
    elif accumulated:
        forward = accumulated + max(forward, elements * trained)
    activations = saved.total(recomputed) + gathered.head
    # On CPU the optimizer steps one parameter after the other, on other devices all parameters at once.
    largest = counted.own_largest if is_sharded else counted.largest
    temporary = 0 if plan.offload is not None else (2 * largest if cpu else own) * state
    return Footprint(
        parameters=weights,
        gradients=gradients,
        optimizer=optimizer_state,
        activations=activations,
        accumulated=accumulated,
        peaks={
            "forward": held + forward,
            "backward": held + backward,
            "optimizer": held + gradients + max(temporary, exchanged(plan, trained) * states.owned),
        },
    )


@lru_cache(maxsize=256)
def _frozen(shape: ModelShape, layout: Candidate, lora: Lora, b: int) -> float:
    """Return the bytes of a rank's frozen weights, which ZeRO-3 shards in their own dtype unless they are packed."""
    is_sharded, packed = layout.zero_stage == 3, sum(_packed(shape, layout, lora))
    kept = sum(m.numel / (_ranks(m, layout) if is_sharded else 1) for m in parameters(shape, layout))
    return lora.frozen_bytes(packed, kept - packed / (layout.data_ranks if is_sharded else 1), b)


def _packed(shape: ModelShape, layout: Candidate, lora: Lora | None) -> list[float]:
    """Return the packed elements of each layer on a rank."""
    return [
        0.0 if lora is None else lora.packed_elements(run, layout.tp) for run in shape.runs for _ in range(run.count)
    ]


def _ranks(member: Parameter, layout: Candidate) -> int:
    """Return the number of ranks that average a parameter's gradient, over which ZeRO shards."""
    return layout.copies if member.is_spread else layout.data_ranks


@dataclass(frozen=True, kw_only=True)
class _Elements:
    """A rank's trained elements: all, in the flat tensors of ZeRO, and those of the largest parameter.

    ``own``, ``own_padded`` and ``own_largest`` are the same after ZeRO has sharded them.
    """

    whole: int
    padded: int
    largest: int
    own: float
    own_padded: float
    own_largest: float

    @staticmethod
    @lru_cache(maxsize=64)
    def of(shape: ModelShape, layout: Candidate, lora: Lora | None) -> _Elements:
        members = trained_members(shape, layout, lora)
        groups = [[m for m in members if m.is_spread is is_spread] for is_spread in (False, True)]
        ranks = (layout.data_ranks, layout.copies)
        whole = [sum(member.numel for member in group) for group in groups]
        padded = [flat_offsets(member.numel for member in group)[-1] for group in groups]
        return _Elements(
            whole=sum(whole),
            padded=sum(padded),
            largest=max(member.numel for member in members),
            own=sum(size / count for size, count in zip(whole, ranks, strict=True)),
            own_padded=sum(size / count for size, count in zip(padded, ranks, strict=True)),
            own_largest=max(member.numel / _ranks(member, layout) for member in members),
        )


@dataclass(frozen=True, kw_only=True)
class _Gathered:
    """Bytes of the weights that ZeRO-3 holds gathered: a layer and the next one, and the head until backward."""

    layers: float = 0
    head: float = 0

    @staticmethod
    @lru_cache(maxsize=64)
    def of(shape: ModelShape, layout: Candidate, lora: Lora | None, b: int) -> _Gathered:
        members, packed, sizes = trained_members(shape, layout, None), _packed(shape, layout, lora), Counter[int]()
        for member in members:
            sizes[member.layer] += member.numel
        layer = max(sizes[index] - packed[index] for index in range(shape.layers)) * b
        head = members[0 if shape.tied else -1].numel * b
        return _Gathered(layers=layer * min(2, shape.layers), head=head)


@dataclass(frozen=True, kw_only=True)
class _MicroBatch:
    """One micro-batch on one rank: its sizes, and what forward saves and gathers for it."""

    shape: ModelShape
    plan: Candidate
    job: Job
    saved: Saved
    recomputed: int
    gathered: _Gathered

    @cached_property
    def positions(self) -> int:
        """The tokens that a rank holds."""
        return rank_tokens(self.plan, self.job)

    def in_mlp(self, layer: LayerShape, width: int) -> float:
        """Return the temporary bytes of an MLP that holds ``width`` times its width, and of the experts beside it."""
        if layer.measured is not None:
            return self.positions * self.working(layer)[0]
        plan, held = self.plan, self.positions * width * layer.ffn / self.plan.tp
        if layer.experts is not None:
            held += layer.experts.working(layer.experts.rows(self.positions / plan.sp, plan.ep, self.job.expert_load))
        return self.job.element_bytes * held

    @property
    def is_widened(self) -> bool:
        """Whether adapters compute in more bits than the base."""
        return self.job.lora is not None and self.job.element_bytes < ADAPTER_BYTES

    def working(self, layer: LayerShape) -> tuple[float, float, float]:
        """Return the measured temporary bytes per token of a layer: forward, the last block's backward, the others'."""
        assert layer.measured is not None
        return layer.measured.working(measured_share(layer, self.plan, self.job))


def _forward(micro: _MicroBatch) -> float:
    shape, plan, job, n = micro.shape, micro.plan, micro.job, micro.positions
    b, saved, recomputed, gathered = job.element_bytes, micro.saved, micro.recomputed, micro.gathered
    layer, own = shape.runs[-1], saved.runs[-1]
    total = saved.total(recomputed)
    at_loss = total - saved.of_head + head_peak(shape, plan, job)
    # When the last layer ends, its saved tensors are alive, and so is its output, both before and after the
    # reduction over tp.
    before = total - saved.head
    is_last_kept = recomputed < shape.layers
    # A recomputed layer runs without a graph, so its tensors are freed early; most are alive in the MLP.
    wide = 4 * n * layer.ffn / plan.tp if micro.is_widened else 0.0  # the last adapter's copy of its input
    in_recomputed = min(own.layer - own.kept, micro.in_mlp(layer, 3) + n * b * 3 * shape.hidden + wide)
    in_layer = before + (0 if is_last_kept else in_recomputed) + _joined(shape, plan, n, b)
    kept = own.layer if is_last_kept else own.kept
    in_attention = before + own.attention - kept + attention_memory(layer, plan, job)[0]
    in_norm = total - saved.of_head + _in_last_norm(shape, plan, n, b)
    in_decoder = max(in_norm, max(in_layer, in_attention) + gathered.layers) + embedding_memory(shape, plan, job)
    return max(at_loss + gathered.head, in_decoder)


def _in_last_norm(shape: ModelShape, plan: Candidate, n: int, b: int) -> float:
    """Return the bytes of the last norm's 32-bit tensors, and of its result while sequence parallelism joins it."""
    is_split = plan.sequence_parallel and plan.tp > 1
    norm = 4 * n * shape.hidden * (2 if b < 4 else 1) / (plan.tp if is_split else 1)
    return norm + (2 * n * shape.hidden * b if is_split else 0)


def _joined(shape: ModelShape, plan: Candidate, n: int, b: int) -> float:
    """Return the bytes of a block's output for all positions, both before and after the reduction over tp."""
    return n * shape.hidden * b * (2 if plan.tp > 1 else 1)


def _backward(micro: _MicroBatch, counted: _Elements, gradients: _Gradients) -> float:
    shape, plan, job, n = micro.shape, micro.plan, micro.job, micro.positions
    b, saved, recomputed, gathered = job.element_bytes, micro.saved, micro.recomputed, micro.gathered
    rows = n * shape.hidden * b
    total, below = saved.total(recomputed), saved.below(recomputed)
    norm = 24 * n * shape.hidden / plan.sp  # six 32-bit tensors of a norm's size
    run_of = [number for number, run in enumerate(shape.runs) for _ in range(run.count)]
    # The sum over earlier micro-batches is first cast to the gradients' dtype, then becomes the gradients one by one.
    is_reduced = plan.zero_stage > 1 and plan.data_ranks > 1
    before = 4 * counted.whole if plan.gradient_accumulation_steps > 1 and not is_reduced else 0
    at_once = 4 * counted.largest if before and b < 4 else 0
    at_head = total + gathered.head + before * b / 4 + after_head(shape, plan, job)
    peak = max(total + before + at_once, at_head)
    always, arguments = saved.shared + rows + saved.towers, saved.arguments if recomputed else 0
    kinds: dict[tuple[int, bool], list[tuple[float, float]]] = {}  # equal layers of a run have equal tensors
    for layer, each in gradients:
        if 0 <= layer < shape.layers:
            kind = run_of[layer], layer < recomputed
            if kind not in kinds:
                kinds[kind] = list(_alive(micro, *kind, norm=norm, count=len(each)))
            around = gathered.layers if layer else gathered.layers / 2
            held = [always + (below[layer] + kept + arguments) + working + around for kept, working in kinds[kind]]
        elif layer == shape.layers:
            held = [always + (below[layer] + gathered.head)] * len(each)
        else:
            freed = saved.towers if layer == TOWER else 0.0
            held = [always - freed * index / len(each) for index in range(len(each))]
        for (numel, arrived, arrival, most), rest in zip(each, held, strict=True):
            if shape.tied and layer == -1:  # the embedding's gradient is added to the gradient of the tied head
                most = max(arrival + numel * b, most)
            peak = max(peak, most + rest + (b * (counted.whole - arrived) if before else 0))
    return peak


def _alive(
    micro: _MicroBatch, number: int, is_recomputed: bool, *, norm: float, count: int
) -> Iterator[tuple[float, float]]:
    """Yield the bytes that attention has saved, and the others of a layer, when each of its gradients arrives."""
    run, own, job, b = micro.shape.runs[number], micro.saved.runs[number], micro.job, micro.job.element_bytes
    rows, in_recomputed = micro.positions * micro.shape.hidden, micro.in_mlp(run, 2) if is_recomputed else 0.0
    mlp, attention = _in_backward(micro, run, norm)
    for index in range(count):
        # A layer's activations are freed as its gradients arrive, first those of the MLP.
        left = 1 - index / count
        of_mlp = max(0.0, 2 * left - 1) * (own.layer - own.attention)
        if left <= 0.5:
            working = attention + of_mlp
        elif run.measured is not None:
            working = max(mlp, norm) + of_mlp
        elif is_recomputed:  # backward frees a recomputed tensor after its last reader, which is the norm
            # Three 32-bit tensors of the last adapter's output, if adapters are wider than the base.
            working = max(norm, of_mlp + in_recomputed + rows * (12 if micro.is_widened else b))
        else:
            # The first gradients of a layer are those of norms, before the backward of the MLP. A frozen norm has none.
            first = norm + rows * b if job.lora is None else 2 * rows * b
            working = (mlp if index else first) + of_mlp
        yield min(1.0, 2 * left) * own.attention, working


def _in_backward(micro: _MicroBatch, layer: LayerShape, norm: float) -> tuple[float, float]:
    """Return the temporary bytes of the backward of a layer's MLP and of its attention."""
    plan, b, n = micro.plan, micro.job.element_bytes, micro.positions
    if layer.measured is not None:
        _, last, others = micro.working(layer)
        return max(norm, n * (last + b * layer.hidden)), max(norm, n * (others + b * layer.hidden))
    mlp = max(norm, micro.in_mlp(layer, 3) + n * b * 2 * layer.hidden)
    attention = max(norm, n * b * (3 * layer.query_width / plan.tp + 2 * layer.hidden))
    if layer.traits.keeps_scores:
        attention += (
            2 * n * b * micro.job.seq_len * layer.heads / plan.tp
        )  # scores, capped, their softmax, their gradients
    return mlp, max(attention, attention_memory(layer, plan, micro.job)[1] + n * layer.hidden * b)


@lru_cache(maxsize=64)
def _gradients(shape: ModelShape, layout: Candidate, lora: Lora | None, b: int, cpu: bool) -> _Gradients:
    """Return the gradients of each layer, in the order in which they arrive.

    The result is cached, since in a search many plans share the sizes of tp and of the data axis and the ZeRO stage.

    The bytes now are the size of all gradients and their buffers when this gradient arrives. If it completes a bucket,
    the most bytes are their largest size while the reduction of the bucket starts.
    """
    members, plan = list(trained_members(shape, layout, lora)), layout
    found: list[tuple[Parameter, float, float]] = []
    is_gathered = plan.zero_stage == 3 and plan.data_ranks > 1
    in_flight = 1 if is_gathered else IN_FLIGHT
    groups = units(members, shape.layers) if is_gathered else buckets(members, b)
    groups = [bucket for bucket in groups if _ranks(members[bucket[0]], plan) > 1 or members[bucket[0]].is_grad_partial]
    ranks = [_ranks(members[bucket[0]], plan) for bucket in groups]
    bucket_of = {index: number for number, bucket in enumerate(groups) for index in bucket}
    missing = [len(bucket) for bucket in groups]
    sizes = [sum(members[index].numel for index in bucket) for bucket in groups]
    lengths = [
        sharded_length((members[index].numel for index in bucket), count)
        for bucket, count in zip(groups, ranks, strict=True)
    ]
    is_sharded = plan.zero_stage > 0
    wide = plan.summed_bytes(b)
    sent = [size * plan.sent_bytes(b) for size in sizes]
    held, started, most = 0.0, 0, 0.0

    def start(number: int) -> None:
        """Start the reduction of a bucket, and finish the oldest reduction if too many are in flight."""
        nonlocal held, most
        flat, raw = sizes[number] * wide, sizes[number] * b
        # ZeRO scales the only gradient of a bucket where it is, without a copy.
        is_in_place = is_sharded and len(groups[number]) == 1 and lengths[number] == sizes[number] and flat == raw
        held += 0 if is_in_place else flat
        # The sum over tp joins partial gradients into one tensor. A gradient of a part of the rows is made whole first.
        partial = [members[index] for index in groups[number]]
        most = max(most, held + wide * sum(m.full * (1 if m.full == m.numel else 2) for m in partial))
        is_copied = sent[number] != flat  # a bucket that travels in fewer bytes is copied
        if is_copied:
            held += sent[number]
            most = max(most, held)
        is_freed_first = is_copied and is_gathered and not is_in_place
        if is_freed_first:  # ZeRO-3 frees the bucket before it sends the copy, as traces show
            held -= flat
        if is_sharded:
            # gloo receives into its own buffer, and frees the tensor that it has sent; the result is made at the end.
            most = max(most, held + (sent[number] if cpu else flat / ranks[number]))
            held += (0 if cpu else flat / ranks[number]) - (0 if is_in_place else raw)
        if is_copied and not is_freed_first:
            held -= flat
        most = max(most, held)
        if number >= in_flight:
            finish(number - in_flight)

    def finish(number: int) -> None:
        nonlocal held, most
        if is_sharded and cpu:
            held += sizes[number] * wide / ranks[number]
            most = max(most, held)
        held -= sent[number]

    for index in range(len(members) - 1, -1, -1):
        held += members[index].numel * b
        arrival = most = held
        if groups:
            if index in bucket_of:
                missing[bucket_of[index]] -= 1
            while started < len(groups) and not missing[started]:
                start(started)
                started += 1
            if index == 0:
                for number in range(started, len(groups)):
                    start(number)
        found.append((members[index], arrival, most))
    arrived = accumulate(member.numel for member, _, _ in found)
    each = ((m.layer, (m.numel, so_far, now, most)) for (m, now, most), so_far in zip(found, arrived, strict=True))
    return tuple((layer, tuple(item for _, item in of)) for layer, of in groupby(each, key=lambda item: item[0]))
