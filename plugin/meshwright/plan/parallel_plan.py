"""The parallel plan: how the ranks share a training step. This module needs no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from meshwright.errors import PlanError
from meshwright.mesh.rank_grid import PLAN_AXES, AxisSizes
from meshwright.plan.fields import check_bool, check_choice, check_int, check_type, names_checked
from meshwright.plan.parts import METHODS, Method
from meshwright.plan.schedule import SCHEDULES, SPLIT_BACKWARD, Schedule, chunks_of
from meshwright.plan.text import PLAN_NAMES, format_plan

if TYPE_CHECKING:
    from meshwright.mesh.process_mesh import ParallelDims


@names_checked(PLAN_NAMES)
@dataclass(frozen=True, kw_only=True)
class ParallelPlan(AxisSizes):
    """The parallel layout of a training step.

    Args:
        dp: data-parallel size. The loader's batch is split over the dp ranks.
        tp: tensor-parallel size. Attention heads, MLP width and vocabulary are split over the tp ranks.
        cp: context-parallel size. Each of the cp ranks holds a part of every sequence.
        context: how attention reaches the whole sequence, if cp > 1: "gather" (the keys and values of all ranks; takes
            any model), "ulysses" (each rank gets all tokens of some heads), "ring" (keys and values go round the ranks)
            or "hybrid" (ulysses over groups of neighbours, and a ring over the groups).
        ulysses: number of ranks in each group of "hybrid".
        ep: expert-parallel size. Each of ep neighbouring ranks holds some of the experts of every layer, and gets the
            tokens that are routed to them. It is no further factor of the world: it divides dp x cp x tp, and is a
            divisor or a multiple of tp.
        etp: expert-tensor-parallel size, for few wide experts. Each of etp neighbouring ranks holds a slice of the same
            experts, and all of them compute with the tokens of each. ep x etp fits dp x cp x tp as ep alone does.
        pp: pipeline-parallel size. The layers are cut into stages, which pass micro-batches on to each other.
        schedule: the order of forwards and backwards, if pp > 1: "gpipe", "1f1b", "interleaved" (several stages on each
            rank), "zb-h1" or "zbv" (zero-bubble schedules, which compute weights' gradients apart).
        chunks: number of stages on each rank under "interleaved" (default: 2).
        stages: number of layers of each stage; None cuts the layers evenly.
        sequence_parallel: whether to also shard the activations between blocks over the tp axis, if tp > 1.
        zero_stage: ZeRO stage. Stage 0 shards nothing over dp, stage 1 the optimizer state, stage 2 also the
            gradients, stage 3 also the parameters.
        micro_batch_size: number of rows per micro-batch on each rank; None runs all rows of a rank at once.
        gradient_accumulation_steps: number of micro-batches into which a rank's rows are split; an alternative to
            ``micro_batch_size``.
        recompute: "none", or "full" to recompute layers in backward.
        recomputed_layers: number of layers on each rank, from its first layer on, that recompute="full" recomputes;
            None for all.
        reduce_dtype: the dtype in which gradients travel over dp. None keeps every bit: float32 for half-precision
            weights under ZeRO, otherwise the dtype of the weights. "bfloat16" halves the bytes of float32 gradients,
            and rounds each rank's gradients to 8 bits of precision; see docs/zero.md.
        offload: what the host has in the devices' place: "optimizer" keeps the optimizer's state and float32 masters in
            its memory, and steps there. It needs a ZeRO stage; see docs/zero.md.
        dtype: the dtype of the weights for which the planner estimated the plan, for example "bfloat16". A model with
            another dtype is trained with a warning. None if the plan is for any dtype.

    Raises:
        PlanError: if a field does not exist or has the wrong type, a size is not a positive integer, or this version
            cannot run the plan.

    Example:
        >>> ParallelPlan(dp=2, tp=2, sequence_parallel=True, zero_stage=1).world_size
        4
    """

    dp: int = 1
    tp: int = 1
    cp: int = 1
    context: Method = "gather"
    ulysses: int | None = None
    ep: int = 1
    etp: int = 1
    pp: int = 1
    schedule: Schedule = "1f1b"
    chunks: int | None = None
    stages: tuple[int, ...] | None = None
    sequence_parallel: bool = False
    zero_stage: int = 0
    micro_batch_size: int | None = None
    gradient_accumulation_steps: int = 1
    recompute: Literal["none", "full"] = "none"
    recomputed_layers: int | None = None
    reduce_dtype: Literal["bfloat16"] | None = None
    offload: Literal["optimizer"] | None = None
    dtype: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if type(self.reduce_dtype).__name__ == "dtype":  # torch's
            object.__setattr__(self, "reduce_dtype", str(self.reduce_dtype).removeprefix("torch."))
        for name in (*PLAN_AXES, "ep", "etp", "gradient_accumulation_steps"):
            check_int("ParallelPlan", name, getattr(self, name))
        for name in ("micro_batch_size", "recomputed_layers", "ulysses", "chunks"):
            check_int("ParallelPlan", name, getattr(self, name), optional=True)
        check_bool("ParallelPlan", "sequence_parallel", self.sequence_parallel)
        check_type("ParallelPlan", "dtype", self.dtype, str, "a string such as 'bfloat16'")
        for name, choices in _CHOICES.items():
            check_choice("ParallelPlan", name, getattr(self, name), choices)
        if self.stages is not None:
            object.__setattr__(self, "stages", _stage_sizes(self.stages))
        for problem in self._contradictions():
            raise PlanError(f"ParallelPlan.{problem}")

    def _contradictions(self) -> Iterator[str]:
        """Yield what two fields say against each other, and what to write instead."""
        if self.recompute not in ("none", "full"):
            yield (
                f"recompute={self.recompute!r} is not available; use 'none' or 'full' (in words recompute=full(3), of "
                "3 layers)"
            )
        if self.recomputed_layers is not None and self.recompute != "full":
            yield (
                f"recomputed_layers={self.recomputed_layers} counts the layers that recompute='full' recomputes, but "
                f"recompute={self.recompute!r}; set recompute='full', or leave recomputed_layers out"
            )
        if self.reduce_dtype is not None and self.dp * self.cp == 1:
            yield (
                f"reduce_dtype={self.reduce_dtype!r} is for gradients that travel over dp, but dp=1 and cp=1; leave it "
                "out"
            )
        if self.offload is not None and self.zero_stage == 0:
            yield (
                f"offload={self.offload!r} with zero_stage=0: the host steps the flat slices of ZeRO. Set "
                "zero_stage=1, also on one data-parallel rank, which then keeps all of the state"
            )
        if self.micro_batch_size is not None and self.gradient_accumulation_steps > 1:
            yield (
                f"micro_batch_size={self.micro_batch_size} and gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps} both split a rank's rows into micro-batches; set one of them"
            )
        is_hybrid, size = self.context == "hybrid" and self.cp > 1, self.ulysses
        if is_hybrid and (size is None or self.cp % size or size in (1, self.cp)):
            yield (
                f"context='hybrid' with ulysses={size} and cp={self.cp}: set ulysses to the number of ranks that "
                "exchange heads, a divisor of cp between 1 and cp; or use context='ulysses' or 'ring'"
            )
        if size is not None and not is_hybrid:
            yield (
                f"ulysses={size} is the size of the groups of context='hybrid' under cp > 1, but "
                f"context={self.context!r} and cp={self.cp}; leave it out"
            )
        ranks, shared = self.dp * self.cp * self.tp, self.ep * self.etp
        if not self.can_share_experts(shared):
            name = "ep" if self.etp == 1 else "ep x etp"
            fitting = filter(self.can_share_experts, range(1, min(ranks, 2 * shared) + 1))
            yield (
                f"{name}={shared} with dp={self.dp}, cp={self.cp} and tp={self.tp}: each {shared} neighbours of these "
                f"{ranks} ranks would share experts, within or over whole groups of tp. Set {name} to "
                f"{' or '.join(map(str, fitting))}"
            )
        try:
            count = self.pp * chunks_of(self.schedule, self.chunks)
        except ValueError as error:
            raise PlanError(f"ParallelPlan: {error}") from None
        for name in ("chunks", "stages") if self.pp == 1 else ():
            if (value := getattr(self, name)) is not None:
                yield f"{name}={value} describes a pipeline, but pp=1; set pp, or leave {name} out"
        if self.stages is not None and len(self.stages) != count:
            yield (
                f"stages={self.stages} has {len(self.stages)} stages, but pp={self.pp} x {self.stages_per_rank} on "
                f"each rank makes {count}; give one number of layers for each stage"
            )
        if self.pp > 1 and self.zero_stage > 1:
            yield (
                f"zero_stage={self.zero_stage} with pp={self.pp} would reduce or gather every weight once for each "
                "micro-batch; set zero_stage=1, which shards the optimizer's state"
            )
        if self.pp > 1 and self.recompute == "full" and self.schedule in SPLIT_BACKWARD:
            yield (
                f"recompute='full' with schedule={self.schedule!r}: the schedule computes the gradients of weights "
                "apart from a layer that was recomputed and freed; set recompute='none' or schedule='1f1b'"
            )

    @property
    def weight_axes(self) -> list[str]:
        """The axes over which a rank may hold a part of a weight, or none of it."""
        return [axis for axis in ("tp", "pp", "ep", "etp") if getattr(self, axis) > 1]

    @property
    def cut_axes(self) -> list[str]:
        """The axes over which a rank may have a part of a weight, of the layers or of a row."""
        return [*self.weight_axes, *(["cp"] if self.cp > 1 else [])]

    @property
    def spreads_experts_over_dp(self) -> bool:
        """Whether ranks that read different rows of a batch share experts."""
        return self.cp * self.tp % (self.ep * self.etp) > 0

    @property
    def stages_per_rank(self) -> int:
        """The number of pipeline stages on each rank; 1 without a pipeline."""
        return chunks_of(self.schedule, self.chunks) if self.pp > 1 else 1

    @property
    def dims(self) -> ParallelDims:
        """The sizes of the mesh."""
        from meshwright.mesh.process_mesh import ParallelDims  # imports torch, which a planner does not need

        return ParallelDims(**self.sizes, ep=self.ep, etp=self.etp)

    @property
    def has_micro_batches(self) -> bool:
        """Whether a rank's rows are split into micro-batches."""
        return self.gradient_accumulation_steps > 1 or self.micro_batch_size is not None

    def count_micro_batches(self, rows: int) -> int:
        """Return the number of micro-batches into which a rank's ``rows`` are split."""
        size = self.micro_batch_size
        return self.gradient_accumulation_steps if size is None else -(-rows // size)

    @property
    def label(self) -> str:
        """The plan in words, which ``to_distributed(plan=...)`` accepts.

        Example:
            >>> ParallelPlan(dp=2, tp=2, sequence_parallel=True, zero_stage=1).label
            'dp2 tp2+sp zero1'
        """
        return format_plan(asdict(self))

    @property
    def changed(self) -> dict[str, Any]:
        """The fields that do not have their default."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.changed.items())})"


_CHOICES: Mapping[str, Sequence[object]] = {
    "zero_stage": (0, 1, 2, 3),
    "reduce_dtype": (None, "bfloat16"),
    "offload": (None, "optimizer"),
    "context": METHODS,
    "schedule": SCHEDULES,
}


def _stage_sizes(stages: object) -> tuple[int, ...]:
    if isinstance(stages, list | tuple) and all(type(n) is int and n > 0 for n in stages):
        return tuple(stages)
    raise PlanError(
        f"ParallelPlan.stages={stages!r} must be the number of layers of each stage, each at least 1, for example "
        "(8, 8)"
    )


PLAN_FIELDS = tuple(field.name for field in fields(ParallelPlan))
PlanLike = ParallelPlan | Mapping[str, object] | str | os.PathLike[str]  # the type of ``to_distributed(plan=...)``

# Field of a plan, under our name or another framework's, that was passed to the config or the call -> what to write.
IN_PLAN = {name: f"plan=ParallelPlan({name}=VALUE)" for name in PLAN_FIELDS} | {
    name: f"plan=ParallelPlan({fields})" for name, fields in PLAN_NAMES.items()
}
