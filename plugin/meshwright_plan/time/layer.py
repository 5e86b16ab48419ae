"""The parts of a step's estimated time, and the estimate for a layer, the head and their collectives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, TypeVar, cast

from meshwright_plan.context_cost import (
    ContextExchange,
    Exchanges,
    attends_twice,
    block_bytes,
    exchanges,
    shares_keys,
)
from meshwright_plan.job.adapters import ADAPTED_LAUNCHES, ADAPTER_BYTES, projections
from meshwright_plan.job.candidate import Candidate, Job, Precision
from meshwright_plan.job.layer_shape import ROUTED_LAUNCHES, ExpertShape, LayerShape
from meshwright_plan.job.shapes import ModelShape
from meshwright_plan.machine.devices import matmul_peak
from meshwright_plan.machine.hardware import Cluster, Coefficients


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The estimated seconds of one training step by part; the parts add up to ``total``.

    Args:
        matmul: the matmuls of the layers and the head, in the slowest pipeline stage.
        attention: the attention kernels.
        elementwise: norms, activation functions, residual sums, the loss, and kernel launches that compute cannot hide.
        recompute: the recomputation of layers in backward.
        tensor: communication over tp.
        context: communication over cp that attention does not hide.
        experts: the exchanges of tokens between the ranks that share experts.
        data: communication over dp that compute does not hide.
        bubble: the idle time in the pipeline, including transfers between stages.
        optimizer: the optimizer step.
        other: the fixed time of a step, and the wait for the slowest node.
    """

    matmul: float
    attention: float
    elementwise: float
    recompute: float
    tensor: float
    context: float
    experts: float
    data: float
    bubble: float
    optimizer: float
    other: float

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        return dict(vars(self))


@dataclass(frozen=True, kw_only=True)
class Work:
    """Seconds for a part of the model and one micro-batch: by kind of work, and in total for forward and backward.

    ``weight_grad`` is the part of ``backward`` that computes the gradients of the weights. ``hidden`` is the
    communication over cp that attention hides, which is in none of the others.
    """

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    recompute: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    experts: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    weight_grad: float = 0.0
    hidden: float = 0.0


def mean_work(works: Sequence[Work], counts: Sequence[int]) -> Work:
    """Return the mean over layers of which ``counts`` have each ``Work``."""
    if len(works) == 1:
        return works[0]
    weights = [count / sum(counts) for count in counts]
    names = (field.name for field in fields(Work))
    return Work(
        **{name: sum(w * getattr(work, name) for w, work in zip(weights, works, strict=True)) for name in names}
    )


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Communication over dp that runs at the same time as compute.

    Args:
        phase: the compute of one micro-batch that hides it.
        is_repeated: whether it runs for each micro-batch; if not, it runs once per step.
        seconds: time of the communication.
        exposed: part of this time that compute does not hide.
    """

    phase: Literal["forward", "backward"]
    is_repeated: bool
    seconds: float
    exposed: float


T = TypeVar("T")
_TILE = 128  # size of a matmul's tile in each of its three dims
_SCORE_BYTES = 13  # bytes moved per attention score in forward: product, softmax and dropout in 16 bits, and the mask
_WIDE = 128  # width of a head at which attention has its efficiency
_ALIGNED = 8  # without a fused kernel, head widths that are not a multiple of this cannot use the matrix units
_MISALIGNED = 8  # slowdown of such heads: 32-bit units have about 1/16 of the peak rate, but nearly reach their rate
# Bytes moved per element that is cast: a read, a write, and a transposed write for backward. 4-bit casts read the
# tensor once more, for its largest value, and write a scale for each 16 elements.
_CAST_BYTES = {"bf16": 0.0, "fp8": 4.0, "fp4": 5.1}
_IN_32_BITS = 16  # slowdown of products in 32 bits, which do not use the matrix units (67 of 989 TF/s on H100)
_SLOWED = 0.1  # time by which a transfer slows the attention that runs at the same time, relative to the transfer
REMOTE = 5.0  # latency of a message to another node, relative to a message inside the node


class Forward(NamedTuple):
    """A layer's forward, of which backward may repeat parts.

    Args:
        attended, elementwise: seconds of attention, and of the kernels beside it and the matmuls.
        scores: bytes of attention's scores that are moved through memory.
        reduce: seconds of an all-reduce over tp.
        busy: seconds of all kernels and collectives.
        launch: seconds of the launches.
    """

    attended: float
    scores: float
    elementwise: float
    reduce: float
    busy: float
    launch: float


class LayerModel:
    """Estimates the time of a layer and of the head, for one micro-batch on one rank.

    Small matmuls are less efficient, attention has its own efficiency, a layer takes at least as long as its kernel
    launches, and rings that cross nodes share the network cards.

    Args:
        shape: the model.
        cluster: the devices.
        coefficients: the efficiencies.
    """

    def __init__(self, shape: ModelShape, cluster: Cluster, coefficients: Coefficients):
        self.shape, self.cluster, self.k = shape, cluster, coefficients
        self.memory_rate = cluster.device.bandwidth
        self._known: dict[object, Any] = {}  # a cache: in a search, many plans have equal layers, passes or stages

    def matmul(self, rows: float, inner: float, columns: float, *, precision: Precision = "bf16") -> float:
        """Return the seconds of a matmul, with a penalty for small sizes, whose tiles are only partly filled."""
        device, k = self.cluster.device, self.k
        rate = matmul_peak(device, precision) * k.matmul
        rate *= device.sustained if precision == "bf16" else device.sustained_8bit * k.matmul_8bit
        tail = 1 + k.saturation * _TILE * (1 / rows + 1 / inner + 1 / columns)
        return 2 * rows * inner * columns / rate * tail

    def attention(self, flops: float, head_dim: int) -> float:
        """Return the seconds of the attention kernel, whose exponentials narrower heads do not shorten."""
        k = self.k
        return flops / (self.cluster.device.flops * k.attention) * (1 + k.scores * (_WIDE / head_dim - 1))

    def ring(self, volume: float, size: int, stride: int) -> float:
        """Return the seconds of one all-gather or reduce-scatter; an all-reduce takes twice as long.

        Args:
            volume: bytes of the whole buffer.
            size: ranks in the group.
            stride: distance in ranks between two neighbours of the group. The ranks in between belong to other rings,
                which run at the same time and share the node's network cards.
        """
        if size == 1:
            return 0.0
        domain = self.cluster.domain
        k = self.k
        rate, inside = self.cluster.fast * k.fast_link, size
        if size * stride > domain:
            inside = max(1, domain // stride)
            rate = min(rate, self.cluster.slow * k.slow_link * inside)
        # Inside a fast domain a ring goes from neighbour to neighbour; between domains the libraries use trees.
        hops = inside - 1 + REMOTE * math.log2(size / inside)
        return volume * (size - 1) / size / rate + k.latency * hops

    def exchange(self, experts: ExpertShape, tokens: float, plan: Candidate, job: Job) -> float:
        """Return the seconds of one exchange of a layer's tokens between the ranks that share its experts.

        Links inside a domain and between domains work at the same time. A token is sent to each rank of its experts.
        """
        if plan.ep == 1:
            return 0.0
        k, inside = self.k, min(plan.ep, self.cluster.domain)
        row = experts.sent_bytes(tokens, plan.ep, job.element_bytes, job.expert_load) / plan.ep
        within, across = (inside - 1) * row, (plan.ep - inside) * row
        slowest = max(within / (self.cluster.fast * k.fast_link), across / (self.cluster.slow * k.slow_link))
        return slowest + k.latency * (REMOTE if across else 1.0)

    def is_fused(self, layer: LayerShape, plan: Candidate, job: Job) -> bool:
        """Return whether the attention kernel keeps its scores on chip."""
        return not (job.plain_attention and shares_keys(layer, plan, job.seq_len))

    def over_context(self, layer: LayerShape, plan: Candidate, job: Job) -> tuple[Exchanges, tuple[float, float]]:
        """Return what a layer sends over cp, and the bytes that are moved to put its blocks together."""
        return exchanges(layer, plan, job), block_bytes(layer, plan, job)

    def repeated(self, layer: LayerShape, plan: Candidate, job: Job, once: Forward) -> float:
        """Return the seconds of what backward recomputes of a layer."""
        if plan.recompute == "selective":
            return once.attended + self._passes(once.scores)
        if plan.recompute == "full":
            return self.launched(once.busy - self.unread(layer, once.reduce, plan, job), once.launch)
        return 0.0

    def layer(self, plan: Candidate, job: Job) -> Work:
        """Return the seconds of one layer for one micro-batch, as the mean over the layers."""
        return mean_work(self.layers(plan, job), self.shape.counts)

    def layers(self, plan: Candidate, job: Job) -> tuple[Work, ...]:
        """Return the seconds of one layer of each run for one micro-batch."""
        layers = (self._layer(run, plan, job) for run in self.shape.runs)
        return self.once(self.layer_key(plan, job), lambda: tuple(layers))

    def once(self, key: object, make: Callable[[], T]) -> T:
        """Return what ``make`` returned when it was first called for a key."""
        if key not in self._known:
            self._known[key] = make()
        return cast("T", self._known[key])

    @staticmethod
    def layer_key(plan: Candidate, job: Job) -> object:
        """Return what decides the seconds of a layer."""
        return (plan.tp, plan.sequence_parallel, plan.cp, plan.context, plan.ulysses, plan.ep, plan.micro_batch_size,
                plan.recompute, plan.splits_backward, job)  # fmt: skip

    def _layer(self, layer: LayerShape, plan: Candidate, job: Job) -> Work:
        k, t = self.k, plan.tp
        rows = plan.micro_batch_size * job.seq_len / plan.cp
        precision = job.precision
        h, f, q, kv = layer.hidden, layer.ffn / t, layer.query_width / t, layer.local_kv_width(t)
        matmul = self.matmul(rows, h, q + 2 * kv, precision=precision) + self.matmul(rows, q, h, precision=precision)
        if layer.projections is not None:  # by the elements of other projections, at the efficiency of these
            matmul *= layer.projections / (2 * h * (layer.query_width + layer.kv_width))
        if f:
            matmul += self.matmul(rows, h, f * layer.mlp_inputs, precision=precision)
            matmul += self.matmul(rows, f, h, precision=precision)
        routed, moved, to_experts = self._experts(layer, plan, job)
        matmul += routed
        added, is_frozen = self._adapters(layer, plan, job), job.lora is not None
        # Without a fused kernel, causal attention computes all scores and moves them through memory several times.
        is_fused = self.is_fused(layer, plan, job)
        seen = layer.attended(job.seq_len) if is_fused else job.seq_len
        attention = self.attention(4 * rows * q * seen, layer.head_dim)
        if not is_fused and layer.head_dim % _ALIGNED:
            attention *= _MISALIGNED
        scores = 0.0 if is_fused else _SCORE_BYTES * rows * layer.heads / t * job.seq_len
        scores *= job.element_bytes / 2
        # A norm reads once and writes once, a residual sum reads twice and writes once, and a layer has two of each.
        # The other terms are the rotation of q and k, and the gate.
        traffic = k.norms * 20 * h / plan.sp + k.rotation * 8 * (q + kv) + k.gate * f * (2 + 2 * layer.mlp_inputs)
        elementwise = self._passes(scores + rows * traffic * job.element_bytes / 2)
        # Weights are cast once per step and the casts are kept, so only the casts of inputs count.
        elementwise += self._passes(_CAST_BYTES[precision] * rows * (2 * h + q + f))
        elementwise += moved
        reduce = 2 * self.ring(job.element_bytes * rows * h, t, 1)
        (sent, sent_back), blocks = self.over_context(layer, plan, job)
        in_blocks = [self._passes(size) for size in blocks]
        attended = attention + in_blocks[0]
        attended_back = (3.5 if attends_twice(layer, plan, job) else 2.5) * attention + in_blocks[1]
        exchange, hidden = self._exchanged(sent, attended, plan)
        exchange_back, hidden_back = self._exchanged(sent_back, attended_back, plan)

        busy = matmul + attended + elementwise
        launch = k.launch * (1 + ROUTED_LAUNCHES * (layer.experts is not None) + added.launches)
        busy += added.matmul + added.forward
        busy += 2 * reduce + exchange + 2 * to_experts
        forward = self.launched(busy, launch)
        # A frozen base has no gradients of weights.
        both = matmul * (1 if is_frozen else 2) + 2 * added.matmul
        back = both + attended_back + 2 * elementwise + added.backward
        backward = self.launched(back + 2 * reduce + exchange_back + 2 * to_experts, 2 * launch)
        once = Forward(
            attended=attended, scores=scores, elementwise=elementwise, reduce=reduce, busy=busy, launch=launch
        )
        again = self.repeated(layer, plan, job, once)
        # Weight gradients that wait do not keep the whole sequence, and gather it again.
        regathered = reduce if plan.splits_backward and plan.sequence_parallel else 0.0
        backward += regathered
        exchanged = exchange + exchange_back
        communication = 4 * reduce + regathered + exchanged + 4 * to_experts
        return Work(
            matmul=matmul + added.matmul + both,
            attention=attended + attended_back,
            elementwise=forward + backward - (matmul + added.matmul + both) - attended - attended_back - communication,
            recompute=again,
            tensor=4 * reduce + regathered,
            context=exchanged,
            experts=4 * to_experts,
            forward=forward,
            backward=backward + again,
            # Experts compute both gradients together.
            weight_grad=(added.matmul if is_frozen else matmul - routed) + regathered,
            hidden=hidden + hidden_back,
        )

    def unread(self, layer: LayerShape, reduce: float, plan: Candidate, job: Job) -> float:
        """Return the seconds of what forward does after the last tensor that backward reads; 0 if recompute repeats it.

        Args:
            layer: the layer, whose last product is that of the MLP, without dropout after it.
            reduce: seconds of an all-reduce over tp, of which a reduce-scatter takes half.
            plan, job: the plan and the job.
        """
        if layer.traits.norms_outputs:
            return 0.0
        summed = reduce / 2 if plan.sp > 1 else reduce
        # A router's gradients read the results of the experts, and the last adapter's what follows the product.
        if layer.experts is not None or job.lora is not None:
            return summed
        rows = plan.micro_batch_size * job.seq_len / plan.cp
        width, h = (layer.ffn or layer.query_width) / plan.tp, layer.hidden
        traffic = self.k.norms * 6 * h / plan.sp * job.element_bytes / 2 + _CAST_BYTES[job.precision] * width
        return summed + self._passes(rows * traffic) + self.matmul(rows, width, h, precision=job.precision)

    def _adapters(self, layer: LayerShape, plan: Candidate, job: Job) -> _Added:
        """Return what adapters add to a layer, and what a quantised base costs, which is unpacked for each product.

        Adapters are 32-bit tensors beside a 16-bit base, so PEFT casts their inputs and results.
        """
        lora, b, t = job.lora, job.element_bytes, plan.tp
        if lora is None:
            return _Added()
        rows = plan.micro_batch_size * job.seq_len / plan.cp
        found = list(projections(layer))
        inner, outer = (sum(each.cut(t)[side] for each in found) for side in range(2))
        is_cast = b < ADAPTER_BYTES
        # Forward reads the input, casts it and reads the copy; the result is written, scaled, added and cast.
        forward = inner * (4 + (b + 4) * is_cast) + outer * (24 + 2 * b * is_cast)
        backward = inner * (12 + 4 * b) + outer * (b + 20)
        unpacked = 0.0
        if lora.quantised is not None:
            unpacked = sum(each.elements for each in found) / t * (lora.packed(b) + b)
        rate = self.cluster.device.flops * self.cluster.device.sustained * self.k.matmul / _IN_32_BITS
        return _Added(
            matmul=2 * rows * lora.rank * (inner + outer) / rate,
            forward=self._passes(rows * forward + unpacked),
            backward=self._passes(rows * backward + unpacked),
            launches=ADAPTED_LAUNCHES * len(found),
        )

    def _experts(self, layer: LayerShape, plan: Candidate, job: Job) -> tuple[float, float, float]:
        """Return the seconds of the matmuls and the other kernels of a layer's experts in forward, and of an exchange.

        Each expert multiplies its own rows, so fewer rows of each lower the efficiency of all.
        """
        experts = layer.experts
        if experts is None:
            return 0.0, 0.0, 0.0
        tokens = plan.micro_batch_size * job.seq_len / plan.cp / plan.sp
        rows, own = experts.rows(tokens, plan.ep, job.expert_load), experts.count / plan.ep
        each, h, width = rows / own, experts.hidden, experts.width
        matmul = self.matmul(tokens, h, experts.count)
        matmul += own * self.matmul(each, h, width * experts.inputs, precision=job.precision)
        matmul += own * self.matmul(each, width, h, precision=job.precision)
        traffic = experts.moved(rows) * job.element_bytes / 2 + _CAST_BYTES[job.precision] * rows * (h + width)
        return matmul, self._passes(traffic), self.exchange(experts, tokens, plan, job)

    def _passes(self, traffic: float) -> float:
        """Return the seconds of kernels that move these bytes."""
        return self.k.elementwise * traffic / self.memory_rate

    def launched(self, busy: float, launches: float) -> float:
        """Return the time of kernels and their launches; these do not overlap if the device is the host's processor."""
        return busy + launches if self.cluster.device.shares_host else _at_least(busy, launches)

    def _exchanged(self, sent: Sequence[ContextExchange], attention: float, plan: Candidate) -> tuple[float, float]:
        """Return the seconds of a layer's exchanges over cp that its attention does not hide, and that it hides."""
        together, apart = 0.0, 0.0
        for exchange in sent:
            volume = exchange.bytes * (exchange.ranks if exchange.kind == "send" else 1)
            once = self.ring(volume, exchange.ranks, exchange.neighbours * plan.tp)
            if exchange.overlaps:
                together += once * exchange.count / (exchange.ranks - 1)
            else:
                apart += once * exchange.count
        longer = max(0.0, together - self.k.overlap * attention)
        return apart + longer + _SLOWED * together, together - longer

    def head(self, plan: Candidate, job: Job) -> Work:
        """Return the seconds of the head and the loss for one micro-batch; the vocabulary is sharded over tp."""
        rows, columns = plan.micro_batch_size * job.seq_len / plan.cp, self.shape.outputs / plan.tp
        # 16-bit logits and a 32-bit loss have 14 bytes per logit, each of which is moved about twice.
        loss = self.k.loss * self._passes(2 * (12 + job.element_bytes) * rows * columns)
        matmul, of_weight = self.matmul(rows, self.shape.hidden, columns), int(job.lora is None)
        both = (2 + of_weight) * matmul
        if job.logits == "chunked" and plan.schedule != "gpipe":
            # The gradients are computed beside each chunk of logits; backward only scales them.
            return Work(matmul=both, elementwise=loss, forward=both + loss)
        return Work(
            matmul=both,
            elementwise=loss,
            forward=matmul + loss / 2,
            backward=both - matmul + loss / 2,
            weight_grad=of_weight * matmul,
        )


@dataclass(frozen=True, kw_only=True)
class _Added:
    """What adapters add to a layer.

    Args:
        matmul: seconds of their products in forward; backward has twice as many.
        forward, backward: seconds of their other kernels, and of unpacking a quantised base.
        launches: launches of a forward, relative to those of a layer.
    """

    matmul: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    launches: float = 0.0


def _at_least(value: float, floor: float) -> float:
    """Return a smooth maximum, since kernels that take little longer than their launches hide them only partly."""
    return float((value**4 + floor**4) ** 0.25)
