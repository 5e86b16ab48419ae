"""Meshwright makes a stock Hugging Face Llama-style model train in parallel with one call."""

from meshwright.checkpoint.export import full_gradients, full_state_dict
from meshwright.config import LoaderOptions, ParallelPlan, ToDistributedConfig
from meshwright.construct.deferred import deferred_init
from meshwright.data.shard_dataloader import shard_dataloader
from meshwright.data_parallel import DataParallel, fused_allreduce_gradients
from meshwright.distribute import to_distributed
from meshwright.errors import (
    AlreadyDistributedError,
    CheckpointError,
    DivergenceError,
    OptimizerMismatchError,
    PeerFailedError,
    PlanError,
    UncoveredParameterError,
    UninitialisedParameterError,
    UnreadableTensorError,
)
from meshwright.mesh import ParallelDims, ProcessMesh
from meshwright.optim.clip import clip_grad_norm_
from meshwright.optim.runtime import no_sync
from meshwright.optim.shard import shard_optimizer
from meshwright.placement import Partial, Replicate, Shard, reshard, shard_tensor
from meshwright.plans import Role, ShardingPlan, decoder_roles, infer_plan, register_plan

__all__ = [
    "AlreadyDistributedError",
    "CheckpointError",
    "DataParallel",
    "DivergenceError",
    "LoaderOptions",
    "OptimizerMismatchError",
    "ParallelDims",
    "ParallelPlan",
    "Partial",
    "PeerFailedError",
    "PlanError",
    "ProcessMesh",
    "Replicate",
    "Role",
    "Shard",
    "ShardingPlan",
    "ToDistributedConfig",
    "UncoveredParameterError",
    "UninitialisedParameterError",
    "UnreadableTensorError",
    "clip_grad_norm_",
    "decoder_roles",
    "deferred_init",
    "full_gradients",
    "full_state_dict",
    "fused_allreduce_gradients",
    "infer_plan",
    "no_sync",
    "register_plan",
    "reshard",
    "shard_dataloader",
    "shard_optimizer",
    "shard_tensor",
    "to_distributed",
]

__version__ = "0.1.0"
