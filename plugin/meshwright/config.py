"""What a user can say to ``to_distributed``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, Literal

from torch import Tensor

from meshwright.config_fields import (
    check_bool,
    check_choice,
    check_int,
    check_number,
    check_type,
    names_checked,
    unknown_field,
)
from meshwright.errors import PlanError
from meshwright.foreign_names import PLAN_NAMES
from meshwright.mesh.process_mesh import ParallelDims
from meshwright.plan_text import format_plan
from meshwright.roles import ShardingPlan

NumItems = Literal["auto", "global", "local"]
AveragesOver = Literal["rows", "labels"] | Callable[[dict[str, Any]], Tensor | int]
LANES = 32  # shards that a stream reads at a time


@names_checked(PLAN_NAMES)
@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """How a training step is spread over devices.

    Args:
        dp: data-parallel size; the loader's batch is split over it.
        tp: tensor-parallel size; attention heads, MLP width and vocabulary are split over it.
        cp: context-parallel size; not available in this version.
        pp: pipeline-parallel size; not available in this version.
        sequence_parallel: with tp > 1, also shard the activations between blocks over the tp axis.
        zero_stage: what is sharded over dp: 1, the optimizer state; 2, gradients too; 3, parameters too; 0, nothing.
        micro_batch_size: rows of a rank's batch that run at once; None for all of them.
        gradient_accumulation_steps: the same said as a count: a rank's rows run in so many parts.
        recompute: "none", or "full" to recompute every layer in backward.

    Raises:
        PlanError: for a field that does not exist or has the wrong type, sizes that are not positive integers, and for
            what this version cannot run.

    Example:
        >>> ParallelPlan(dp=2, tp=2, sequence_parallel=True, zero_stage=1).world_size
        4
    """

    dp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    sequence_parallel: bool = False
    zero_stage: int = 0
    micro_batch_size: int | None = None
    gradient_accumulation_steps: int = 1
    recompute: Literal["none", "full"] = "none"

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "cp", "pp", "gradient_accumulation_steps"):
            check_int("ParallelPlan", name, getattr(self, name))
        check_int("ParallelPlan", "micro_batch_size", self.micro_batch_size, optional=True)
        check_bool("ParallelPlan", "sequence_parallel", self.sequence_parallel)
        check_choice("ParallelPlan", "zero_stage", self.zero_stage, (0, 1, 2, 3))
        for name, what in (("cp", "context parallelism"), ("pp", "pipeline parallelism")):
            if getattr(self, name) > 1:
                raise PlanError(
                    f"ParallelPlan.{name}={getattr(self, name)}: {what} is not available in this version; "
                    f"set {name}=1 and use dp and tp"
                )
        if self.recompute not in ("none", "full"):
            raise PlanError(f"ParallelPlan.recompute={self.recompute!r} is not available; use 'none' or 'full'")
        if self.micro_batch_size is not None and self.gradient_accumulation_steps > 1:
            raise PlanError(
                f"ParallelPlan.micro_batch_size={self.micro_batch_size} and gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps} say the same thing in two ways; set one of them"
            )

    @property
    def dims(self) -> ParallelDims:
        """The sizes of the mesh."""
        return ParallelDims(pp=self.pp, dp=self.dp, cp=self.cp, tp=self.tp)

    @property
    def world_size(self) -> int:
        return self.dims.world_size

    @property
    def has_micro_batches(self) -> bool:
        """Whether a rank's rows are split into several passes."""
        return self.gradient_accumulation_steps > 1 or self.micro_batch_size is not None

    def count_micro_batches(self, rows: int) -> int:
        """Into how many passes the rows of a rank are split."""
        size = self.micro_batch_size
        return self.gradient_accumulation_steps if size is None else -(-rows // size)

    @property
    def label(self) -> str:
        """The plan in the words that ``to_distributed(plan=...)`` reads.

        Example:
            >>> ParallelPlan(dp=2, tp=2, sequence_parallel=True, zero_stage=1).label
            'dp2 tp2+sp zero1'
        """
        return format_plan(asdict(self))


PLAN_FIELDS = tuple(field.name for field in fields(ParallelPlan))
PlanLike = ParallelPlan | Mapping[str, Any] | str | os.PathLike[str]  # what ``to_distributed(plan=...)`` takes
Source = Literal["each", "leader"]


@names_checked()
@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """Options of ``shard_dataloader``, and of the loader that ``to_distributed`` returns.

    Args:
        source: "each" rank reads its rows; or the "leader" of those that need the same rows reads, and sends them: for
            a dataset that is not deterministic, or too dear to read twice.
        check_every: ranks that must have the same rows compare them in step 0 and every so many steps; 0 for never.
        seed: of the shuffling; by default the loader's generator or, without one, torch's random state says.
        fingerprint: a name for the dataset, instead of what it holds, by which other ranks and a state know it again.
        shuffle: shuffle an iterable dataset with numbered shards. A map-style one is shuffled by its DataLoader.
        buffer_size: samples of a stream that are shuffled together.
        lanes: shards of a stream that are read at a time over all ranks; part of its order.

    Raises:
        PlanError: a field that does not exist, has the wrong type or is out of range.
    """

    source: Source = "each"
    check_every: int = 50
    seed: int | None = None
    fingerprint: str | None = None
    shuffle: bool = False
    buffer_size: int = 1000
    lanes: int = LANES

    def __post_init__(self) -> None:
        check_choice("LoaderOptions", "source", self.source, ("each", "leader"))
        if self.seed is not None and not (type(self.seed) is int and 0 <= self.seed < 2**63):
            raise PlanError(f"LoaderOptions.seed={self.seed!r} must be an integer from 0 to 2**63 - 1")
        check_bool("LoaderOptions", "shuffle", self.shuffle)
        check_type("LoaderOptions", "fingerprint", self.fingerprint, str, "a string")
        for name, least in (("check_every", 0), ("buffer_size", 1), ("lanes", 1)):
            check_int("LoaderOptions", name, getattr(self, name), least=least)

    @property
    def of_stream(self) -> dict[str, Any]:
        """What a ShardedStream is told."""
        shuffling = {"shuffle": self.shuffle, "buffer_size": self.buffer_size, "seed": self.seed or 0}
        return {**shuffling, "lanes": self.lanes}


# A plan's fields, here and in other frameworks, belong into the plan.
_IN_PLAN = {name: f"plan=ParallelPlan({name}=VALUE)" for name in PLAN_FIELDS} | {
    name: f"plan=ParallelPlan({fields})" for name, fields in PLAN_NAMES.items()
}


@names_checked(_IN_PLAN)
@dataclass(kw_only=True)
class ToDistributedConfig:
    """Options of ``to_distributed``.

    A field may be assigned after the config is made; each assignment is checked as the constructor's arguments are.

    Args:
        plan: the parallel plan: a ParallelPlan, its words ("dp2 tp2+sp zero1"), a dict of its fields, or the path of
            a file that ``meshwright plan --save`` wrote; None for the one in the model's config ("meshwright" in its
            config.json), if any; without one, and by "auto", the planner picks the fastest one that fits, which it
            logs.
        memory_budget: what a picked plan may fill of a device: bytes, or up to 1 a share of it; 0.9 by default.
        prefer: what a picked plan is best at: "throughput", or the least "memory".
        hardware_profile: a profile that ``meshwright calibrate`` measured, for picking a plan; the catalogue's
            figures by default.
        sequence_parallel: overrides ``plan.sequence_parallel``; None lets the plan say.
        weights: a checkpoint to read the weights from, each rank its own shard: a .safetensors file, a
            .safetensors.index.json, a directory with either, or a list of files. They are converted to the
            model's dtype.
        input_spec: name -> (shape, dtype) of one global batch, for picking a plan where the dataloader does not
            tell its size.
        sharding_plan: which module plays which role, instead of the registered or inferred plan.
        gather_logits: gather ``outputs.logits`` in training with labels too. They stay sharded
            otherwise, since nobody but the loss needs them and they are a step's largest tensor.
        num_items_in_batch: what a ``num_items_in_batch`` passed to the model counts: "global", the items of all
            data-parallel ranks, equal on all of them; "local", those of this rank's rows. "auto" (the default) takes
            a number only where it is each rank's own count of valid labels, and raises an ItemCountError
            otherwise; on CUDA it waits for the device to compare, and the other two do not.
        loss_averages_over: what the loss that the model returns is a mean over, for a model whose loss is not one of
            transformers' own: "rows"; "labels", those that are not -100; or a callable that is given the arguments
            of the model's forward by name and returns the number of this rank. The loss is then the mean over the
            global batch; see docs/losses.md.
        optimizer_is_elementwise: vouch for an optimizer class that is not known to update each
            element from that element alone.
        bucket_size_mb: gradients are communicated in buckets of this size.
        engine: the training engine that averages gradients over dp, shards the optimizer and clips in the runtime's
            place, by name; set by an integration (meshwright_hf.deepspeed). The runtime then keeps to tp.
        loader: how the returned loader reads.
        check_replicas_every: steps between two comparisons of the weights that several ranks hold; 0 turns them off.
            None: 1 under ZeRO stages 1 and 2, where each step spreads what one rank has to all, otherwise 50. They are
            also compared before every save. Tokens and the optimizer's settings are compared in every step.
        timeout_s: seconds that a rank may keep the others waiting before all of them end with an error
            that names it; the timeout of every process group.
    """

    plan: PlanLike | None = None
    memory_budget: float | None = None
    prefer: Literal["throughput", "memory"] = "throughput"
    hardware_profile: str | os.PathLike[str] | None = None
    sequence_parallel: bool | None = None
    weights: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None
    input_spec: Mapping[str, Any] | None = None
    sharding_plan: ShardingPlan | None = None
    gather_logits: bool = False
    num_items_in_batch: NumItems = "auto"
    loss_averages_over: AveragesOver | None = None
    optimizer_is_elementwise: bool = False
    bucket_size_mb: float = 25.0
    engine: str | None = None
    loader: LoaderOptions = LoaderOptions()
    check_replicas_every: int | None = None
    timeout_s: float = 120.0

    def __setattr__(self, name: str, value: Any) -> None:
        known = [field.name for field in fields(self)]
        if name not in known:
            raise PlanError(unknown_field("ToDistributedConfig", name, known, _IN_PLAN))
        _CHECKS[name]("ToDistributedConfig", name, value)
        super().__setattr__(name, value)


def _check_averages_over(owner: str, name: str, value: Any) -> None:
    if not (value is None or callable(value) or value in ("rows", "labels")):
        raise PlanError(
            f"{owner}.{name}={value!r} must be 'rows', 'labels' or a callable that counts in a batch, for example "
            "lambda batch: (batch['labels'] != -100).sum()"
        )


_PATH = (str, os.PathLike)
_CHECKS: dict[str, Callable[[str, str, Any], None]] = {
    "plan": partial(
        check_type,
        kinds=(ParallelPlan, Mapping, *_PATH),
        what="a ParallelPlan, its words ('dp2 tp2+sp zero1'), a dict of its fields, 'auto' or the path of a plan file",
    ),
    "memory_budget": partial(check_number, optional=True),
    "prefer": partial(check_choice, choices=("throughput", "memory")),
    "hardware_profile": partial(check_type, kinds=_PATH, what="the path of a profile that meshwright calibrate wrote"),
    "sequence_parallel": partial(check_bool, optional=True),
    "weights": partial(check_type, kinds=(*_PATH, Sequence), what="the path of a checkpoint, or a list of files"),
    "input_spec": partial(check_type, kinds=Mapping, what="a dict: {'input_ids': ((8, 2048), torch.int64)}"),
    "sharding_plan": partial(check_type, kinds=ShardingPlan, what="a meshwright.ShardingPlan, which names roles"),
    "gather_logits": check_bool,
    "num_items_in_batch": partial(check_choice, choices=("auto", "global", "local")),
    "loss_averages_over": _check_averages_over,
    "optimizer_is_elementwise": check_bool,
    "bucket_size_mb": check_number,
    "engine": partial(check_type, kinds=str, what="the name of an engine"),
    "loader": partial(check_type, kinds=LoaderOptions, what="a meshwright.LoaderOptions"),
    "check_replicas_every": partial(check_int, least=0, optional=True),
    "timeout_s": check_number,
}
