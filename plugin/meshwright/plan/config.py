"""The options of ``to_distributed`` beside the plan."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

from torch import Tensor

from meshwright.errors import PlanError
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
from meshwright.plan.parallel_plan import IN_PLAN, PLAN_FIELDS, ParallelPlan, PlanLike
from meshwright.plan.parts import BUCKET_MB
from meshwright.roles import ShardingPlan

__all__ = ["IN_PLAN", "PLAN_FIELDS", "ParallelPlan", "PlanLike", "ToDistributedConfig"]

NumItems = Literal["auto", "global", "local"]
AveragesOver = Literal["rows", "labels"] | Callable[[dict[str, object]], Tensor | int]
# The dim of an argument that has the rows, None if it belongs to every row, or a function of the batch that returns how
# many entries along the first dim each row has.
RowsOf = int | None | Callable[[Mapping[str, Any]], Sequence[int] | Tensor]


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
            same seed; each rank draws for the whole batch, and keeps its part (docs/equality.md). "rank": each rank
            draws for what it computes, from a stream of its own.
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
