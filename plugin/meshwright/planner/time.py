"""Estimate the time of one training step under a plan, by part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from meshwright.plan.partition import balanced_stages
from meshwright.plan.schedule import rank_of_stage, stages_of_rank
from meshwright.planner.breakdown import Overlap, StepTime, Work, mean_work
from meshwright.planner.candidate import Candidate, Job, Precision, rank_runs, recomputed_share, stage_runs
from meshwright.planner.context_cost import ContextExchange, attends_twice, block_bytes, exchanges
from meshwright.planner.devices import matmul_peak
from meshwright.planner.experts import ROUTED_LAUNCHES, ExpertShape
from meshwright.planner.hardware import Cluster, Coefficients
from meshwright.planner.shapes import LayerShape, ModelShape
from meshwright.planner.simulate import SimulatedPipeline, pipeline_time

_TILE = 128  # size of a matmul's tile in each of its three dims
_SCORE_BYTES = 13  # bytes moved per attention score in forward: product, softmax and dropout in 16 bits, and the mask
_ALIGNED = 8  # without a fused kernel, head widths that are not a multiple of this cannot use the matrix units
_MISALIGNED = 8  # slowdown of such heads: 32-bit units have about 1/16 of the peak rate, but nearly reach their rate
# Bytes moved per element that is cast: a read, a write, and a transposed write for backward. 4-bit casts read the
# tensor once more, for its largest value, and write a scale for each 16 elements.
_CAST_BYTES = {"bf16": 0.0, "fp8": 4.0, "fp4": 5.1}
_SLOWED = 0.1  # time by which a transfer slows the attention that runs at the same time, relative to the transfer
_ROUNDING = 1 - 1e-9  # so that rounding does not lift a bound above the time that it equals
_REMOTE = 5.0  # latency of a message to another node, relative to a message inside the node


class StepModel:
    """Estimates the time of a training step.

    The model follows Megatron-LM's analyses (Narayanan et al. 2021, Korthikanti et al. 2022) and adds what their closed
    formulas omit: small matmuls are less efficient, attention has its own efficiency, a layer takes at least as long
    as its kernel launches, rings that cross nodes share the network cards, the pipeline is simulated, and a step waits
    for the slowest node.

    Args:
        shape: the model.
        cluster: the devices.
        coefficients: the efficiencies.

    Example:
        >>> from meshwright.planner.hardware import device
        >>> shape = ModelShape.of(name="7B", layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008,
        ...                       vocab=32000)
        >>> model = StepModel(shape, Cluster(device=device("a100-80"), gpus=8), Coefficients())
        >>> step = model.step(Candidate(shard=8, zero_stage=1, accumulation=4), Job(seq_len=4096, global_batch=32))
        >>> 1 < step.total < 20
        True
    """

    def __init__(self, shape: ModelShape, cluster: Cluster, coefficients: Coefficients):
        self.shape, self.cluster, self.k = shape, cluster, coefficients
        self.memory_rate = cluster.device.bandwidth
        self._layers: dict[object, tuple[Work, ...]] = {}  # a cache: in a search, many plans have equal layers

    # -- pieces -------------------------------------------------------------------------------------------------

    def matmul(self, rows: float, inner: float, columns: float, *, precision: Precision = "bf16") -> float:
        """Return the seconds of a matmul, with a penalty for small sizes, whose tiles are only partly filled."""
        device, k = self.cluster.device, self.k
        rate = matmul_peak(device, precision) * k.matmul
        rate *= device.sustained if precision == "bf16" else device.sustained_8bit * k.matmul_8bit
        tail = 1 + k.saturation * _TILE * (1 / rows + 1 / inner + 1 / columns)
        return 2 * rows * inner * columns / rate * tail

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
        hops = inside - 1 + _REMOTE * math.log2(size / inside)
        return volume * (size - 1) / size / rate + k.latency * hops

    def exchange(self, experts: ExpertShape, tokens: float, plan: Candidate, job: Job) -> float:
        """Return the seconds of one exchange of a layer's tokens between the ranks that share its experts.

        Links inside a domain and between domains work at the same time. This runtime sends a token to each rank of its
        experts. Published runs use libraries (DeepEP, HybridEP) that send it once to each node, where it is passed on.
        """
        if plan.ep == 1:
            return 0.0
        k, inside = self.k, min(plan.ep, self.cluster.domain)
        row = experts.sent_bytes(tokens, plan.ep, job.activation_bytes, job.expert_load) / plan.ep
        within, across = (inside - 1) * row, (plan.ep - inside) * row
        if not job.own_runtime and across:
            nodes = plan.ep / inside
            within = (plan.ep - 1) * row
            across *= experts.reached(nodes) / experts.reached(plan.ep)
        slowest = max(within / (self.cluster.fast * k.fast_link), across / (self.cluster.slow * k.slow_link))
        return slowest + k.latency * (_REMOTE if across else 1.0)

    def layer(self, plan: Candidate, job: Job) -> Work:
        """Return the seconds of one layer for one micro-batch, as the mean over the layers."""
        return mean_work(self.layers(plan, job), self.shape.counts)

    def layers(self, plan: Candidate, job: Job) -> tuple[Work, ...]:
        """Return the seconds of one layer of each run for one micro-batch."""
        key = (plan.tp, plan.sequence_parallel, plan.cp, plan.context, plan.ulysses, plan.ep, plan.micro_batch,
               plan.recompute, plan.splits_backward, job)  # fmt: skip
        if key not in self._layers:
            self._layers[key] = tuple(self._layer(run, plan, job) for run in self.shape.runs)
        return self._layers[key]

    def _layer(self, layer: LayerShape, plan: Candidate, job: Job) -> Work:
        k, t = self.k, plan.tp
        rows = plan.micro_batch * job.seq_len / plan.cp
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
        # Without a fused kernel, causal attention computes all scores and moves them through memory several times.
        seen = layer.attended(job.seq_len) if job.fused_attention else job.seq_len
        attention = 4 * rows * q * seen / (self.cluster.device.flops * k.attention)
        if not job.fused_attention and layer.head_dim % _ALIGNED:
            attention *= _MISALIGNED
        scores = 0.0 if job.fused_attention else _SCORE_BYTES * rows * layer.heads / t * job.seq_len
        # A norm reads once and writes once, a residual sum reads twice and writes once, and a layer has two of each.
        # The other terms are the rotation of q and k, and the gate.
        traffic = scores + rows * (20 * h / plan.sp + 8 * (q + kv) + f * (2 + 2 * layer.mlp_inputs))
        traffic *= job.activation_bytes / 2
        elementwise = k.elementwise * traffic / self.memory_rate
        # Weights are cast once per step and the casts are kept, so only the casts of inputs count.
        elementwise += k.elementwise * _CAST_BYTES[precision] * rows * (2 * h + q + f) / self.memory_rate
        elementwise += moved
        reduce = 2 * self.ring(job.activation_bytes * rows * h, t, 1)
        in_blocks = [k.elementwise * size / self.memory_rate for size in block_bytes(layer, plan, job)]
        attended = attention + in_blocks[0]
        attended_back = (3.5 if attends_twice(layer, plan, job) else 2.5) * attention + in_blocks[1]
        sent, sent_back = exchanges(
            layer, plan, seq_len=job.seq_len, element_bytes=job.activation_bytes, own_runtime=job.own_runtime
        )
        exchange, hidden = self._exchanged(sent, attended, plan)
        exchange_back, hidden_back = self._exchanged(sent_back, attended_back, plan)

        busy = matmul + attended + elementwise
        launch = k.launch * (1 + ROUTED_LAUNCHES * (layer.experts is not None))
        forward = self._launched(busy + 2 * reduce + exchange + 2 * to_experts, launch)
        back = 2 * matmul + attended_back + 2 * elementwise
        backward = self._launched(back + 2 * reduce + exchange_back + 2 * to_experts, 2 * launch)
        again = 0.0
        if plan.recompute == "selective":
            again = attended + k.elementwise * scores / self.memory_rate
        elif plan.recompute == "full":
            again = forward
        # Weight gradients that wait do not keep the whole sequence, and gather it again.
        regathered = reduce if plan.splits_backward and plan.sequence_parallel else 0.0
        backward += regathered
        exchanged = exchange + exchange_back
        communication = 4 * reduce + regathered + exchanged + 4 * to_experts
        return Work(
            matmul=3 * matmul,
            attention=attended + attended_back,
            elementwise=forward + backward - 3 * matmul - attended - attended_back - communication,
            recompute=again,
            tensor=4 * reduce + regathered,
            context=exchanged,
            experts=4 * to_experts,
            forward=forward,
            backward=backward + again,
            weight_grad=matmul - routed + regathered,  # experts compute both gradients together
            hidden=hidden + hidden_back,
        )

    def _experts(self, layer: LayerShape, plan: Candidate, job: Job) -> tuple[float, float, float]:
        """Return the seconds of the matmuls and the other kernels of a layer's experts in forward, and of an exchange.

        Each expert multiplies its own rows, so fewer rows of each lower the efficiency of all.
        """
        experts = layer.experts
        if experts is None:
            return 0.0, 0.0, 0.0
        tokens = plan.micro_batch * job.seq_len / plan.cp / plan.sp
        rows, own = experts.rows(tokens, plan.ep, job.expert_load), experts.count / plan.ep
        each, h, width = rows / own, experts.hidden, experts.width
        matmul = self.matmul(tokens, h, experts.count)
        matmul += own * self.matmul(each, h, width * experts.inputs, precision=job.precision)
        matmul += own * self.matmul(each, width, h, precision=job.precision)
        traffic = experts.moved(rows) * job.activation_bytes / 2 + _CAST_BYTES[job.precision] * rows * (h + width)
        moved = self.k.elementwise * traffic / self.memory_rate
        return matmul, moved, self.exchange(experts, tokens, plan, job)

    def _launched(self, busy: float, launches: float) -> float:
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
        rows, columns = plan.micro_batch * job.seq_len / plan.cp, self.shape.vocab / plan.tp
        # 16-bit logits and a 32-bit loss have 14 bytes per logit, each of which is moved about twice.
        loss = self.k.elementwise * 2 * (12 + job.activation_bytes) * rows * columns / self.memory_rate
        matmul = self.matmul(rows, self.shape.hidden, columns)
        if job.own_runtime and job.logits == "chunked" and plan.schedule != "gpipe":
            # Chunk by chunk, this runtime computes the gradients beside the logits; backward only scales them.
            return Work(matmul=3 * matmul, elementwise=loss, forward=3 * matmul + loss)
        return Work(
            matmul=3 * matmul,
            elementwise=loss,
            forward=matmul + loss / 2,
            backward=2 * matmul + loss / 2,
            weight_grad=matmul,
        )

    # -- the step -----------------------------------------------------------------------------------------------

    def stages(self, plan: Candidate, job: Job) -> tuple[list[float], list[float]]:
        """Return the seconds of each virtual stage's forward and backward."""
        layers, head = self.layers(plan, job), self.head(plan, job)
        repeated = 1 - recomputed_share(plan, self.shape.layers)
        held = stage_runs(plan, self.shape.counts)
        forward = _weighted(held, [layer.forward for layer in layers])
        backward = _weighted(held, [layer.backward - layer.recompute * repeated for layer in layers])
        forward[-1] += head.forward
        backward[-1] += head.backward
        return forward, backward

    def pipeline(self, plan: Candidate, job: Job) -> SimulatedPipeline:
        """Return what is simulated: the schedule and the seconds of its virtual stages."""
        forward, backward = self.stages(plan, job)
        held = stage_runs(plan, self.shape.counts)
        weight = _weighted(held, [layer.weight_grad for layer in self.layers(plan, job)])
        weight[-1] += self.head(plan, job).weight_grad
        transfer = self.transfer(plan, job) if plan.pp > 1 else 0.0
        shared = (1 - self.k.overlap) * transfer  # a transfer slows the compute that runs at the same time
        return SimulatedPipeline(
            schedule=plan.schedule,
            ranks=plan.pp,
            forward=tuple(value + shared for value in forward),
            input_grad=tuple(both + shared - own for both, own in zip(backward, weight, strict=True)),
            weight_grad=tuple(weight),
            transfer=transfer,
        )

    def balanced(self, plan: Candidate, job: Job) -> Candidate | None:
        """Return the plan with fewer layers on the head's stage; None if its slowest stage would not be faster."""
        both, head = [layer.forward + layer.backward for layer in self.layers(plan, job)], self.head(plan, job)
        counts, count = self.shape.counts, plan.pp * plan.chunks
        # The head's share of a layer is rounded, so that few partitions are computed.
        last = round((head.forward + head.backward) / both[0] * 8) / 8
        units = [seconds / both[0] for seconds in both]
        each = [unit for unit, layers in zip(units, counts, strict=True) for _ in range(layers)]
        stages = balanced_stages(each, count, last=last)

        def slowest(plan: Candidate) -> float:
            *others, final = _weighted(stage_runs(plan, counts), units)
            return max(*others, final + last)

        balanced = replace(plan, stages=stages)
        return None if slowest(balanced) >= slowest(replace(plan, stages=None)) else balanced

    def step(self, plan: Candidate, job: Job) -> StepTime:
        """Return the time of one step of a plan that fits this cluster and this job."""
        k, m = self.k, plan.accumulation
        layers, head = self.layers(plan, job), self.head(plan, job)
        forward, backward = (_of_ranks(plan, seconds) for seconds in self.stages(plan, job))
        slowest = max(range(plan.pp), key=lambda i: forward[i] + backward[i])
        busy = m * (forward[slowest] + backward[slowest])
        piped = pipeline_time(self.pipeline(plan, job), m) if plan.pp > 1 else busy
        held = rank_runs(plan, self.shape.counts)[slowest]

        def of(kind: str) -> float:
            return float(sum(m * count * getattr(layer, kind) for count, layer in zip(held, layers, strict=True)))

        tail = m if slowest == _last_rank(plan) else 0
        data = self.data(plan, job, forward[slowest], backward[slowest])
        optimizer = self.optimizer(plan, job)
        total = piped + data + optimizer + k.step
        straggler = total * k.straggler * math.log2(self.cluster.nodes)
        return StepTime(
            matmul=of("matmul") + tail * head.matmul,
            attention=of("attention"),
            elementwise=of("elementwise") + tail * head.elementwise,
            recompute=of("recompute") * recomputed_share(plan, self.shape.layers),
            tensor=of("tensor"),
            context=of("context"),
            experts=of("experts"),
            data=data,
            bubble=piped - busy,
            optimizer=optimizer,
            other=k.step + straggler,
        )

    def bound(self, plan: Candidate, job: Job) -> float:
        """Return a lower bound on ``step(plan, job).total`` that needs no simulation."""
        piped, forward, backward = self._piped(plan, job)
        rest = self.data(plan, job, forward, backward) + self.optimizer(plan, job)
        return self._with_stragglers(piped + rest + self.k.step) * _ROUNDING

    def pipe_bound(self, plan: Candidate, job: Job) -> float:
        """Return a lower bound on the time of a plan and of the same plan under any ZeRO stage and recompute."""
        return self._with_stragglers(self._piped(plan, job)[0] + self.k.step) * _ROUNDING

    def _with_stragglers(self, seconds: float) -> float:
        return seconds * (1 + self.k.straggler * math.log2(self.cluster.nodes))

    def _piped(self, plan: Candidate, job: Job) -> tuple[float, float, float]:
        """Return a lower bound on the time of the pipeline, and the slowest rank's forward and backward."""
        every_forward, every_backward = self.stages(plan, job)
        forward, backward = _of_ranks(plan, every_forward), _of_ranks(plan, every_backward)
        busy = [f + b for f, b in zip(forward, backward, strict=True)]
        # A rank waits for its first forward and, after its last backward, for the backwards of the earlier stages,
        # unless its last operation is the gradient of weights, for which nobody waits.
        piped, before = 0.0, 0.0
        for rank, own in enumerate(busy):
            piped = max(piped, before + plan.accumulation * own)
            before += every_forward[rank] + (0.0 if plan.splits_backward else every_backward[rank])
        slowest = busy.index(max(busy))
        return piped, forward[slowest], backward[slowest]

    def transfer(self, plan: Candidate, job: Job) -> float:
        """Return the seconds to send one micro-batch's activations to the next stage."""
        volume = boundary_bytes(self.shape, plan, job)
        inside = self.cluster.gpus <= self.cluster.domain
        rate = self.cluster.fast * self.k.fast_link if inside else self.cluster.slow * self.k.slow_link
        return volume / rate + self.k.latency * (1 if inside else _REMOTE)

    def stage_parameters(self, plan: Candidate) -> tuple[float, float]:
        """Return the elements on the largest rank of the pipeline before ZeRO shards them: beside experts, and of them.

        Without ep the second is 0, and the first includes experts, which as many ranks hold as any other weight.
        """
        shape = self.shape
        ends = shape.embedding_parameters + (shape.head_parameters if _last_rank(plan) == 0 else 0)
        held = rank_runs(plan, shape.counts)
        each = [run.rank_parameters(plan.tp, plan.ep) for run in shape.runs]
        dense, experts = (_weighted(held, values) for values in zip(*each, strict=True))
        largest = max(range(plan.pp), key=lambda rank: dense[rank] + experts[rank])
        other = dense[largest] + ends / plan.tp
        return (other + experts[largest], 0.0) if plan.ep == 1 else (other, experts[largest])

    def data(self, plan: Candidate, job: Job, forward: float, backward: float) -> float:
        """Return the seconds per step of data-parallel communication that compute does not hide."""
        overlaps = self.overlaps(plan, job, forward, backward)
        return sum(overlap.exposed * (plan.accumulation if overlap.is_repeated else 1) for overlap in overlaps)

    def overlaps(self, plan: Candidate, job: Job, forward: float, backward: float) -> list[Overlap]:
        """Return the data-parallel communication of the slowest rank, with what hides it.

        Args:
            plan, job: the plan and the job.
            forward, backward: seconds of the rank's compute for one micro-batch.
        """
        dense, experts = self.stage_parameters(plan)
        found = self._reduced(dense, plan, job, (forward, backward)) if plan.data_ranks > 1 else []
        if experts and plan.copies > 1:
            found += self._reduced(experts, plan, job, (forward, backward), of_experts=True)
        return found

    def _reduced(
        self, elements: float, plan: Candidate, job: Job, compute: tuple[float, float], *, of_experts: bool = False
    ) -> list[Overlap]:
        """Return the communication of weights over the ranks that hold the same ones, with what hides it.

        Args:
            elements: elements of these weights on a rank.
            plan, job: the plan and the job.
            compute: seconds of the rank's forward and backward of one micro-batch.
            of_experts: whether the weights are those of experts that ep spreads.
        """
        size, shard, stride = plan.data_ranks, plan.shard * plan.cp, plan.tp
        if of_experts:
            size, shard, stride = plan.copies, plan.expert_shard, plan.ep
        gradients = elements * plan.sent_bytes(job.gradient_bytes, own_runtime=job.own_runtime)
        weights = elements * job.weight_bytes

        def hidden_by(phase: Literal["forward", "backward"], communication: float, *, is_repeated: bool) -> Overlap:
            exposed = _exposed(communication, compute[phase == "backward"], self.k.overlap)
            return Overlap(phase=phase, is_repeated=is_repeated, seconds=communication, exposed=exposed)

        across: list[Overlap] = []
        if plan.zero_stage and plan.replicate > 1:  # each group of ranks that share one state sums its own gradients
            volume = 2 * self.ring(gradients / shard, plan.replicate, stride * shard)
            across.append(hidden_by("backward", volume, is_repeated=False))
        if plan.zero_stage == 3:
            # In this runtime backward does not read the embedding, nor the head, whose gradients forward computes.
            is_skipped = job.own_runtime and not of_experts
            ends = self.shape.embedding_parameters + self.shape.head_parameters if is_skipped else 0
            read_again = weights - ends / plan.tp * job.weight_bytes
            twice = self.shape.embedding_parameters if is_skipped and self.shape.tied else 0
            gather = self.ring(weights + twice / plan.tp * job.weight_bytes, shard, stride)
            again, scatter = self.ring(read_again, shard, stride), self.ring(gradients, shard, stride)
            return [
                hidden_by("forward", gather, is_repeated=True),
                hidden_by("backward", again + scatter, is_repeated=True),
                *across,
            ]
        if not plan.zero_stage:
            once = hidden_by("backward", self.ring(gradients, size, stride), is_repeated=False)
            return [once, once]
        return [
            hidden_by("backward", self.ring(gradients, shard, stride), is_repeated=plan.zero_stage == 2),
            hidden_by("forward", self.ring(weights, shard, stride), is_repeated=False),
            *across,
        ]

    def optimizer(self, plan: Candidate, job: Job) -> float:
        """Return the seconds of the optimizer step, which is bound by memory traffic."""
        dense, experts = self.stage_parameters(plan)
        if plan.zero_stage:
            dense, experts = dense / (plan.shard * plan.cp), experts / plan.expert_shard
        gradient = plan.summed_bytes(job.gradient_bytes, own_runtime=job.own_runtime)
        traffic = (dense + experts) * (2 * job.optimizer_bytes + gradient + job.weight_bytes)
        return self.k.optimizer * traffic / self.memory_rate


def boundary_bytes(shape: ModelShape, plan: Candidate, job: Job) -> float:
    """Return the bytes of one micro-batch's activations between two stages, which are those of their gradient too.

    A step sends them ``2 * plan.accumulation`` times over each boundary between virtual stages of different ranks.

    Example:
        >>> shape = ModelShape.of(name="7B", layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008,
        ...                       vocab=32000)
        >>> boundary_bytes(shape, Candidate(pp=2, tp=2, sequence_parallel=True), Job(seq_len=4096, global_batch=1))
        16777216.0
    """
    return job.activation_bytes * plan.micro_batch * job.seq_len / plan.cp * shape.hidden / plan.sp


def _weighted(held: Sequence[Sequence[int]], values: Sequence[float]) -> list[float]:
    """Return the sum of the values of the layers of each stage or rank, which holds so many layers of each run."""
    return [sum(count * value for count, value in zip(counts, values, strict=True)) for counts in held]


def _of_ranks(plan: Candidate, stages: Sequence[float]) -> list[float]:
    """Return the sums over the virtual stages of each rank."""
    p, v = plan.pp, plan.chunks
    if v == 1:
        return list(stages)
    return [sum(stages[s] for s in stages_of_rank(plan.schedule, rank, p, v)) for rank in range(p)]


def _last_rank(plan: Candidate) -> int:
    """Return the rank that holds the last virtual stage, with the head."""
    return rank_of_stage(plan.schedule, plan.pp * plan.chunks - 1, plan.pp)


def _at_least(value: float, floor: float) -> float:
    """Return a smooth maximum, since kernels that take little longer than their launches hide them only partly."""
    return float((value**4 + floor**4) ** 0.25)


def _exposed(communication: float, compute: float, overlap: float) -> float:
    return communication - overlap * min(communication, compute)
