"""The options of ``to_distributed``: the parallel plan, and all others."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from meshwright.errors import PlanError
from meshwright.mesh.process_mesh import ParallelDims
from meshwright.mesh.rank_grid import PLAN_AXES, AxisSizes
from meshwright.plan.fields import (
    check_bool,
    check_choice,
    check_int,
    check_number,
    check_type,
    names_checked,
    unknown_field,
)
from meshwright.plan.loader_options import LoaderOptions
from meshwright.plan.parts import BUCKET_MB
from meshwright.plan.schedule import SCHEDULES, SPLIT_BACKWARD, chunks_of
from meshwright.plan.text import PLAN_NAMES, format_plan
from meshwright.roles import ShardingPlan

NumItems = Literal["auto", "global", "local"]
AveragesOver = Literal["rows", "labels"] | Callable[[dict[str, object]], Tensor | int]
# The dim of an argument that has the rows, None if it belongs to every row, or a function of the batch that returns how
# many entries along the first dim each row has.
RowsOf = int | None | Callable[[Mapping[str, Any]], Sequence[int] | Tensor]


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
    context: Literal["gather", "ulysses", "ring", "hybrid"] = "gather"
    ulysses: int | None = None
    ep: int = 1
    etp: int = 1
    pp: int = 1
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zbv"] = "1f1b"
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
        if isinstance(self.reduce_dtype, torch.dtype):
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
    def changed(self) -> dict[str, object]:
        """The fields that do not have their default."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}

    def __repr__(self) -> str:
        return f"ParallelPlan({', '.join(f'{name}={value!r}' for name, value in self.changed.items())})"


_CHOICES: Mapping[str, Sequence[object]] = {
    "zero_stage": (0, 1, 2, 3),
    "reduce_dtype": (None, "bfloat16"),
    "offload": (None, "optimizer"),
    "context": ("gather", "ulysses", "ring", "hybrid"),
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


@names_checked(IN_PLAN)
@dataclass(kw_only=True)
class ToDistributedConfig:
    """Options of ``to_distributed``.

    A field may be assigned after the config is made. Each assignment is checked like an argument of the constructor.

    Args:
        plan: the parallel plan: a ParallelPlan, its words ("dp2 tp2+sp zero1"), a dict of its fields, or the path of
            a file that ``meshwright plan --save`` wrote. None takes the launcher's plan or, without one, the plan in
            the model's config ("meshwright" in its config.json). If there is neither, the planner picks the fastest
            plan that fits and logs it. "auto" takes the launcher's plan or, without one, the planner's.
        picks_stages: whether a picked plan may have pipeline stages (pp). Set it to False for a program that computes a
            loss of its own from the model's outputs, generates, or copies the model, which no pipeline can do.
        memory_budget: memory per device that a picked plan may use, in bytes. A value up to 1 is a share of the
            device's memory (default: 0.9).
        prefer: goal of a picked plan: "throughput", or "memory" for the plan that needs the least memory.
        expert_load: rows that the experts of the fullest rank get, relative to the mean, for picking a plan; 1 assumes
            balanced routing.
        hardware_profile: path of a profile that ``meshwright calibrate`` wrote, for picking a plan (default: data
            sheets and typical efficiencies).
        sequence_parallel: value that replaces ``plan.sequence_parallel``; None keeps the plan's.
        weights: checkpoint to read the weights from: a .safetensors file, a .safetensors.index.json, a directory with
            either, a list of files, or a folder that ``save_checkpoint`` wrote (a folder of these stands for the newest
            whole one). Each rank reads its own shard and converts it to the model's dtype.
        input_spec: dict from input name to (shape, dtype) of one global batch. Picking a plan needs it if the
            dataloader does not show the size of its batches.
        sharding_plan: the sharding plan to use in place of the registered or inferred one.
        gather_logits: whether to gather ``outputs.logits`` in training with labels too. Otherwise the logits stay
            sharded, since only the loss needs them and they are the largest tensor of a step.
        num_items_in_batch: what a ``num_items_in_batch`` passed to the model counts. "global": the items of all
            data-parallel ranks; every rank passes the same number. "local": the items of this rank's rows. "auto" (the
            default): each rank's own count of valid labels; any other number raises an ItemCountError. On CUDA this
            is an assertion of the device.
        loss_averages_over: what the model's loss averages over, for a model whose loss is not one of transformers'
            own: "rows", "labels" (those that are not -100), or a callable that takes the arguments of the model's
            forward as a dict and returns this rank's count. The loss is then the mean over the global batch; see
            docs/losses.md.
        batch_dims: dict from the name of an input to what says which rows of the batch its parts belong to, for inputs
            that do not show it: the dim that has the rows, None if it belongs to every row, or a callable that takes
            the batch as a dict and returns how many entries along the first dim each row has; see docs/vision.md.
        optimizer_is_elementwise: whether the optimizer updates each element from that element alone. Set it to True
            for such an optimizer if it is not one of torch's; see docs/optimizers.md.
        optimizer_reads: what the optimizer reads to update an element: "element", as optimizer_is_elementwise; or
            "parameter", all of the element's parameter, so that each parameter is stepped whole, by one rank. None
            (the default) takes "element" for the optimizers that are known for it, and "parameter" for all others.
        token_dispatcher: how tokens reach the ranks of their experts, if ep > 1: "all_to_all" (one copy for each rank
            with experts of the token), "all_gather" (every token to every rank, without a wait of the host for its
            device), or a name that ``register_dispatcher`` was given.
        bucket_size_mb: size of the buckets in which gradients are communicated, in MiB.
        compile: "layers" to compile the forward of each layer with torch.compile; the losses stay those of the eager
            model, up to rounding. None compiles nothing.
        compile_options: dict of arguments of torch.compile for ``compile="layers"``, for example
            {"backend": "inductor", "dynamic": True}.
        engine: name of a training engine that averages gradients over dp, shards the optimizer and clips. The runtime
            then handles only tp. An integration (meshwright_hf.deepspeed) sets this field.
        loader: options of the returned loader.
        check_replicas_every: number of steps between two comparisons of what several ranks hold: weights, the
            optimizer's state of them, and buffers; 0 turns these comparisons off. None means 50, and for weights 1
            under ZeRO stages 1 and 2, where each step copies one rank's result to all ranks. All of it is also compared
            before every save, and in the first steps if forward writes tensors of the model. Tokens and the
            optimizer's settings are compared in every step.
        draws: what a forward draws at random, such as the masks of dropout. "device": what one device draws with the
            same seed; each rank draws for the whole batch, and keeps its part (docs/equality.md). Under pp, cp, ep and
            etp it means "rank". "rank": each rank draws for what it computes, from a stream of its own.
        logging_steps: number of steps from one status line to the next; None shows neither the card at the start nor
            lines. Rank 0 prints them: loss, norm, throughput, MFU, memory and the slowest rank; see docs/monitoring.md.
        logging_dir: folder of the file ``meshwright.jsonl``, to which rank 0 appends the figures of each line, for
            ``meshwright report``. It needs ``logging_steps``.
        max_steps: number of steps of the run, from which the lines tell the time that is left.
        timeout_s: number of seconds that a rank may keep the others waiting before all ranks end with an error that
            names the late rank. It is also the timeout of every process group; NCCL's watchdog waits 30 s longer.
    """

    plan: PlanLike | None = None
    picks_stages: bool = True
    memory_budget: float | None = None
    prefer: Literal["throughput", "memory"] = "throughput"
    expert_load: float = 1.0
    hardware_profile: str | os.PathLike[str] | None = None
    sequence_parallel: bool | None = None
    weights: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None
    input_spec: Mapping[str, Any] | None = None
    sharding_plan: ShardingPlan | None = None
    gather_logits: bool = False
    num_items_in_batch: NumItems = "auto"
    loss_averages_over: AveragesOver | None = None
    batch_dims: Mapping[str, RowsOf] | None = None
    optimizer_is_elementwise: bool = False
    optimizer_reads: Literal["element", "parameter"] | None = None
    token_dispatcher: str = "all_to_all"
    bucket_size_mb: float = BUCKET_MB
    compile: Literal["layers"] | None = None
    compile_options: Mapping[str, object] | None = None
    engine: str | None = None
    loader: LoaderOptions = LoaderOptions()  # noqa: RUF009  # it is frozen
    check_replicas_every: int | None = None
    draws: Literal["device", "rank"] = "device"
    logging_steps: int | None = None
    logging_dir: str | os.PathLike[str] | None = None
    max_steps: int | None = None
    timeout_s: float = 120.0

    def __setattr__(self, name: str, value: object) -> None:
        known = [field.name for field in fields(self)]
        if name not in known:
            raise PlanError(unknown_field("ToDistributedConfig", name, known, IN_PLAN))
        _CHECKS[name]("ToDistributedConfig", name, value)
        super().__setattr__(name, value)


def _check_averages_over(owner: str, name: str, value: object) -> None:
    if not (value is None or callable(value) or value in ("rows", "labels")):
        raise PlanError(
            f"{owner}.{name}={value!r} must be 'rows', 'labels' or a callable that counts a batch's items, for example "
            "lambda batch: (batch['labels'] != -100).sum()"
        )


def _check_dims(owner: str, name: str, value: Any) -> None:
    check_type(owner, name, value, Mapping, "a dict: {'pixel_values': lambda batch: [2, 0, 1]}")
    for key, dim in (value or {}).items():
        if not (dim is None or callable(dim) or type(dim) is int):
            raise PlanError(
                f"{owner}.{name}[{key!r}]={dim!r} must be the dim that has the rows, None if the input belongs to "
                "every row, or a callable that returns how many entries along the first dim each row has"
            )


def _check_folder(owner: str, name: str, value: Any) -> None:
    check_type(owner, name, value, _PATH, "the path of a folder")
    if value is not None and not os.fspath(value):
        raise PlanError(f"{owner}.{name}='' names no folder; write {owner}({name}='runs/first'), or leave it out")


_PATH = (str, os.PathLike)
_CHECKS: dict[str, Callable[[str, str, object], None]] = {
    "plan": partial(
        check_type,
        kinds=(ParallelPlan, Mapping, *_PATH),
        what="a ParallelPlan, its words ('dp2 tp2+sp zero1'), a dict of its fields, 'auto' or the path of a plan file",
    ),
    "picks_stages": check_bool,
    "memory_budget": partial(check_number, optional=True),
    "prefer": partial(check_choice, choices=("throughput", "memory")),
    "expert_load": check_number,
    "hardware_profile": partial(check_type, kinds=_PATH, what="the path of a profile that meshwright calibrate wrote"),
    "sequence_parallel": partial(check_bool, optional=True),
    "weights": partial(check_type, kinds=(*_PATH, Sequence), what="the path of a checkpoint, or a list of files"),
    "input_spec": partial(check_type, kinds=Mapping, what="a dict: {'input_ids': ((8, 2048), torch.int64)}"),
    "sharding_plan": partial(check_type, kinds=ShardingPlan, what="a meshwright.ShardingPlan, which names roles"),
    "gather_logits": check_bool,
    "num_items_in_batch": partial(check_choice, choices=("auto", "global", "local")),
    "loss_averages_over": _check_averages_over,
    "batch_dims": _check_dims,
    "optimizer_is_elementwise": check_bool,
    "optimizer_reads": partial(check_choice, choices=(None, "element", "parameter")),
    "token_dispatcher": partial(check_type, kinds=str, what="the name of a dispatcher, such as 'all_to_all'"),
    "bucket_size_mb": check_number,
    "compile": partial(check_choice, choices=(None, "layers")),
    "compile_options": partial(check_type, kinds=Mapping, what="a dict: {'backend': 'inductor'}"),
    "engine": partial(check_type, kinds=str, what="the name of an engine"),
    "loader": partial(check_type, kinds=LoaderOptions, what="a meshwright.LoaderOptions"),
    "check_replicas_every": partial(check_int, least=0, optional=True),
    "draws": partial(check_choice, choices=("device", "rank")),
    "logging_steps": partial(check_int, optional=True),
    "logging_dir": _check_folder,
    "max_steps": partial(check_int, optional=True),
    "timeout_s": check_number,
}
