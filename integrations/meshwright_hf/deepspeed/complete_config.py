"""Reads a DeepSpeed JSON, fills in its "auto" values, and refuses keys that contradict a plan."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from meshwright.errors import PlanError
from meshwright.outside_files import read_json
from meshwright.plan.config import ParallelPlan

ADVICE_PLAN = "the plan shards the model: remove it, and set ParallelPlan"
# Key -> why it is refused, and what to do. A value that switches the key off (see _is_on) is accepted.
REFUSED = {
    "tensor_parallel": f"DeepSpeed's own tensor parallelism; {ADVICE_PLAN}.tp",
    "autotp_size": f"DeepSpeed's own tensor parallelism; {ADVICE_PLAN}.tp",
    "sequence_parallel_size": f"Ulysses over the layers of DeepSpeed; {ADVICE_PLAN}.sequence_parallel",
    "data_parallel_size": f"the size of DeepSpeed's own mesh; {ADVICE_PLAN}.dp",
    "expert_parallel": "AutoEP replaces the model's experts with layers of DeepSpeed; remove it, so that every rank "
    "has all experts, or train without DeepSpeed: meshwright.to_distributed(..., plan='dp2 ep2 zero1')",
    "hybrid_engine": "it replaces the model's layers with its own; remove it",
    "compression_training": "it replaces the model's layers with its own; remove it",
    "elasticity": "it changes the batch with the number of processes, and so the results; remove it",
    "autotuning": "it launches runs of its own; remove it (meshwright plan finds sizes)",
    "sparse_attention": "it replaces the model's attention; remove it",
    "amp": "apex patches the model's layers; use bf16",
}
REFUSED_IN_ZERO = {
    "mics_shard_size": "MiCS builds groups of neighbouring ranks, which tp has taken",
    "zero_hpz_partition_size": "ZeRO++ builds groups of neighbouring ranks, which tp has taken",
    "zero_quantized_weights": "quantised communication changes losses and gradients",
    "zero_quantized_gradients": "quantised communication changes losses and gradients",
    "zero_quantized_nontrainable_weights": "quantised communication changes losses and gradients",
}
# Optimizers of the JSON that update each element independently, so that they are exact on shards.
ELEMENTWISE = frozenset({"adam", "adamw", "sgd", "adagrad", "lion", "rmsprop", "adadelta", "adamax", "nadam", "radam"})
BATCH = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"


def read_config(config: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    """Return a DeepSpeed configuration as a new dict.

    Args:
        config: the dict, or the path of the JSON file.

    Raises:
        PlanError: if the file is missing, is not JSON, or has a key twice.
    """
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    try:
        found = read_json(config)
    except (OSError, ValueError) as error:
        raise PlanError(f"the DeepSpeed configuration {os.fspath(config)!r} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise PlanError(f"the DeepSpeed configuration {os.fspath(config)!r} must be a JSON object")
    return found


def complete_config(
    config: dict[str, Any],
    plan: ParallelPlan,
    model: nn.Module,
    *,
    device: torch.device,
    rows: int | None = None,
    has_optimizer: bool,
) -> dict[str, Any]:
    """Return the configuration, checked against the plan and with "auto" values filled in as transformers does.

    Args:
        config: the configuration from :func:`read_config`, changed in place.
        plan: the plan, with dp and tp; its other fields set keys that the configuration leaves open.
        model: the model, which gives the hidden size and the dtype.
        device: the device that DeepSpeed runs on.
        rows: the number of rows of the loader's batch that a dp rank gets, if known.
        has_optimizer: whether an optimizer object is passed with the model.

    Raises:
        PlanError: if configuration and plan contradict each other; the message gives the key, the plan's field and both
            values.
    """
    _refuse(config, plan, device, has_optimizer)
    zero = config.setdefault("zero_optimization", {})
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3) or (stage == 0 and plan.tp > 1):
        raise PlanError(
            f"zero_optimization.stage={stage!r} of the DeepSpeed configuration: use 1, 2 or 3 with ParallelPlan.tp="
            f"{plan.tp} (without ZeRO, meshwright.to_distributed does it all)"
        )
    if plan.zero_stage not in (0, stage):
        raise PlanError(
            f"ParallelPlan.zero_stage={plan.zero_stage} and zero_optimization.stage={stage} of the DeepSpeed "
            "configuration differ; change one, or leave zero_stage out of the plan"
        )
    _complete_batch(config, plan, rows)
    dtype = next(model.parameters()).dtype
    _fill(config, "bf16.enabled", dtype is torch.bfloat16)
    _fill(config, "fp16.enabled", dtype is torch.float16)
    _fill(config, "gradient_clipping", 1.0)  # TrainingArguments.max_grad_norm
    _fill(config, "zero_optimization.stage3_gather_16bit_weights_on_model_save", False)
    _fill_from_hidden_size(config, model)
    optimizer = config.get("optimizer", {})
    if device.type == "cpu" and str(optimizer.get("type")).lower() in ("adam", "adamw"):
        # DeepSpeed would first compile its own Adam, whose step is no faster than torch's on a CPU.
        optimizer.setdefault("params", {}).setdefault("torch_adam", True)
    if has_optimizer:  # as accelerate does, since the user chose this optimizer
        config.setdefault("zero_allow_untested_optimizer", True)
    if plan.tp > 1:
        config.pop("train_batch_size", None)  # checked above; DeepSpeed computes it
    if left := list(_autos(config)):
        raise PlanError(
            f"{', '.join(left)} of the DeepSpeed configuration say(s) 'auto', but no value is known; write the "
            "value, or pass the optimizer or scheduler as an object"
        )
    return config


def _refuse(config: dict[str, Any], plan: ParallelPlan, device: torch.device, has_optimizer: bool) -> None:
    for key, why in REFUSED.items():
        if _is_on(key, config.get(key)):
            raise PlanError(f"{key}={config[key]!r} of the DeepSpeed configuration: {why}")
    zero = config.get("zero_optimization", {})
    for key, why in REFUSED_IN_ZERO.items():
        if plan.tp > 1 and _is_on(key, zero.get(key)):
            raise PlanError(
                f"zero_optimization.{key}={zero[key]!r} of the DeepSpeed configuration: {why}; remove it, or use "
                "ParallelPlan.tp=1"
            )
    if config.get("gradient_allreduce_op", "mean") != "mean" or config.get("disable_gradient_average"):
        raise PlanError(
            f"gradient_allreduce_op={config.get('gradient_allreduce_op')!r} of the DeepSpeed configuration: the loss "
            "is scaled for gradients that are averaged over dp; remove it"
        )
    fp16 = config.get("fp16", {}).get("enabled")
    if fp16 is True and device.type == "cpu":
        raise PlanError("fp16.enabled=true of the DeepSpeed configuration cannot run on CPU; use bf16, or neither")
    optimizer = config.get("optimizer", {}).get("type")
    if optimizer is not None and has_optimizer:
        raise PlanError(
            f"optimizer.type={optimizer!r} of the DeepSpeed configuration and an optimizer object were given; pass one"
        )
    if optimizer is not None and plan.tp > 1 and str(optimizer).lower() not in ELEMENTWISE:
        raise PlanError(
            f"optimizer.type={optimizer!r} of the DeepSpeed configuration is not known to be elementwise, so with "
            f"tp={plan.tp} its step on a shard may differ from its step on the whole tensor; use AdamW, or "
            "ParallelPlan.tp=1"
        )


def _is_on(key: str, value: Any) -> bool:
    if isinstance(value, Mapping):
        if "enabled" in value:
            return bool(value["enabled"])
        if key == "tensor_parallel":
            return (value.get("autotp_size") or 0) > 1
        return bool(value)
    is_size = key.endswith("_size") and isinstance(value, int)
    return value > 1 if is_size else bool(value)


def _complete_batch(config: dict[str, Any], plan: ParallelPlan, rows: int | None) -> None:
    """Set rows per micro-batch, micro-batches per step and rows per step; any two give the third."""
    micro = _agreed(config, BATCH, plan.micro_batch_size, "ParallelPlan.micro_batch_size")
    if rows is not None and micro not in (None, rows):
        raise PlanError(
            f"{BATCH}={micro} of the DeepSpeed configuration, but the dataloader gives {rows} row(s) to each of "
            f"dp={plan.dp} ranks; make its batch_size {BATCH} x dp = {micro * plan.dp}"
        )
    micro = micro or rows
    of_plan = plan.gradient_accumulation_steps
    steps = _agreed(config, STEPS, of_plan if of_plan > 1 else None, "ParallelPlan.gradient_accumulation_steps")
    total = _number(config, "train_batch_size")
    if micro is None and total is not None:
        micro, rest = divmod(total, plan.dp * (steps or 1))
        if rest or not micro:
            raise PlanError(
                f"train_batch_size={total} of the DeepSpeed configuration cannot be divided over dp={plan.dp} x "
                f"{STEPS}={steps or 1}"
            )
    if micro is None:
        raise PlanError(
            f"{BATCH} is not known; write it in the DeepSpeed configuration, or pass ParallelPlan.micro_batch_size or "
            "a dataloader"
        )
    if steps is None:
        steps = 1 if total is None else total // (micro * plan.dp) or 1
    if total is not None and total != micro * steps * plan.dp:
        raise PlanError(
            f"train_batch_size={total} of the DeepSpeed configuration is not {BATCH}={micro} x {STEPS}={steps} x "
            f"dp={plan.dp} = {micro * steps * plan.dp} (the ranks of tp={plan.tp} share their rows); leave it out, or "
            "change one of them"
        )
    config[BATCH], config[STEPS], config["train_batch_size"] = micro, steps, micro * steps * plan.dp


def _agreed(config: dict[str, Any], key: str, of_plan: int | None, field: str) -> int | None:
    value = _number(config, key)
    if value is not None and of_plan not in (None, value):
        raise PlanError(
            f"{key}={value} of the DeepSpeed configuration and {field}={of_plan} differ; change one, or leave it out "
            "of the plan"
        )
    return value if value is not None else of_plan


def _number(config: dict[str, Any], key: str) -> int | None:
    value = config.get(key)
    if value in (None, "auto"):
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PlanError(f"{key}={value!r} of the DeepSpeed configuration must be a positive integer or 'auto'")
    return value


def _fill_from_hidden_size(config: dict[str, Any], model: nn.Module) -> None:
    keys = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    left = [key for key in keys if config["zero_optimization"].get(key) == "auto"]
    if not left:
        return
    own = getattr(model, "config", None)
    width = getattr(own, "hidden_size", None) or getattr(getattr(own, "text_config", None), "hidden_size", None)
    if width is None:
        raise PlanError(
            f"{', '.join(left)} of zero_optimization: 'auto' is computed from the model's hidden_size, but "
            f"{type(model).__name__} has no config with a hidden_size; set numbers instead"
        )
    values = (width * width, int(0.9 * width * width), 10 * width)  # transformers' formulas
    for key, value in zip(keys, values, strict=True):
        _fill(config, f"zero_optimization.{key}", value)


def _fill(config: dict[str, Any], path: str, value: object) -> None:
    *parents, key = path.split(".")
    section: object = config
    for parent in parents:
        section = section.get(parent) if isinstance(section, dict) else None
    if isinstance(section, dict) and section.get(key) == "auto":
        section[key] = value


def _autos(section: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in section.items():
        if isinstance(value, dict):
            found += _autos(value, f"{prefix}{key}.")
        elif value == "auto":
            found.append(prefix + key)
    return found
