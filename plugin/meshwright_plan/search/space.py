"""Enumerate the plans that are legal for a model on a cluster, and record the reasons against all other plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.errors import PlanError
from meshwright.mesh.rank_grid import PLAN_AXES
from meshwright.plan.parts import Method, local_tokens
from meshwright.plan.schedule import SPLIT_BACKWARD, Schedule
from meshwright_plan.context_cost import methods
from meshwright_plan.job.candidate import Candidate, Job, Recompute
from meshwright_plan.job.shapes import ModelShape
from meshwright_plan.machine.devices import matmul_peak
from meshwright_plan.machine.hardware import Cluster

_CHUNKS = 8  # largest number of interleaved chunks per stage; more chunks would only add transfers
_CONTEXT = 64  # largest context-parallel size
_SHORTEST = 512  # tokens of the shortest chunk that context parallelism gives a rank; shorter ones do not fill a device


@dataclass(kw_only=True)
class Space:
    """The candidates for a model, a cluster and a job.

    ``pruned`` maps each omitted axis value to the reason. Iterating over ``regions()`` fills it. ``refused`` maps
    the label of each plan that fits and that the runtime refuses to the reason; a search fills it.

    Args:
        shape: the model.
        cluster: the devices.
        job: sequence length and global batch.
        allow_future: whether to include plans that this version's runtime cannot run.
        most_zero: the highest ZeRO stage to include.
        against: axis ("tp", "cp", "pp" or "ep"), or value of one ("pp=4") -> the reason against all plans that have it.
        refuses: returns why the runtime refuses a plan; None if it takes it. It is asked of plans that fit.

    Example:
        >>> from meshwright_plan.machine.hardware import device
        >>> shape = ModelShape.of(name="7B", layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008,
        ...                       vocab=32000)
        >>> space = Space(shape=shape, cluster=Cluster(device=device("a100-80"), gpus=4), job=Job(seq_len=4096,
        ...               global_batch=2))
        >>> [(region.dp, region.tp) for region in space.regions() if region.pp == region.cp == 1]
        [(2, 2), (1, 4)]
        >>> space.pruned["dp=4"]
        'the global batch of 2 sequences is not divisible by 4'
    """

    shape: ModelShape
    cluster: Cluster
    job: Job
    allow_future: bool = False
    most_zero: int = 3
    against: Mapping[str, str] = field(default_factory=dict)
    refuses: Callable[[Candidate], str | None] = lambda plan: None
    pruned: dict[str, str] = field(default_factory=dict, init=False)
    refused: dict[str, str] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        matmul_peak(self.cluster.device, self.job.precision)  # raises for a precision that the device lacks

    def regions(self) -> Iterator[Candidate]:
        """Yield the legal layouts of the ranks, in a fixed order.

        A layout is a plan without a choice of micro-batch size, ZeRO stage and recompute.
        """
        for dp, sizes in self._sizes(self.cluster.gpus, PLAN_AXES[1:]):
            if self._rejected(f"dp={dp}", self._dp_reason(dp)):
                continue
            ranks = Candidate(dp=dp).copy(**sizes)
            if self._rejected(f"tp={ranks.tp},cp={ranks.cp}", self._shared_tokens_reason(ranks)):
                continue
            for context, ulysses in self._methods(ranks.cp, ranks.tp):
                for schedule, chunks in self._schedules(ranks.pp, self.job.global_batch // dp):
                    for ep in self._experts(ranks):
                        yield ranks.copy(context=context, ulysses=ulysses, ep=ep, schedule=schedule, chunks=chunks)

    def _sizes(self, ranks: int, axes: Sequence[str]) -> Iterator[tuple[int, dict[str, int]]]:
        """Yield the ways to split ranks over axes, as the ranks that are left for dp and the size of each axis."""
        if not axes:
            yield ranks, {}
            return
        name, *others = axes
        reason = getattr(self, f"_{name}_reason")
        for size in divisors(ranks):
            if not self._rejected(f"{name}={size}", self.reason_against(name, size) or reason(size)):
                for left, sizes in self._sizes(ranks // size, others):
                    yield left, {name: size} | sizes

    def micro_batches(self, region: Candidate) -> list[int]:
        """Return the micro-batch sizes that divide a rank's sequences and leave enough micro-batches for a pipeline."""
        rows = self.job.global_batch // region.dp
        sizes = [size for size in divisors(rows) if rows // size >= region.pp or size == 1]
        if region.schedule == "interleaved":
            sizes = [size for size in sizes if rows // size % region.pp == 0]
        return sizes

    def zero(self, region: Candidate) -> list[tuple[int, int]]:
        """Return (ZeRO stage, replicate) for each way to shard the state over the data-parallel ranks."""
        dp, cp = region.dp, region.cp
        ways = [(0, 1)]
        if dp * cp > 1:
            ways.append((1, 1))
            if region.pp == 1:
                ways += [(stage, 1) for stage in (2, 3) if stage <= self.most_zero]
                local = max(1, self.cluster.domain // (region.tp * cp))
                if 1 < local < dp and dp % local == 0 and self.allow_future and self.most_zero == 3:
                    ways.append((3, dp // local))
            else:
                self.pruned.setdefault(
                    "zero>=2 with pp>1", "gradients or weights would be communicated for each micro-batch"
                )
        return ways

    def recompute(self, region: Candidate) -> tuple[Recompute, ...]:
        """Return the kinds of recompute, the fastest first."""
        if region.schedule in SPLIT_BACKWARD:
            self.pruned.setdefault(
                "recompute=full with zb-h1 or zbv", "the gradients of the weights would need the layer once more"
            )
            return ("none", "selective") if self.allow_future else ("none",)
        return ("none", "selective", "full") if self.allow_future else ("none", "full")

    def candidate(
        self,
        region: Candidate,
        micro_batch: int,
        zero: tuple[int, int],
        recompute: Recompute,
        recomputed: int | None = None,
    ) -> Candidate:
        """Return the candidate for a region, a micro-batch size, a ZeRO stage and a recompute mode."""
        stage, replicate = zero
        return region.copy(
            replicate=replicate,
            sequence_parallel=region.tp > 1 and local_tokens(self.job.seq_len, region.cp) % region.tp == 0,
            micro_batch_size=micro_batch,
            gradient_accumulation_steps=self.job.global_batch // region.dp // micro_batch,
            zero_stage=stage,
            recompute=recompute,
            recomputed_layers=recomputed,
        )

    def reason_against(self, axis: str, size: int) -> str | None:
        """Return the reason of ``against`` that holds for a size of an axis."""
        return self.against.get(f"{axis}={size}", self.against.get(axis)) if size > 1 else None

    def _rejected(self, region: str, reason: str | None) -> bool:
        if reason:
            self.pruned.setdefault(region, reason)
        return reason is not None

    def _dp_reason(self, dp: int) -> str | None:
        batch = self.job.global_batch
        return f"the global batch of {batch} sequences is not divisible by {dp}" if batch % dp else None

    def _tp_reason(self, tp: int) -> str | None:
        shape, domain = self.shape, self.cluster.domain
        if tp > domain:
            return f"crosses the fast domain of {domain} devices"
        if domain % tp and tp > 1:
            return f"is not a divisor of {domain}, the number of devices in the fast domain"
        lora = self.job.lora
        if tp > 1 and lora is not None and (reason := lora.against_tensor(shape.runs, tp)):
            return reason
        if uneven := next(shape.uneven(tp), None):
            return f"{uneven} is not divisible by {tp}"
        return self.too_narrow(tp)

    def too_narrow(self, tp: int) -> str | None:
        """Return which width of the layers ``tp`` ranks cannot share in the job's precision; None if all are shared."""
        for run in self.shape.runs if self.job.precision == "fp8" else ():
            widths = (
                ("hidden", run.hidden, run.hidden),
                ("queries", run.query_width, run.query_width // tp),
                ("keys", run.kv_width, run.local_kv_width(tp)),
                ("ffn", run.ffn, run.ffn // tp),
            )
            for name, whole, part in widths:
                if part % 16:
                    return f"{name}={whole} over tp={tp} is no multiple of 16, which float8 needs"
            if run.local_kv_width(tp) * tp > run.kv_width:
                return f"tp={tp} ranks would share {run.kv_heads} key heads, which float8 does not take"
        return None

    def _cp_reason(self, cp: int) -> str | None:
        if cp == 1:
            return None
        if not self.shape.traits.context:
            return "the family has an attention of its own, which does not call transformers' attention interface"
        if cp > _CONTEXT:
            return f"more than {_CONTEXT} context-parallel ranks"
        if self.job.seq_len < 2 * cp * _SHORTEST:
            return f"cuts {self.job.seq_len} tokens into chunks of fewer than {_SHORTEST}, too short to fill a device"
        return None

    def _methods(self, cp: int, tp: int) -> list[tuple[Method, int | None]]:
        """Return the methods of context parallelism that the model's heads allow, as (context, ulysses)."""
        found = []
        for context, ulysses, reason in methods(self.shape, cp, tp):
            name = context if ulysses is None else f"{context}-{ulysses}"
            if ulysses is not None and reason is None and ulysses * tp > self.cluster.domain:
                reason = f"with tp={tp} exchanges heads beyond the fast domain of {self.cluster.domain} devices"
            if not self._rejected(f"cp={cp}({name})", reason):
                found.append((context, ulysses))
        # The largest groups of "hybrid" send the least, as long as they stay in the fast domain.
        groups = [ulysses for _, ulysses in found if ulysses is not None]
        return [method for method in found if method[1] is None or method[1] == max(groups)]

    def _shared_tokens_reason(self, ranks: Candidate) -> str | None:
        local = local_tokens(self.job.seq_len, ranks.cp)
        if not self.shape.experts or local % ranks.tp == 0:
            return None
        return (
            f"{local} tokens of a rank cannot be shared for sequence parallelism, and the planner has no estimate for "
            "experts under tp without it"
        )

    def _experts(self, ranks: Candidate) -> list[int]:
        """Return the numbers of ranks that may share experts."""
        if not self.shape.experts:
            return [1]
        found = []
        for ep in divisors(ranks.data_ranks * ranks.tp):
            most = self.shape.experts
            reason = f"more ranks than the {most} experts of a layer" if ep > most else None
            if not self._rejected(f"ep={ep}", self.reason_against("ep", ep) or reason) and ranks.can_share_experts(ep):
                found.append(ep)
        return found

    def _pp_reason(self, pp: int) -> str | None:
        if pp == 1:
            return None
        if pp > self.shape.most_stages:
            return f"more stages than the {self.shape.layers} layers"
        # Uneven stages are legal, but all stages wait for the longest. Allow them if little time is idle.
        longest = -(-self.shape.layers // pp)
        idle = 1 - self.shape.layers / (longest * pp)
        if idle > 0.15:
            return f"{self.shape.layers} layers over {pp} stages leave the stages idle for {idle:.0%} of the time"
        return None

    def _schedules(self, pp: int, rows: int) -> list[tuple[Schedule, int | None]]:
        """Return the schedules of a pipeline with the virtual stages of each rank, where they can be chosen."""
        if pp == 1:
            return [("1f1b", None)]
        self.pruned.setdefault("schedule=gpipe", "takes as long as 1f1b and holds the activations of every micro-batch")
        found: list[tuple[Schedule, int | None]] = [("1f1b", None), ("zb-h1", None)]
        if self.shape.most_stages >= 2 * pp:
            found.append(("zbv", None))
        if self.shape.layers % pp == 0 and pp > 2 and rows % pp == 0:
            most = min(_CHUNKS, self.shape.most_stages // pp)
            chunks = [v for v in divisors(self.shape.layers // pp) if 1 < v <= most]
            found += [("interleaved", v) for v in chunks]
        return found


def check_plan(shape: ModelShape, plan: Candidate) -> None:
    """Raise a PlanError if the sizes of a model cannot be split as a plan says."""
    for uneven in shape.uneven(plan.tp):
        raise PlanError(f"{plan.label}: {uneven} of {shape.name} is not divisible by tp={plan.tp}")
    check_expert_ranks(shape, plan)
    count = plan.pp * plan.stages_per_rank
    if count > shape.most_stages:
        first = f", of which the first stage needs {shape.least_on_first}" if shape.least_on_first > 1 else ""
        raise PlanError(f"{plan.label}: {count} stages are more than the {shape.layers} layers of {shape.name}{first}")
    if plan.stages is not None and (len(plan.stages) != count or sum(plan.stages) != shape.layers):
        raise PlanError(
            f"{plan.label}: the stages must be {count} and hold the {shape.layers} layers of {shape.name} together"
        )
    if plan.stages is not None and plan.stages[0] < shape.least_on_first:
        raise PlanError(f"{plan.label}: the first stage of {shape.name} needs {shape.least_on_first} layers")
    if plan.cp > 1:
        if plan.context not in shape.traits.context:
            raise PlanError(f"{plan.label}: the attention of {shape.name} cannot use context={plan.context!r}")
        for context, ulysses, reason in methods(shape, plan.cp, plan.tp):
            if (context, ulysses) == (plan.context, plan.ulysses) and reason is not None:
                raise PlanError(f"{plan.label}: {reason}")
    if plan.recomputed_layers is not None and plan.recomputed_layers > shape.layers:
        raise PlanError(
            f"{plan.label}: {plan.recomputed_layers} recomputed layers are more than the {shape.layers} of {shape.name}"
        )


def check_expert_ranks(shape: ModelShape, plan: Candidate) -> None:
    """Raise a PlanError if ranks cannot share a model's experts as a plan says, or it has no estimate."""
    if plan.ep > 1 and plan.ep > shape.experts:
        have = f"{shape.experts} experts in a layer" if shape.experts else "no experts"
        raise PlanError(f"{plan.label}: {shape.name} has {have}, which {plan.ep} ranks cannot share; leave ep out")
    if shape.experts and plan.tp > 1 and not plan.sequence_parallel:
        raise PlanError(
            f"{plan.label}: {shape.name} has experts, which the planner estimates under tp with sequence parallelism "
            f"only; write tp{plan.tp}+sp"
        )


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending.

    Example:
        >>> divisors(12)
        [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
