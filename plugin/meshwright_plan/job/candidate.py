"""A training job's sizes, and a candidate plan for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal, get_args

from meshwright.errors import PlanError
from meshwright.mesh.rank_grid import OPTIONS
from meshwright.plan.parallel_plan import ParallelPlan
from meshwright.plan.schedule import SPLIT_BACKWARD, check, stages_of_rank
from meshwright.plan.text import format_plan
from meshwright_plan.job.adapters import Lora, trained_bytes
from meshwright_plan.job.optimizers import OptimizerKind, optimizer_kind
from meshwright_plan.job.shapes import ModelShape

Recompute = Literal["none", "selective", "full"]
Precision = Literal["bf16", "fp8", "fp4"]
Logits = Literal["chunked", "sharded", "gathered"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """The settings of a training job apart from the model.

    Args:
        seq_len: tokens per sequence.
        global_batch: sequences per optimizer step, over all devices.
        precision: the dtype of the layers' matrix multiplications; the head and attention stay in 16 bits.
        element_bytes: bytes per weight, gradient and activation: 2, or 4 if everything is computed in 32 bits.
        optimizer_bytes: bytes per weight of the state that a step of AdamW moves: 8 over 32-bit weights, 12 with a
            32-bit master copy of 16-bit weights.
        plain_attention: whether attention over keys that query heads share runs in plain operations, as in float32 on
            CUDA, even if other attention is fused.
        on_cpu: whether the job runs on CPU with gloo.
        expert_load: rows that the experts of the fullest rank get, relative to the mean over the ranks that share the
            experts; 1 for balanced routing.
        prefers_masters: whether plans that keep 32-bit masters of 16-bit weights come before all that do not.
        logits: the logits that the runtime has in memory at once: those of one chunk of tokens, those of all
            tokens for a rank's part of the vocabulary, or those of all tokens and words.
        images: images per sequence, of a model with a tower.
        lora: the adapters that alone are trained; None if all weights are.
        optimizer: the optimizer, one of ``OPTIMIZERS`` or what a program's own one keeps.

    Raises:
        PlanError: a size is below one, or the precision or the optimizer is unknown.

    Example:
        >>> Job(seq_len=4096, global_batch=256).tokens
        1048576
    """

    seq_len: int
    global_batch: int
    precision: Precision = "bf16"
    element_bytes: int = 2
    optimizer_bytes: int = 12
    plain_attention: bool = False
    on_cpu: bool = False
    expert_load: float = 1.0
    prefers_masters: bool = False
    logits: Logits = "chunked"
    images: float = 1.0
    lora: Lora | None = None
    optimizer: str | OptimizerKind = "adamw"

    def __post_init__(self) -> None:
        optimizer_kind(self.optimizer)
        for name in ("seq_len", "global_batch"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise PlanError(f"--{name.replace('_', '-')}={value!r} must be a positive integer")
        if self.precision not in get_args(Precision):
            raise PlanError(f"--precision={self.precision!r} must be 'bf16', 'fp8' or 'fp4'")
        if not 0 <= self.images < float("inf"):
            raise PlanError(f"--images-per-row={self.images:g} must be a number of images, zero or more")
        if not 1 <= self.expert_load < float("inf"):
            raise PlanError(
                f"--expert-load={self.expert_load:g} must be at least 1: it is the rows of the rank with the fullest "
                "experts, relative to the mean"
            )

    def in_32_bits(self, *, may_autocast: bool = False) -> Job:
        """Return the same job for a float32 model and Adam, with everything in 32 bits.

        Args:
            may_autocast: whether the program may run under autocast, where attention computes in 16 bits.

        Example:
            >>> Job(seq_len=8, global_batch=2).in_32_bits().element_bytes
            4
        """
        plain = not self.on_cpu and not may_autocast
        return replace(self, element_bytes=4, optimizer_bytes=8, plain_attention=plain)

    def __hash__(self) -> int:
        return hash((self.seq_len, self.global_batch, self.element_bytes))  # of a few sizes, as that of ``ModelShape``

    @property
    def trains_today(self) -> bool:
        """Whether this version's runtime can train in the precision."""
        return self.precision in ("bf16", "fp8")

    @property
    def dtype(self) -> str:
        """The dtype of the weights, by its name in torch."""
        return "float32" if self.element_bytes == 4 else "bfloat16"

    @property
    def kind(self) -> OptimizerKind:
        """What the optimizer keeps."""
        return optimizer_kind(self.optimizer)

    @property
    def trained_bytes(self) -> int:
        """Bytes per trained weight as the layers read it."""
        return trained_bytes(self.lora, self.element_bytes)

    @property
    def method(self) -> str:
        """What is trained, in words."""
        return "full" if self.lora is None else self.lora.name

    def rounds_updates(self, plan: Candidate) -> bool:
        """Whether a plan updates 16-bit weights themselves, without 32-bit masters."""
        return self.trained_bytes == 2 and plan.zero_stage == 0

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step."""
        return self.seq_len * self.global_batch


@dataclass(frozen=True, kw_only=True)
class Candidate(ParallelPlan):
    """A plan for a batch of known size: both its micro-batches' size and their number are set.

    A search makes thousands of them from sizes that fit together, so nothing is checked but by ``plan``. Some of them
    no version can run yet.

    Args:
        micro_batch_size: sequences that one data-parallel rank runs at once.
        gradient_accumulation_steps: micro-batches per step.
        recompute: what backward recomputes: nothing, attention, or ``recomputed_layers`` whole layers of each rank.
        replicate: number of data-parallel groups under ZeRO, each with a whole copy of the state.

    Example:
        >>> Candidate(dp=4, tp=2, gradient_accumulation_steps=8).global_batch
        32
    """

    micro_batch_size: int = 1
    recompute: Recompute = "none"  # type: ignore[assignment]
    replicate: int = 1

    def __post_init__(self) -> None:
        pass

    def copy(self, **fields: Any) -> Candidate:
        """Return the plan with other values of some fields; ``dataclasses.replace`` takes ten times as long."""
        new = object.__new__(Candidate)
        new.__dict__.update(self.__dict__, **fields)
        return new

    @classmethod
    def of(cls, plan: ParallelPlan, job: Job) -> Candidate:
        """Return a plan with the micro-batches of a job's batch.

        Args:
            plan: the plan.
            job: the job, whose batch is split over dp and into micro-batches.

        Raises:
            PlanError: the batch cannot be split as the plan says, or the planner has no estimate for it.

        Example:
            >>> job = Job(seq_len=8, global_batch=16)
            >>> Candidate.of(ParallelPlan(dp=2, zero_stage=1, micro_batch_size=2), job).label
            'dp2 zero1 mb2x4'
        """
        dp, etp = plan.dp, plan.etp
        if etp > 1:
            raise PlanError(f"etp={etp} cuts experts into slices, which the planner does not estimate; leave etp out")
        rows, rest = divmod(job.global_batch, dp)
        if rest:
            raise PlanError(
                f"--global-batch {job.global_batch} is not divisible by dp={dp}; use a multiple of dp, or another dp"
            )
        parts = plan.gradient_accumulation_steps
        micro = plan.micro_batch_size or max(1, rows // parts)
        if rows % micro or (parts > 1 and rows % parts):
            raise PlanError(
                f"a rank's {rows} sequences (--global-batch {job.global_batch} over dp={dp}) cannot be split into "
                f"micro-batches of {micro if rows % micro else rows / parts:g}; use a divisor of {rows}"
            )
        unused = (name for axis, names in OPTIONS.items() if getattr(plan, axis) == 1 for name in names)
        fields = {**plan.changed, "micro_batch_size": micro, "gradient_accumulation_steps": rows // micro}
        found = cls(**{name: value for name, value in fields.items() if name not in {*unused, "dtype"}})
        found = found.copy(chunks=found.stages_per_rank if found.schedule == "interleaved" else None)
        if found.pp > 1:
            try:
                check(found.schedule, found.pp, found.stages_per_rank, rows // micro)
            except ValueError as error:
                raise PlanError(f"{found.label}: {error}") from None
        return found

    @property
    def plan(self) -> ParallelPlan:
        """The plan that the runtime takes, with micro-batches if there are several.

        Raises:
            PlanError: two fields contradict each other, or this version cannot run the plan.

        Example:
            >>> Candidate(dp=2, micro_batch_size=4).plan
            ParallelPlan(dp=2)
        """
        if not self.runs_today:
            raise PlanError(
                f"{self.label!r} is a plan that this version cannot run: it has neither recompute='selective' nor "
                "ZeRO over replicated groups. Plan again without --allow-future"
            )
        size = self.micro_batch_size if self.gradient_accumulation_steps > 1 else None
        fields = {**self.changed, "gradient_accumulation_steps": 1, "micro_batch_size": size}
        return ParallelPlan(**{name: value for name, value in fields.items() if name != "replicate"})

    @property
    def shard(self) -> int:
        """The number of data-parallel ranks over which ZeRO shards the state."""
        return self.dp // self.replicate if self.zero_stage else 1

    @property
    def layout(self) -> tuple[object, ...]:
        """What decides the sizes of a rank's tensors in a micro-batch, apart from ZeRO and recompute."""
        return (
            self.tp, self.sequence_parallel, self.cp, self.context, self.ulysses, self.ep, self.pp, self.schedule,
            self.chunks, self.stages, self.micro_batch_size,
        )  # fmt: skip

    @property
    def data_ranks(self) -> int:
        """The number of ranks that hold different tokens of a batch: dp x cp."""
        return self.dp * self.cp

    @property
    def sp(self) -> int:
        """The number of ranks that share a rank's tokens between blocks: tp with sequence parallelism, 1 without."""
        return self.tp if self.sequence_parallel else 1

    @property
    def copies(self) -> int:
        """The number of ranks that hold the same experts, over which their gradients are averaged and ZeRO shards."""
        return self.data_ranks if self.ep == 1 else max(1, self.data_ranks * self.tp // self.ep)

    @property
    def expert_shard(self) -> int:
        """The number of ranks over which ZeRO shards experts, if it shards anything."""
        return max(1, self.copies // self.replicate) if self.zero_stage else 1

    @property
    def global_batch(self) -> int:
        return self.dp * self.micro_batch_size * self.gradient_accumulation_steps

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of the weights are computed apart from those of the activations."""
        return self.pp > 1 and self.schedule in SPLIT_BACKWARD

    def summed_bytes(self, gradient_bytes: int) -> int:
        """Return the bytes of an element in which backward leaves gradients of ``gradient_bytes`` to be reduced.

        Example:
            >>> Candidate(zero_stage=1).summed_bytes(2)  # ZeRO keeps 16-bit gradients in 32 bits
            4
        """
        return max(gradient_bytes, 4) if self.zero_stage else gradient_bytes

    def sent_bytes(self, gradient_bytes: int) -> int:
        """Return the bytes in which a gradient element of ``gradient_bytes`` travels over dp.

        Example:
            >>> Candidate(dp=2, zero_stage=1).sent_bytes(2)
            4
            >>> Candidate(dp=2, reduce_dtype="bfloat16").sent_bytes(4)
            2
        """
        wide = self.summed_bytes(gradient_bytes)
        return wide if self.reduce_dtype is None else min(wide, 2)

    @property
    def runs_today(self) -> bool:
        """Whether this version's runtime can run the plan."""
        return self.recompute in ("none", "full") and (self.zero_stage == 0 or self.replicate == 1)

    @property
    def label(self) -> str:
        """The plan in words.

        Example:
            >>> Candidate(dp=8, tp=2, sequence_parallel=True, zero_stage=1, recompute="full").label
            'dp8 tp2+sp zero1 mb1x1 recompute=full'
            >>> Candidate(pp=4, schedule="zb-h1", stages=(3, 3, 3, 2), gradient_accumulation_steps=8).label
            'dp1 pp4(zb-h1) stages=3x3-2 zero0 mb1x8'
        """
        fields = {**self.changed, "micro_batch_size": self.micro_batch_size, "gradient_accumulation_steps": 1}
        return format_plan(fields, accumulation=self.gradient_accumulation_steps)


def stage_layers(candidate: Candidate, shape: ModelShape) -> tuple[int, ...]:
    """Return the number of layers of each virtual stage.

    Example:
        >>> sizes = dict(hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=128, vocab=100)
        >>> stage_layers(Candidate(pp=2, schedule="interleaved", chunks=2), ModelShape.of(name="m", layers=8, **sizes))
        (2, 2, 2, 2)
    """
    return candidate.stages or shape.even_stages(candidate.pp * candidate.stages_per_rank)


def rank_layers(candidate: Candidate, shape: ModelShape) -> tuple[int, ...]:
    """Return the number of layers of each rank of the pipeline.

    Example:
        >>> plan = Candidate(pp=2, schedule="zbv", chunks=2, stages=(1, 2, 3, 4))
        >>> sizes = dict(hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=128, vocab=100)
        >>> rank_layers(plan, ModelShape.of(name="m", layers=10, **sizes))
        (5, 5)
    """
    return tuple(map(sum, rank_runs(candidate, shape)))


def stage_runs(candidate: Candidate, shape: ModelShape) -> tuple[tuple[int, ...], ...]:
    """Return how many layers of each run of a model each virtual stage holds."""
    return _stage_runs(stage_layers(candidate, shape), shape.counts)


def rank_runs(candidate: Candidate, shape: ModelShape) -> tuple[tuple[int, ...], ...]:
    """Return how many layers of each run of a model each rank of the pipeline holds."""
    return _rank_runs(candidate.schedule, candidate.pp, candidate.stages_per_rank, stage_runs(candidate, shape))


@lru_cache(maxsize=1024)
def _stage_runs(stages: tuple[int, ...], runs: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return how many layers of each run each stage holds, by the layers of each stage and of each run.

    Example:
        >>> _stage_runs((4, 4), (5, 3))
        ((4, 0), (1, 3))
    """
    ends, last = list(accumulate(runs)), list(accumulate(stages))
    return tuple(
        tuple(max(0, min(stop, end) - max(stop - size, end - run)) for run, end in zip(runs, ends, strict=True))
        for size, stop in zip(stages, last, strict=True)
    )


@lru_cache(maxsize=1024)
def _rank_runs(schedule: str, p: int, v: int, stages: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    held = ((stages[stage] for stage in stages_of_rank(schedule, rank, p, v)) for rank in range(p))
    return tuple(tuple(map(sum, zip(*counts, strict=True))) for counts in held)


def count_recomputed(candidate: Candidate, held: int) -> int:
    """Return how many of the ``held`` layers of a rank backward recomputes in full.

    Example:
        >>> count_recomputed(Candidate(recompute="full", recomputed_layers=3), 8)
        3
    """
    if candidate.recompute != "full":
        return 0
    return held if candidate.recomputed_layers is None else min(held, candidate.recomputed_layers)


def recomputed_share(candidate: Candidate, shape: ModelShape) -> float:
    """Return the share of a rank's layers for which backward repeats what ``candidate.recompute`` says."""
    held = max(rank_layers(candidate, shape))
    return count_recomputed(candidate, held) / held if candidate.recompute == "full" else 1.0
