"""Plans in configs of transformers: a ``DistributedConfig`` as a ``ToDistributedConfig``, and saved in models."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from torch import nn
from transformers.distributed import DistributedConfig

from meshwright.errors import PlanError
from meshwright.mesh.process_group import world_size
from meshwright.plan.config import ParallelPlan, ToDistributedConfig
from meshwright.roles.registry import CONFIG_KEY, ROLES_KEY
from meshwright.roles.sharding_plan import ShardingPlan

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


def save_plan(
    model_or_config: object, plan: ParallelPlan | None = None, *, sharding_plan: ShardingPlan | None = None
) -> None:
    """Put a plan into a model's config, so that ``save_pretrained`` writes it and ``from_pretrained`` reads it.

    ``to_distributed`` uses this plan if no other plan is passed; transformers ignores it. A second call replaces the
    plan, and a call without a plan removes it.

    Args:
        model_or_config: a model of transformers, or its config.
        plan: the parallel plan; besides dp and tp, only fields that differ from their defaults are written.
        sharding_plan: the roles of the modules, for an architecture that meshwright does not know.

    Raises:
        PlanError: if an argument has the wrong type.

    Example::

        meshwright_hf.save_plan(model, mw.ParallelPlan(dp=2, tp=2, sequence_parallel=True))
        model.save_pretrained("out")
    """
    config = getattr(model_or_config, "config", None) if isinstance(model_or_config, nn.Module) else model_or_config
    if not hasattr(config, "to_diff_dict"):
        raise PlanError(f"save_plan takes a model of transformers or its config, not {type(model_or_config).__name__}")
    if not isinstance(plan, ParallelPlan | None):
        raise PlanError(f"save_plan takes a meshwright.ParallelPlan, not {type(plan).__name__}")
    if not isinstance(sharding_plan, ShardingPlan | None):
        raise PlanError(
            f"save_plan(sharding_plan=...) takes a meshwright.ShardingPlan, not {type(sharding_plan).__name__}"
        )
    saved: dict[str, Any] = {}
    if plan is not None:
        values = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
        # The sizes are always written, so that the plan can be read without knowing the defaults.
        defaults = {field.name: field.default for field in dataclasses.fields(plan)}
        saved = {k: v for k, v in values.items() if k in ("dp", "tp") or v != defaults[k]}
    if sharding_plan is not None:
        saved[ROLES_KEY] = {module: role.name.lower() for module, role in sharding_plan.roles.items()}
    if saved:
        setattr(config, CONFIG_KEY, saved)
    elif hasattr(config, CONFIG_KEY):
        delattr(config, CONFIG_KEY)
