"""Translates a transformers ``DistributedConfig`` to a ``ToDistributedConfig``."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from transformers.distributed import DistributedConfig

from meshwright.errors import PlanError
from meshwright.mesh.process_group import world_size
from meshwright.plan.config import ParallelPlan, ToDistributedConfig

# Fields that are translated; every other field must have its default.
_SIZES = ("tp_size", "pp_size", "fsdp_size", "dp_replicate_size")
# DistributedConfig.__post_init__ makes enable_expert_parallel mean ep_size > 1.
_HONOURED = {*_SIZES, "ep_size", "enable_expert_parallel", "tp_plan", "enable_sequence_parallel"}
_ALSO = {"ep_implementation": "all_to_all"}  # transformers' name of what Meshwright does with the tokens
_INSTEAD = {
    "ep_plan": "leave it None: Meshwright finds the experts",
    "ep_implementation": f"leave it 'auto', or set it {_ALSO['ep_implementation']!r}, as Meshwright does it",
    "fsdp_plan": "leave it None: Meshwright decides what is gathered when",
    "fsdp_cpu_offload": "set it False",
    "fsdp_mixed_precision": "set it False, and choose the precision by from_pretrained(dtype=...) or torch.autocast",
}


def options_for(config: DistributedConfig) -> ToDistributedConfig:
    """Return the options for a DistributedConfig: tp_size is tp, dp_replicate_size is dp, fsdp_size is dp with ZeRO-3.

    ep_size is ep, and does not change the number of processes. pp_size is pp, with micro-batches of one row;
    transformers itself refuses it together with fsdp_size or dp_replicate_size.

    Args:
        config: transformers' configuration; ``enable_sequence_parallel`` is used too.

    Raises:
        PlanError: if a setting is not supported, or the sizes do not match the number of launched processes.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        # DistributedConfig.__post_init__ turns sizes of None into 1.
        usual = (field.default, 1 if field.default is None else field.default, _ALSO.get(field.name, field.default))
        if field.name not in _HONOURED and value not in usual:
            raise PlanError(
                f"DistributedConfig.{field.name}={value!r} is not available with ParallelPlan; "
                f"{_INSTEAD.get(field.name, f'leave it {field.default!r}')}. To use transformers' own path, leave "
                "enable_sequence_parallel=False, and call register(take_over='sequence_parallel')"
            )
    if isinstance(config.tp_plan, dict):
        raise PlanError(
            f"DistributedConfig.tp_plan={config.tp_plan!r} names styles of transformers, but a ShardingPlan names "
            "roles; leave tp_plan=None, and register roles with meshwright.register_plan(model_type, plan) if "
            "the model needs them"
        )
    # transformers 5.17 has no dp_replicate_size, and leaves sizes None.
    sizes = {name: getattr(config, name, None) or 1 for name in _SIZES}
    needed = math.prod(sizes.values())
    if needed != (world := world_size()):
        asked = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise PlanError(
            f"DistributedConfig: {asked} needs {needed} processes, but {world} were launched; change the sizes, or "
            f"launch with: torchrun --nproc-per-node {needed} SCRIPT"
        )
    return ToDistributedConfig(plan=_plan(config, **sizes))


def _plan(
    config: DistributedConfig, *, tp_size: int, pp_size: int, fsdp_size: int, dp_replicate_size: int
) -> ParallelPlan:
    shape: dict[str, Any] = {"tp": tp_size, "sequence_parallel": config.enable_sequence_parallel and tp_size > 1}
    shape["ep"] = getattr(config, "ep_size", None) or 1
    if pp_size > 1:
        return ParallelPlan(pp=pp_size, micro_batch_size=1, **shape)
    if fsdp_size == 1:
        return ParallelPlan(dp=dp_replicate_size, **shape)
    if dp_replicate_size > 1:
        raise PlanError(
            f"DistributedConfig(fsdp_size={fsdp_size}, dp_replicate_size={dp_replicate_size}) is not supported, "
            "because ParallelPlan(zero_stage=3) shards over all data-parallel ranks; set "
            f"fsdp_size={fsdp_size * dp_replicate_size}, dp_replicate_size=1"
        )
    return ParallelPlan(dp=fsdp_size, zero_stage=3, **shape)
