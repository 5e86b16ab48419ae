"""``initialize`` shards a model over tp by a plan, describes this to DeepSpeed by an ``mpu``, and calls
``deepspeed.initialize``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed import initialize as initialize_stock
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import GatheredParameters
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.utils.data import Dataset

from meshwright.checkpoint.one_device.whole_tensors import full_state_dict as state_dict_of
from meshwright.choose.given_plan import resolve_plan
from meshwright.distribute.check_arguments import check_launch
from meshwright.distribute.to_distributed import to_distributed
from meshwright.errors import AlreadyDistributedError, PlanError
from meshwright.faults.equal_errors import say_equal_texts_once
from meshwright.faults.interpose import own_collectives
from meshwright.layout.row_layout import RowLayout
from meshwright.layout.tensor_layout import layout_of
from meshwright.mesh.axes import Axis
from meshwright.mesh.host import local_rank
from meshwright.mesh.process_group import device_for, ensure_process_group, world_size
from meshwright.optim.elementwise import check_elementwise
from meshwright.optim.runtime import Runtime, Watch, find_runtime, runtime_of
from meshwright.parallel.tensor_parallel.structure import describe
from meshwright.plan.config import ParallelPlan, PlanLike, ToDistributedConfig
from meshwright.roles import plan_for
from meshwright.roles.adapters import without_wrappers
from meshwright_hf.deepspeed.complete_config import BATCH, complete_config, read_config
from meshwright_hf.deepspeed.universal import adapt_universal_loading, describe_for_universal
from meshwright_hf.versions import warn_outside_range


class ModelParallelUnit:
    """Describes the mesh to DeepSpeed; it has the methods of Megatron's model-parallel unit (``mpu``).

    Args:
        tp: the axis over which layers are sharded; DeepSpeed calls it model parallel.
        dp: the axis over which DeepSpeed averages gradients and shards states.
    """

    def __init__(self, tp: Axis, dp: Axis):
        self._tp, self._dp = tp, dp

    def get_model_parallel_rank(self) -> int:
        return self._tp.rank

    def get_model_parallel_world_size(self) -> int:
        return self._tp.size

    def get_model_parallel_group(self) -> ProcessGroup | None:
        return _group_of(self._tp)

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group

    def get_data_parallel_rank(self) -> int:
        return self._dp.rank

    def get_data_parallel_world_size(self) -> int:
        return self._dp.size

    def get_data_parallel_group(self) -> ProcessGroup | None:
        return _group_of(self._dp)


def _group_of(axis: Axis) -> ProcessGroup | None:
    """Return the process group of an axis; the world's group if there is only one process."""
    return axis.group if axis.group is not None else dist.group.WORLD


def mark_parameters(model: nn.Module) -> None:
    """Mark on each parameter whether this rank's gradient counts in DeepSpeed's norm.

    For parameters with ``tensor_model_parallel``, DeepSpeed adds the norms of all model-parallel ranks. For other
    parameters it uses only the norm of rank 0. A key/value head that several ranks hold is marked only on the first of
    these ranks, so that it counts once.
    """
    for parameter in model.parameters():
        layout = layout_of(parameter)
        if layout.is_sharded:
            parameter.tensor_model_parallel = holds_first(layout.over("tp"), layout.rank("tp"))  # type: ignore[attr-defined]


def holds_first(rows: RowLayout, rank: int) -> bool | None:
    """Return whether the rank is the first to hold its rows; None if this is true for only some of the rows.

    Example:
        >>> one_kv_head = RowLayout(0, 8, (((0, 8),), ((0, 8),)))
        >>> holds_first(one_kv_head, 0), holds_first(one_kv_head, 1)
        (True, False)
    """
    times = torch.zeros(rows.size, dtype=torch.int32)
    for spans in rows.spans[: rank + 1]:
        for start, stop in spans:
            times[start:stop] += 1
    own = torch.zeros(rows.size, dtype=torch.int32)
    for start, stop in rows.spans[rank]:
        own[start:stop] += 1
    if bool((own > 1).any()):
        return None
    is_first = times[own > 0] == 1
    return None if is_first.any() and not is_first.all() else bool(is_first.all())


def check_norms(layouts: dict[str, RowLayout]) -> None:
    """Raise if DeepSpeed cannot count each row of the sharded parameters once in its gradient norm.

    Raises:
        PlanError: if there is such a parameter; the message names it.
    """
    for name, rows in layouts.items():
        if not rows.is_replicated and any(holds_first(rows, rank) is None for rank in range(len(rows.spans))):
            raise PlanError(
                f"{name}: with tp={len(rows.spans)} some ranks hold key/value heads of their own next to ones that "
                "another rank holds too, but DeepSpeed counts a parameter in the gradient norm wholly or not at all. "
                "Use a ParallelPlan.tp that divides the number of key/value heads (or, for separate k and v "
                "projections, a multiple of it), or to_distributed without DeepSpeed"
            )


ENGINE = "DeepSpeed"


def initialize(
    args: object = None,
    model: Any = None,
    optimizer: Optimizer | Callable[..., Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    *,
    dataloader: Iterable[Any] | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    config_params: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    plan: PlanLike | None = None,
    options: ToDistributedConfig | None = None,
) -> tuple[Any, Any, Any, Any]:
    """Shard a model by the plan's tensor and sequence parallelism, and return a DeepSpeed engine for it.

    The arguments and results are those of ``deepspeed.initialize``. Every launched process makes the call with the same
    arguments. Wrong arguments raise an error before the model is changed.

    Args:
        args: an object whose ``deepspeed_config`` is read if ``config`` is not given.
        model: a causal LM of transformers that was not built under ``deepspeed.zero.Init``.
        optimizer: an optimizer over the model's parameters, or a callable that returns one; by default the
            configuration's optimizer.
        model_parameters: parameters, or groups of them, for the configuration's optimizer; all by default.
        training_data: a dataset, from which DeepSpeed makes a loader of ``train_micro_batch_size_per_gpu`` rows.
        lr_scheduler: the scheduler, as in ``deepspeed.initialize``.
        dataloader: a loader instead of ``training_data``, with global batches of ``train_micro_batch_size_per_gpu`` x
            dp rows; the returned loader yields each dp rank's rows, and can be resumed.
        collate_fn: the collate function for ``training_data``.
        config: a DeepSpeed configuration, or the path of its JSON file; "auto" values are filled in.
            ``train_micro_batch_size_per_gpu`` counts the rows of a dp rank, which the ranks of tp share.
        config_params: another name for ``config``.
        plan: the plan, with dp and tp, in any form that ``to_distributed`` takes; None for tp=1. Its other fields are
            optional, but must agree with the configuration.
        options: further options of ``to_distributed``; their plan is ignored.

    Returns:
        The engine, its optimizer, the loader (None without data) and the scheduler.

    Raises:
        PlanError: if the plan, the configuration or their combination is not supported; the message names the settings.
        AlreadyDistributedError: if ``zero.Init``, DDP or another call has distributed the model.
        OptimizerMismatchError: if the optimizer belongs to another model, or its step on a shard may differ from
            its step on the whole tensor.

    Example::

        plan = mw.ParallelPlan(dp=2, tp=2, sequence_parallel=True)
        engine, optimizer, loader, scheduler = initialize(model=model, config="ds.json", dataloader=loader, plan=plan)
        for batch in loader:
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
    """
    say_equal_texts_once()
    warn_outside_range()
    settings = _given_config(args, config, config_params)
    plan = ParallelPlan(dp=world_size()) if plan is None else resolve_plan(plan)
    check_launch(plan)
    device = device_of_engine()
    _check_model(model)
    if training_data is not None and dataloader is not None:
        raise PlanError("training_data and dataloader were given; pass the dataset, or the loader of global batches")
    if isinstance(optimizer, Optimizer) and plan.tp > 1:
        check_elementwise(optimizer, is_trusted=_is_trusted(optimizer, options))
    complete_config(
        settings, plan, model, device=device, rows=_rows(dataloader, plan), has_optimizer=optimizer is not None
    )
    options = options or ToDistributedConfig()
    if plan.tp > 1:
        decoder = without_wrappers(model)[1]
        sharding = options.sharding_plan or plan_for(decoder)
        structure = describe(decoder, sharding, tp=plan.tp, sequence_parallel=plan.sequence_parallel)
        check_norms({name: layout.over("tp") for name, layout in structure.parameters.items()})

    _join(device, options.timeout_s)
    places = {id(p): name for name, p in model.named_parameters()}
    own_plan = dataclasses.replace(plan, zero_stage=0, gradient_accumulation_steps=1, micro_batch_size=None)
    own_options = dataclasses.replace(options, plan=own_plan, engine=ENGINE, optimizer_is_elementwise=True)
    own_optimizer = optimizer if isinstance(optimizer, Optimizer) else None
    model, _, loader = to_distributed(model, own_optimizer, dataloader, config=own_options)
    runtime = runtime_of(model)
    mark_parameters(model)
    describe_for_universal(model, runtime.mesh.tp)

    engine, engine_optimizer, engine_loader, scheduler = initialize_stock(
        model=model,
        optimizer=optimizer,
        model_parameters=_follow(model_parameters, model, places),
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        # For tp=1 too: otherwise an earlier engine's mpu is used.
        mpu=ModelParallelUnit(runtime.mesh.tp, runtime.mesh.tokens),
        collate_fn=collate_fn,
        config=settings,
    )
    _adapt(engine, runtime)
    return engine, engine_optimizer, engine_loader if dataloader is None else loader, scheduler


def _given_config(args: object, config: Any, config_params: Any) -> dict[str, Any]:
    of_args = getattr(args, "deepspeed_config", None)
    given = {
        name: value
        for name, value in (("config", config), ("config_params", config_params), ("args.deepspeed_config", of_args))
        if value is not None
    }
    if len(given) != 1:
        raise PlanError(f"pass one DeepSpeed configuration, not {' and '.join(given) or 'none'}: config=...")
    return read_config(next(iter(given.values())))


def device_of_engine() -> torch.device:
    """Return the device to which DeepSpeed moves the model; a CUDA device becomes the current one."""
    return device_for(torch.device(get_accelerator().device_name()))


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise PlanError(f"initialize takes model=a torch.nn.Module, not {type(model).__name__}")
    if find_runtime(model) is not None:
        raise AlreadyDistributedError(
            "this model was distributed by an earlier call; build the model again for DeepSpeed"
        )
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):
            raise AlreadyDistributedError(
                f"{name} was partitioned by deepspeed.zero.Init, before the plan could shard it; build the model "
                "outside zero.Init (with the Trainer: before TrainingArguments(deepspeed=...)), or under "
                "meshwright.deferred_init(), which allocates nothing"
            )


def _rows(dataloader: object, plan: ParallelPlan) -> int | None:
    """Return the number of rows of the loader's batch that a dp rank gets; None if the loader has no batch size."""
    size = getattr(dataloader, "batch_size", None)
    if size is None:
        return None
    if size % plan.dp:
        raise PlanError(
            f"the dataloader's batch_size={size} cannot be divided over dp={plan.dp}; make it {BATCH} x dp, the rows "
            "of one micro-batch over all ranks"
        )
    return size // plan.dp


def _is_trusted(optimizer: Optimizer, options: ToDistributedConfig | None) -> bool:
    """Return whether an optimizer is known to be elementwise: of DeepSpeed's own, only Adam, Adagrad and Lion are."""
    of_deepspeed = type(optimizer).__module__.startswith(
        ("deepspeed.ops.adam", "deepspeed.ops.adagrad", "deepspeed.ops.lion")
    )
    return of_deepspeed or (options is not None and options.optimizer_is_elementwise)


def _join(device: torch.device, timeout_s: float) -> None:
    """Start the process group, with one rank if this process was not launched; keep DeepSpeed from compiling."""
    ensure_process_group(timeout_s, device)
    # DeepSpeed reads it, and srun does not set it.
    os.environ.setdefault("LOCAL_RANK", str(local_rank(dist.get_rank(), dist.get_world_size())))
    if device.type == "cpu":
        # This shared-memory collective is for inference, and DeepSpeed would compile it for a minute at its start.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _follow(given: Iterable[Any] | None, model: nn.Module, places: dict[int, str]) -> list[Any]:
    """Return the distributed model's parameters with the names of the given ones, in the same groups."""
    now = dict(model.named_parameters())
    if given is None:
        return [p for p in now.values() if p.requires_grad]
    return [
        {**item, "params": [now[places[id(p)]] for p in item["params"]]}
        if isinstance(item, dict)
        else now[places[id(item)]]
        for item in given
    ]


def _adapt(engine: Any, runtime: Runtime) -> None:
    """Adapt an engine to a sharded model: the guard accepts its collectives, and its exports gather over tp."""
    if engine.zero_optimization_partition_weights():
        assert runtime.gradients.engine is not None
        runtime.gradients.engine.materialise = _gathered
    for name in ("forward", "backward", "step"):
        setattr(engine, name, own_collectives()(getattr(engine, name)))
    if (watch := runtime.features.find(Watch)) is not None:
        engine.step = _WatchedStep(engine, engine.step, watch)
    if engine.zero_optimization_partition_weights():
        adapt_universal_loading(engine.optimizer, runtime)
    if runtime.mesh.tp.size > 1:
        engine.save_16bit_model = functools.partial(_refuse_16bit, engine)
        # accelerate's get_state_dict, and so the Trainer, calls this method under stage 3.
        engine._zero3_consolidated_16bit_state_dict = lambda *_, **__: full_state_dict(engine)


class _WatchedStep:
    """Runs an engine's ``step``, and reports each call that stepped the optimizer to ``watch``."""

    def __init__(self, engine: Any, step: Callable[..., Any], watch: Watch) -> None:
        self._engine, self._step, self._watch = engine, step, watch

    def __call__(self, *args: object, **kwargs: object) -> Any:
        before = self._engine.global_steps
        result = self._step(*args, **kwargs)
        if self._engine.global_steps > before:
            rates = self._engine.get_lr()
            self._watch.end_step(lr=rates[0] if rates else None, norm=self._engine.get_global_grad_norm())
        return result


def _gathered(parameter: Tensor) -> contextlib.AbstractContextManager[Any]:
    return GatheredParameters([parameter])


def _refuse_16bit(engine: Any, *_: object, **__: object) -> None:
    raise ValueError(
        f"save_16bit_model would write one rank's shard of tp={engine.mp_world_size} as if it were the model; use "
        "meshwright_hf.deepspeed.save_pretrained(engine, folder), on every rank"
    )


def full_state_dict(engine: Any) -> dict[str, Tensor]:
    """Return the one-device state dict of an engine's model on the CPU of rank 0, and an empty dict on other ranks.

    Every rank makes the call. The weights have the dtype in which the model computes.

    Args:
        engine: an engine from :func:`meshwright_hf.deepspeed.initialize`.

    Example::

        weights = full_state_dict(engine)
        if dist.get_rank() == 0:
            torch.save(weights, "model.pt")
    """
    return state_dict_of(engine.module)


def save_pretrained(engine: Any, folder: str | os.PathLike[str], **options: object) -> None:
    """Write one-device files that ``from_pretrained`` reads, tensor by tensor; every rank makes the call.

    DeepSpeed's zero_to_fp32 also makes such a file from a checkpoint, but only for tp=1.

    Args:
        engine: an engine from :func:`meshwright_hf.deepspeed.initialize`.
        folder: the folder to write to, on rank 0's disk.
        options: the options of transformers' ``save_pretrained``, e.g. ``max_shard_size``.
    """
    engine.module.save_pretrained(folder, **options)
