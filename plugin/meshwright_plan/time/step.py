"""Estimate the time of one training step under a plan, by part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from meshwright.plan.partition import balanced_stages
from meshwright.plan.schedule import rank_of_stage, stages_of_rank
from meshwright_plan.job.adapters import ADAPTER_BYTES, projections
from meshwright_plan.job.candidate import Candidate, Job, rank_runs, recomputed_share, stage_runs
from meshwright_plan.job.layer_shape import LayerShape
from meshwright_plan.job.optimizers import orthogonalised
from meshwright_plan.job.shapes import ModelShape
from meshwright_plan.memory.held_states import exchanged
from meshwright_plan.time.layer import REMOTE, LayerModel, Overlap, StepTime
from meshwright_plan.time.simulate import SimulatedPipeline, pipeline_time

_BUS = 25e9  # bytes per second from a device to its host and back: PCIe 4 x16
_HOST_MEMORY = 25e9  # bytes per second of the host's memory for each device: a host of eight has about 200 GB/s
_ROUNDING = 1 - 1e-9  # so that rounding does not lift a bound above the time that it equals


class StepModel(LayerModel):
    """Estimates the time of a training step.

    The model follows Megatron-LM's analyses (Narayanan et al. 2021, Korthikanti et al. 2022) and adds what their closed
    formulas omit: what ``LayerModel`` says of a layer, a simulated pipeline, and the wait for the slowest node.

    Args:
        shape, cluster, coefficients: as in ``LayerModel``.

    Example:
        >>> from meshwright_plan.machine.hardware import Cluster, Coefficients, device
        >>> shape = ModelShape.of(name="7B", layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008,
        ...                       vocab=32000)
        >>> model = StepModel(shape, Cluster(device=device("a100-80"), gpus=8), Coefficients())
        >>> plan = Candidate(dp=8, zero_stage=1, gradient_accumulation_steps=4)
        >>> step = model.step(plan, Job(seq_len=4096, global_batch=32))
        >>> 1 < step.total < 20
        True
    """

    skips_vocabulary = True  # whether backward under ZeRO-3 gathers neither the embedding nor the head

    def summed_bytes(self, plan: Candidate, job: Job) -> int:
        """Return the bytes of a gradient element that backward leaves."""
        return plan.summed_bytes(job.trained_bytes)

    def sent_bytes(self, plan: Candidate, job: Job) -> int:
        """Return the bytes in which a gradient element travels over dp."""
        return plan.sent_bytes(job.trained_bytes)

    def stages(self, plan: Candidate, job: Job) -> tuple[list[float], list[float]]:
        """Return the seconds of each virtual stage's forward and backward."""
        layers, head = self.layers(plan, job), self.head(plan, job)
        repeated = 1 - recomputed_share(plan, self.shape)
        held = stage_runs(plan, self.shape)
        forward = _weighted(held, [layer.forward for layer in layers])
        backward = _weighted(held, [layer.backward - layer.recompute * repeated for layer in layers])
        forward[-1] += head.forward
        backward[-1] += head.backward
        return forward, backward

    def pipeline(self, plan: Candidate, job: Job) -> SimulatedPipeline:
        """Return what is simulated: the schedule and the seconds of its virtual stages."""
        forward, backward = self.stages(plan, job)
        held = stage_runs(plan, self.shape)
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
        key = "cut", self.layer_key(plan, job), plan.pp, plan.schedule, plan.stages_per_rank
        stages = self.once(key, lambda: self._balanced(plan, job))
        return None if stages is None else plan.copy(stages=stages)

    def _balanced(self, plan: Candidate, job: Job) -> tuple[int, ...] | None:
        both, head = [layer.forward + layer.backward for layer in self.layers(plan, job)], self.head(plan, job)
        counts, count = self.shape.counts, plan.pp * plan.stages_per_rank
        # The shares of a layer of the head and of the towers are rounded, so that few partitions are computed.
        last = round((head.forward + head.backward) / both[0] * 8) / 8
        towers = round(self.shape.tower_layers * 8) / 8
        units = [seconds / both[0] for seconds in both]
        each = [unit for unit, layers in zip(units, counts, strict=True) for _ in range(layers)]
        stages = balanced_stages(each, count, first=towers, last=last)

        def slowest(plan: Candidate) -> float:
            first, *others, final = _weighted(stage_runs(plan, self.shape), units)
            return max(first + towers, *others, final + last)

        if stages[0] < self.shape.least_on_first:
            return None
        is_faster = slowest(plan.copy(stages=stages)) < slowest(plan.copy(stages=None))
        return stages if is_faster else None

    def step(self, plan: Candidate, job: Job) -> StepTime:
        """Return the time of one step of a plan that fits this cluster and this job."""
        k, m = self.k, plan.gradient_accumulation_steps
        layers, head = self.layers(plan, job), self.head(plan, job)
        forward, backward = (_of_ranks(plan, seconds) for seconds in self.stages(plan, job))
        slowest = max(range(plan.pp), key=lambda i: forward[i] + backward[i])
        busy = m * (forward[slowest] + backward[slowest])
        piped = pipeline_time(self.pipeline(plan, job), m) if plan.pp > 1 else busy
        held = rank_runs(plan, self.shape)[slowest]

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
            recompute=of("recompute") * recomputed_share(plan, self.shape),
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
        key = "bound", *plan.layout, plan.gradient_accumulation_steps, plan.recompute, plan.recomputed_layers, job
        return self.once(key, lambda: self._bounded(plan, job))

    def _bounded(self, plan: Candidate, job: Job) -> tuple[float, float, float]:
        every_forward, every_backward = self.stages(plan, job)
        forward, backward = _of_ranks(plan, every_forward), _of_ranks(plan, every_backward)
        busy = [f + b for f, b in zip(forward, backward, strict=True)]
        # A rank waits for its first forward and, after its last backward, for the backwards of the earlier stages,
        # unless its last operation is the gradient of weights, for which nobody waits.
        piped, before = 0.0, 0.0
        for rank, own in enumerate(busy):
            piped = max(piped, before + plan.gradient_accumulation_steps * own)
            before += every_forward[rank] + (0.0 if plan.splits_backward else every_backward[rank])
        slowest = busy.index(max(busy))
        return piped, forward[slowest], backward[slowest]

    def transfer(self, plan: Candidate, job: Job) -> float:
        """Return the seconds to send one micro-batch's activations to the next stage."""
        volume = boundary_bytes(self.shape, plan, job)
        inside = self.cluster.gpus <= self.cluster.domain
        rate = self.cluster.fast * self.k.fast_link if inside else self.cluster.slow * self.k.slow_link
        return volume / rate + self.k.latency * (1 if inside else REMOTE)

    def stage_parameters(self, plan: Candidate) -> tuple[float, float]:
        """Return the elements on the largest rank of the pipeline before ZeRO shards them: beside experts, and of them.

        Without ep the second is 0, and the first includes experts, which as many ranks hold as any other weight.
        """
        key = "parameters", plan.tp, plan.ep, plan.pp, plan.schedule, plan.stages_per_rank, plan.stages
        return self.once(key, lambda: self._largest_stage(plan))

    def _largest_stage(self, plan: Candidate) -> tuple[float, float]:
        shape = self.shape
        ends = shape.embedding_parameters + (shape.head_parameters if _last_rank(plan) == 0 else 0)
        held = rank_runs(plan, shape)
        each = [run.rank_parameters(plan.tp, plan.ep) for run in shape.runs]
        dense, experts = (_weighted(held, values) for values in zip(*each, strict=True))
        largest = max(range(plan.pp), key=lambda rank: dense[rank] + experts[rank])
        other = dense[largest] + ends / plan.tp
        return (other + experts[largest], 0.0) if plan.ep == 1 else (other, experts[largest])

    def data(self, plan: Candidate, job: Job, forward: float, backward: float) -> float:
        """Return the seconds per step of data-parallel communication that compute does not hide."""
        overlaps = self.overlaps(plan, job, forward, backward)
        micro = plan.gradient_accumulation_steps
        return sum(overlap.exposed * (micro if overlap.is_repeated else 1) for overlap in overlaps)

    def overlaps(self, plan: Candidate, job: Job, forward: float, backward: float) -> list[Overlap]:
        """Return the data-parallel communication of the slowest rank, with what hides it.

        Args:
            plan, job: the plan and the job.
            forward, backward: seconds of the rank's compute for one micro-batch.
        """
        held, trained, compute = self.stage_parameters(plan), self.trained_parameters(plan, job), (forward, backward)
        lora = job.lora
        packed = (
            0.0 if lora is None else self._most(plan, [lora.packed_elements(run, plan.tp) for run in self.shape.runs])
        )
        found = self._reduced((held[0] - packed, trained[0]), plan, job, compute) if plan.data_ranks > 1 else []
        if held[1] and plan.copies > 1 and (trained[1] or plan.zero_stage == 3):
            found += self._reduced((held[1], trained[1]), plan, job, compute, of_experts=True)
        return found

    def trained_parameters(self, plan: Candidate, job: Job) -> tuple[float, float]:
        """Return those of ``stage_parameters`` that are trained."""
        if job.lora is None:
            return self.stage_parameters(plan)
        return self._most(plan, [job.lora.elements(run, plan.tp) for run in self.shape.runs]), 0.0

    def _most(self, plan: Candidate, each: list[float]) -> float:
        """Return the largest sum over a rank's layers, of which ``each`` has the value of one layer of each run."""
        return max(_weighted(rank_runs(plan, self.shape), each))

    def _reduced(
        self,
        sizes: tuple[float, float],
        plan: Candidate,
        job: Job,
        compute: tuple[float, float],
        *,
        of_experts: bool = False,
    ) -> list[Overlap]:
        """Return the communication of weights over the ranks that hold the same ones, with what hides it.

        Args:
            sizes: elements of these weights on a rank, without packed ones, and of the trained ones.
            plan, job: the plan and the job.
            compute: seconds of the rank's forward and backward of one micro-batch.
            of_experts: whether the weights are those of experts that ep spreads.
        """
        size, shard, stride = plan.data_ranks, plan.shard * plan.cp, plan.tp
        if of_experts:
            size, shard, stride = plan.copies, plan.expert_shard, plan.ep
        gradients = sizes[1] * self.sent_bytes(plan, job)
        weights = sizes[0] * job.element_bytes

        def hidden_by(phase: Literal["forward", "backward"], communication: float, *, is_repeated: bool) -> Overlap:
            exposed = _exposed(communication, compute[phase == "backward"], self.k.overlap)
            return Overlap(phase=phase, is_repeated=is_repeated, seconds=communication, exposed=exposed)

        across: list[Overlap] = []
        if plan.zero_stage and plan.replicate > 1:  # each group of ranks that share one state sums its own gradients
            volume = 2 * self.ring(gradients / shard, plan.replicate, stride * shard)
            across.append(hidden_by("backward", volume, is_repeated=False))
        if plan.zero_stage == 3:
            # Backward does not read the embedding, nor the head, whose gradients forward computes.
            is_skipped = self.skips_vocabulary and not of_experts
            ends = self.shape.embedding_parameters + self.shape.head_parameters if is_skipped else 0
            read_again = weights - ends / plan.tp * job.element_bytes
            twice = self.shape.embedding_parameters if is_skipped and self.shape.tied else 0
            gather = self.ring(weights + twice / plan.tp * job.element_bytes, shard, stride)
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
            hidden_by("forward", self.ring(sizes[1] * job.trained_bytes, shard, stride), is_repeated=False),
            *across,
        ]

    def optimizer(self, plan: Candidate, job: Job) -> float:
        """Return the seconds of the optimizer step, which is bound by memory traffic unless it multiplies matrices.

        On the host, it is also bound by the bus, over which gradients and weights come while it steps others.
        """
        dense, experts = self.trained_parameters(plan, job)
        if plan.zero_stage:
            dense, experts = dense / (plan.shard * plan.cp), experts / plan.expert_shard
        gradient = self.summed_bytes(plan, job)
        state: float = job.optimizer_bytes if job.lora is None else 2 * ADAPTER_BYTES
        if job.optimizer != "adamw":
            state += job.kind.per_element(4) - 8
        traffic = (dense + experts) * (2 * state + gradient + job.trained_bytes)
        if plan.offload is not None:
            arriving = (dense + experts) * (gradient + job.trained_bytes)
            return max(arriving / _BUS, traffic / _HOST_MEMORY) + self._whole_steps(plan, job)
        return self.k.optimizer * traffic / self.memory_rate + self._whole_steps(plan, job)

    def _whole_steps(self, plan: Candidate, job: Job) -> float:
        """Return the seconds in which owners get whole parameters and return them, and of what they multiply."""
        kind, k, t = job.kind, self.k, plan.tp
        seconds, is_cut = 0.0, plan.zero_stage > 0 or t > 1 or plan.ep > 1
        ranks = plan.data_ranks * t if is_cut else 1
        if kind.is_whole and is_cut and ranks > 1:
            inside = ranks <= self.cluster.domain
            rate = self.cluster.fast * k.fast_link if inside else self.cluster.slow * k.slow_link
            # Parts of the gradients arrive, and of the weights where owners lack them, and those of the result leave.
            own = sum(self.trained_parameters(plan, job)) * t / ranks
            seconds += (exchanged(plan, job.trained_bytes) // 2 + 1) * 4 * own / rate
        if kind.orthogonalises:
            held = self._most(plan, [self._orthogonalised(run, job) for run in self.shape.runs])
            seconds += held / ranks / (self.cluster.device.flops * self.cluster.device.sustained * k.matmul)
        return seconds

    def _orthogonalised(self, layer: LayerShape, job: Job) -> float:
        rank = None if job.lora is None else job.lora.rank
        return sum(
            orthogonalised(each.inner, each.outer)
            if rank is None
            else orthogonalised(each.inner, rank) + orthogonalised(rank, each.outer)
            for each in projections(layer)
        )


def boundary_bytes(shape: ModelShape, plan: Candidate, job: Job) -> float:
    """Return the bytes of one micro-batch's activations between two stages, which are those of their gradient too.

    A step sends them twice for each micro-batch over each boundary between virtual stages of different ranks.

    Example:
        >>> shape = ModelShape.of(name="7B", layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008,
        ...                       vocab=32000)
        >>> boundary_bytes(shape, Candidate(pp=2, tp=2, sequence_parallel=True), Job(seq_len=4096, global_batch=1))
        16777216.0
    """
    return job.element_bytes * plan.micro_batch_size * job.seq_len / plan.cp * shape.hidden / plan.sp


def _weighted(held: Sequence[Sequence[int]], values: Sequence[float]) -> list[float]:
    """Return the sum of the values of the layers of each stage or rank, which holds so many layers of each run."""
    if len(values) == 1:  # a search asks this several hundred thousand times, nearly always for layers of one kind
        return [count * values[0] for (count,) in held]
    return [sum(count * value for count, value in zip(counts, values, strict=True)) for counts in held]


def _of_ranks(plan: Candidate, stages: Sequence[float]) -> list[float]:
    """Return the sums over the virtual stages of each rank."""
    p, v = plan.pp, plan.stages_per_rank
    if v == 1:
        return list(stages)
    return [sum(stages[s] for s in stages_of_rank(plan.schedule, rank, p, v)) for rank in range(p)]


def _last_rank(plan: Candidate) -> int:
    """Return the rank that holds the last virtual stage, with the head."""
    return rank_of_stage(plan.schedule, plan.pp * plan.stages_per_rank - 1, plan.pp)


def _exposed(communication: float, compute: float, overlap: float) -> float:
    return communication - overlap * min(communication, compute)
