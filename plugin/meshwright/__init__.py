"""Meshwright makes a stock Hugging Face Llama-style model train in parallel with one call.

``docs/design.md`` has the packages. The files beside them:

    facts.py          what one walk over a model shows     model_kinds.py   which kind of model a config describes
    data_parallel.py  ``DataParallel``                     placement.py     ``shard_tensor`` and ``reshard``
    autograd.py       the base of autograd functions       compiling.py     what stays out of compiled graphs
    errors.py         the errors for users                 progress.py      bars and log lines of long work
    printable.py      texts that are safe to show          outside_files.py  files that others write
    random_states.py  what draws, and whether it drew      containers.py    containers of the program's classes
    temporarily.py    attributes that are replaced for a time
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from meshwright.mesh.siblings import write_stacks_on_signal

if TYPE_CHECKING:
    from meshwright.checkpoint.format.background import wait_for_checkpoints
    from meshwright.checkpoint.format.load_checkpoint import Checkpoint, load_checkpoint
    from meshwright.checkpoint.format.load_weights import load_weights
    from meshwright.checkpoint.format.optimizer_files import load_optimizer, save_optimizer
    from meshwright.checkpoint.format.save_checkpoint import save_checkpoint
    from meshwright.checkpoint.one_device.save_pretrained import save_weights
    from meshwright.checkpoint.one_device.whole_tensors import full_gradients, full_state_dict
    from meshwright.construct.deferred_init import deferred_init
    from meshwright.data.shard_dataloader import shard_dataloader
    from meshwright.data_parallel import DataParallel, fused_allreduce_gradients
    from meshwright.distribute.to_distributed import to_distributed
    from meshwright.distribute.to_static import StaticStep, to_static
    from meshwright.errors import (
        AlreadyDistributedError,
        CheckpointError,
        DivergenceError,
        ItemCountError,
        OptimizerMismatchError,
        OutOfVocabularyError,
        PeerFailedError,
        PlanError,
        UncoveredParameterError,
        UninitialisedParameterError,
        UnreadableTensorError,
        VerificationError,
    )
    from meshwright.faults.preemption import Preemption
    from meshwright.mesh.process_mesh import ParallelDims, ProcessMesh
    from meshwright.monitor.held_memory import HeldMemory, MemoryOfRanks
    from meshwright.monitor.read_out import log_values, memory_of
    from meshwright.optim.attach_gradients import shard_optimizer
    from meshwright.optim.balance_experts import balance_experts, expert_counts
    from meshwright.optim.chained import ChainedOptimizer
    from meshwright.optim.clip_grad_norm import clip_grad_norm_
    from meshwright.optim.global_batch import gather_rows, global_mean, sampling_generator
    from meshwright.optim.runtime import no_sync, plan_of
    from meshwright.parallel.experts.token_dispatchers import TokenDispatcher, register_dispatcher
    from meshwright.placement import Partial, Replicate, Shard, reshard, shard_tensor
    from meshwright.plan.config import ToDistributedConfig
    from meshwright.plan.loader_options import LoaderOptions
    from meshwright.plan.parallel_plan import ParallelPlan
    from meshwright.roles import Role, ShardingPlan, decoder_roles, infer_plan, register_plan
    from meshwright_tools.verification.verify import verify

# Module -> its public names. Names are imported on first use, so that the planner and the command line start without
# importing torch.
_HOMES = {
    "checkpoint.one_device.whole_tensors": ("full_gradients", "full_state_dict"),
    "checkpoint.format.background": ("wait_for_checkpoints",),
    "checkpoint.format.load_checkpoint": ("Checkpoint", "load_checkpoint"),
    "checkpoint.format.load_weights": ("load_weights",),
    "checkpoint.format.optimizer_files": ("load_optimizer", "save_optimizer"),
    "checkpoint.format.save_checkpoint": ("save_checkpoint",),
    "checkpoint.one_device.save_pretrained": ("save_weights",),
    "plan.config": ("ToDistributedConfig",),
    "plan.loader_options": ("LoaderOptions",),
    "plan.parallel_plan": ("ParallelPlan",),
    "construct.deferred_init": ("deferred_init",),
    "data.shard_dataloader": ("shard_dataloader",),
    "data_parallel": ("DataParallel", "fused_allreduce_gradients"),
    "distribute.to_distributed": ("to_distributed",),
    "distribute.to_static": ("StaticStep", "to_static"),
    "errors": (
        "AlreadyDistributedError",
        "CheckpointError",
        "DivergenceError",
        "ItemCountError",
        "OptimizerMismatchError",
        "OutOfVocabularyError",
        "PeerFailedError",
        "PlanError",
        "UncoveredParameterError",
        "UninitialisedParameterError",
        "UnreadableTensorError",
        "VerificationError",
    ),
    "faults.preemption": ("Preemption",),
    "mesh.process_mesh": ("ParallelDims", "ProcessMesh"),
    "monitor.held_memory": ("HeldMemory", "MemoryOfRanks"),
    "monitor.read_out": ("log_values", "memory_of"),
    "optim.balance_experts": ("balance_experts", "expert_counts"),
    "optim.chained": ("ChainedOptimizer",),
    "optim.clip_grad_norm": ("clip_grad_norm_",),
    "optim.global_batch": ("gather_rows", "global_mean", "sampling_generator"),
    "optim.runtime": ("no_sync", "plan_of"),
    "parallel.experts.token_dispatchers": ("TokenDispatcher", "register_dispatcher"),
    "optim.attach_gradients": ("shard_optimizer",),
    "placement": ("Partial", "Replicate", "Shard", "reshard", "shard_tensor"),
    "roles": ("Role", "ShardingPlan", "decoder_roles", "infer_plan", "register_plan"),
}
_HOME = {name: f"meshwright.{module}" for module, names in _HOMES.items() for name in names}
_HOME["verify"] = "meshwright_tools.verification.verify"

__all__ = [
    "AlreadyDistributedError",
    "ChainedOptimizer",
    "Checkpoint",
    "CheckpointError",
    "DataParallel",
    "DivergenceError",
    "HeldMemory",
    "ItemCountError",
    "LoaderOptions",
    "MemoryOfRanks",
    "OptimizerMismatchError",
    "OutOfVocabularyError",
    "ParallelDims",
    "ParallelPlan",
    "Partial",
    "PeerFailedError",
    "PlanError",
    "Preemption",
    "ProcessMesh",
    "Replicate",
    "Role",
    "Shard",
    "ShardingPlan",
    "StaticStep",
    "ToDistributedConfig",
    "TokenDispatcher",
    "UncoveredParameterError",
    "UninitialisedParameterError",
    "UnreadableTensorError",
    "VerificationError",
    "balance_experts",
    "clip_grad_norm_",
    "decoder_roles",
    "deferred_init",
    "expert_counts",
    "full_gradients",
    "full_state_dict",
    "fused_allreduce_gradients",
    "gather_rows",
    "global_mean",
    "infer_plan",
    "load_checkpoint",
    "load_optimizer",
    "load_weights",
    "log_values",
    "memory_of",
    "no_sync",
    "plan_of",
    "register_dispatcher",
    "register_plan",
    "reshard",
    "sampling_generator",
    "save_checkpoint",
    "save_optimizer",
    "save_weights",
    "shard_dataloader",
    "shard_optimizer",
    "shard_tensor",
    "to_distributed",
    "to_static",
    "verify",
    "wait_for_checkpoints",
]

__version__ = "0.2.0.dev0"

if "RANK" in os.environ:  # a launcher's process, which may hang before to_distributed has begun to watch it
    write_stacks_on_signal()


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
