"""Refuses settings of an Accelerator, and objects for ``prepare``, that contradict a plan."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType, DynamoBackend
from accelerate.utils.dataclasses import FP8BackendType
from torch import nn

from meshwright.distribute.quantised import is_packed, is_quantised, method_of
from meshwright.errors import AlreadyDistributedError, PlanError
from meshwright.mesh.process_group import world_size
from meshwright.plan.config import ParallelPlan
from meshwright_hf.accelerate.planned_loader import PlannedLoader

logger = logging.getLogger(__name__)


def check_launch(accelerator: Accelerator) -> None:
    """Raise if the Accelerator's number of processes is not the number of launched processes.

    Raises:
        PlanError: if the numbers differ; the message gives both.
    """
    launched = world_size()
    if accelerator.state.num_processes == launched:
        return
    counts = f"{launched} processes were launched, but this Accelerator has {accelerator.state.num_processes}: "
    earlier = (
        "a PartialState was made before the Accelerator without cpu=True, which makes each process a program of "
        "its own, and every later Accelerator shares it. Write PartialState(cpu=True) there, or make the Accelerator "
        "before anything that makes one (PartialState(), TrainingArguments(), accelerate.logging)"
    )
    if _is_set("ACCELERATE_USE_CPU"):  # the Accelerator asked for the CPU, so another PartialState came first
        raise PlanError(counts + earlier)
    raise PlanError(
        f"{counts}without a GPU, Accelerator() makes each process a program of its own, without a warning. Use "
        "Accelerator(cpu=True), or set ACCELERATE_USE_CPU=true as `meshwright launch` does. If it has cpu=True "
        f"already, {earlier}"
    )


def check_placement(device_placement: list[bool] | None) -> None:
    """Raise a PlanError if ``device_placement`` was passed to ``accelerator.prepare``."""
    if device_placement is not None:
        raise PlanError("device_placement is not available under a plan; set Accelerator(device_placement=...)")


def check_settings(accelerator: Accelerator, plan: ParallelPlan) -> None:
    """Raise if a setting of the Accelerator contradicts the plan or is not supported under a plan.

    Raises:
        PlanError: if there is such a setting; the message names it and the plan's field.
    """
    state = accelerator.state
    fsdp = getattr(state, "fsdp_plugin", None)
    if fsdp is not None or _is_set("ACCELERATE_USE_FSDP"):
        strategy = getattr(fsdp, "sharding_strategy", None) or getattr(fsdp, "reshard_after_forward", None)
        plugin = f"FullyShardedDataParallelPlugin({strategy or ''})"
        raise PlanError(
            f"{plugin} wants to shard the model over {accelerator.state.num_processes} processes, but the plan says "
            f"dp={plan.dp}, tp={plan.tp}, zero_stage={plan.zero_stage}; leave the plugin (ACCELERATE_USE_FSDP) out, "
            "and set what is sharded over dp with ParallelPlan(zero_stage=...)"
        )
    if state.distributed_type == DistributedType.DEEPSPEED or _is_set("ACCELERATE_USE_DEEPSPEED"):
        plugin = accelerator.deepspeed_plugin
        stage = f"zero_stage={plugin.zero_stage}" if plugin is not None else ""
        raise PlanError(
            f"DeepSpeedPlugin({stage}) makes DeepSpeed the engine, but the plan says zero_stage={plan.zero_stage}, "
            f"dp={plan.dp}, tp={plan.tp}; to use DeepSpeed, call accelerator.prepare inside "
            "`with meshwright_hf.deepspeed.deepspeed_mpu(plan):`, or leave the plugin (ACCELERATE_USE_DEEPSPEED) out"
        )
    megatron = getattr(state, "megatron_lm_plugin", None)
    if megatron is not None or _is_set("ACCELERATE_USE_MEGATRON_LM"):
        degrees = f"tp_degree={megatron.tp_degree}, pp_degree={megatron.pp_degree}" if megatron is not None else ""
        raise PlanError(
            f"MegatronLMPlugin({degrees}) makes Megatron-LM the engine, but the plan says tp={plan.tp}, pp={plan.pp}; "
            "leave the plugin (ACCELERATE_USE_MEGATRON_LM) out"
        )
    if (sizes := accelerator.parallelism_config) is not None:
        for name, value in (("cp_size", sizes.cp_size), ("sp_size", sizes.sp_size)):
            if value > 1:  # accelerate's own ring, and DeepSpeed's Ulysses: both cut the batch before the model
                raise PlanError(
                    f"ParallelismConfig has {name}={value}, with which accelerate cuts sequences itself, but the plan "
                    f"has cp={plan.cp}; leave {name} out and set ParallelPlan(cp={value}), which cuts them inside the "
                    "model"
                )
        replicas = sizes.dp_replicate_size * sizes.dp_shard_size
        for name, theirs, axis in (
            ("tp_size", sizes.tp_size, "tp"),
            ("dp_replicate_size x dp_shard_size", replicas, "dp"),
        ):
            if theirs != getattr(plan, axis):
                raise PlanError(
                    f"ParallelismConfig has {name}={theirs}, but the plan has {axis}={getattr(plan, axis)}; make them "
                    "equal, or leave ParallelismConfig out: the plan alone decides"
                )
    if accelerator.mixed_precision == "fp8" and accelerator.fp8_backend != FP8BackendType.AO:
        raise PlanError(
            "Accelerator(mixed_precision='fp8') runs under a plan by torchao alone: another backend's scales would be "
            "those of this rank's parts. Pass kwargs_handlers=[accelerate.utils.AORecipeKwargs()], which needs "
            "pip install torchao, or use mixed_precision='bf16'"
        )
    if accelerator.mixed_precision == "fp16" and accelerator.scaler is None:
        logger.warning("on this device mixed_precision='fp16' does nothing in accelerate; training is in float32")
    if accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
        raise PlanError(
            f"Accelerator(dynamo_backend={accelerator.state.dynamo_plugin.backend.value!r}) would wrap the model in a "
            "compiled module, with which the plan's hooks do not work; leave it out"
        )
    if accelerator.dispatch_batches:
        raise PlanError(
            "DataLoaderConfiguration(dispatch_batches=True) would send every rank a part of rank 0's batch; leave it "
            "out. To read once for the ranks that need the same rows, pass "
            "ToDistributedConfig(loader=LoaderOptions(source='leader'))"
        )


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() in ("true", "1")


def check_num_processes(read: Iterable[int], dp: int, *, warns: bool = False) -> None:
    """Raise if a schedule may have been made with a different number of ranks than dp.

    A scheduler steps once for each of the loader's batches in an optimizer step, so dp times. A schedule whose lengths
    are times a larger number is too long, which only shows at the end of training.

    Args:
        read: the values that ``accelerator.num_processes`` has returned so far.
        dp: the number of scheduler steps per optimizer step.
        warns: whether to warn instead, of an Accelerator that does not record who reads its number of processes.

    Raises:
        PlanError: if a value differs from ``dp``; the message gives both.
    """
    if wrong := [count for count in read if count != dp]:
        if not warns:
            raise PlanError(f"accelerator.num_processes was read before prepare and was {_too_long(wrong[0], dp)}")
        logger.warning("before prepare, accelerator.num_processes is %s", _too_long(wrong[0], dp))


def _too_long(count: int, dp: int) -> str:
    return (
        f"{count}, but the plan has dp={dp}: a scheduler steps {dp} time(s) per optimizer step, so a schedule of "
        f"lengths times {count} would run at {dp}/{count} of its speed. Give the Accelerator the plan when it is made, "
        "so that num_processes is dp from the start:\n"
        "    from meshwright_hf.accelerate import Accelerator\n"
        "    accelerator = Accelerator(..., plan='dp2 tp2')  # or: meshwright launch --dp 2 --tp 2\n"
        "    model, optimizer, ... = accelerator.prepare(model, optimizer, ...)"
    )


def check_model(accelerator: Accelerator, model: nn.Module) -> None:
    """Raise if a model cannot be distributed.

    Raises:
        AlreadyDistributedError: if accelerate has prepared the model.
        PlanError: if the model is quantised, or spread over devices by a device map.
    """
    if getattr(model, "_is_accelerate_prepared", False) or any(model is known for known in accelerator._models):
        raise _prepared("the model")
    is_known = getattr(model, "quantization_method", None) is not None
    if (is_quantised(model) or is_known) and not is_packed(model):
        raise PlanError(
            f"the model's weights are quantised ({method_of(model)}), and shards of weights of this kind are not "
            "available; load the model with BitsAndBytesConfig, or without quantization_config"
        )
    devices = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(devices) > 1 or (devices & {"cpu", "disk"} and accelerator.device.type != "cpu"):
        raise PlanError(
            f"the model was loaded with a device_map over {', '.join(sorted(devices))}, all in one process, but "
            "the plan has a process for each device; load it without device_map"
        )


def check_not_prepared(name: str, value: object) -> None:
    """Raise if accelerate has prepared an optimizer, a loader or a scheduler.

    Raises:
        AlreadyDistributedError: if accelerate has prepared it; the message names the object.
    """
    wrappers = (AcceleratedOptimizer, AcceleratedScheduler, DataLoaderStateMixin)
    if isinstance(value, wrappers) and not isinstance(value, PlannedLoader):
        raise _prepared(name)


def _prepared(name: str) -> AlreadyDistributedError:
    return AlreadyDistributedError(
        f"{name} was already prepared by accelerator.prepare, for {'' if name == 'the model' else 'a model on '}"
        "all ranks alike; pass the plain objects to meshwright_hf.accelerate.prepare instead of accelerator.prepare"
    )
