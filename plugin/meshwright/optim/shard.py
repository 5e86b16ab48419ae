"""Connect an optimizer and a model's gradients: who reduces what, and who keeps which state."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshwright.errors import PlanError
from meshwright.launch import world_size
from meshwright.mesh import ProcessMesh
from meshwright.optim.elementwise import check_elementwise
from meshwright.optim.runtime import Runtime, attach
from meshwright.optim.zero import ReduceScatter, shard_optimizer_state, shard_whole_weights
from meshwright.parallel.buckets import make_buckets
from meshwright.parallel.collectives import Axis
from meshwright.parallel.copies import sum_copies_in_backward
from meshwright.parallel.gradients import IN_FLIGHT, AllReduce, GradientSync
from meshwright.parallel.layout import RowLayout, ShardRecord, record_of


def install_gradient_sync(
    runtime: Runtime,
    model: nn.Module,
    optimizer: Optimizer | None,
    *,
    zero_stage: int,
    bucket_bytes: int,
) -> None:
    """Add the hooks that reduce gradients, and shard the optimizer's state if asked to.

    Args:
        runtime: filled in.
        model: its parameters carry records.
        optimizer: bound to those parameters.
        zero_stage: 0 to 3; on one data-parallel rank, 2 and 3 are 1. For 3 ``runtime.weights`` are attached.
        bucket_bytes: gradients communicate in buckets of this size.
    """
    tp, dp, meet = runtime.tp, runtime.dp, runtime.meet_over_dp

    # Backward finishes parameters roughly in the reverse of their order.
    trainable = [p for p in reversed(list(model.parameters())) if p.requires_grad]
    runtime.parameters = trainable
    runtime.zero = _zero(runtime, trainable, optimizer, zero_stage, bucket_bytes)
    if runtime.zero is not None:
        if optimizer is not None:
            shard_optimizer_state(optimizer, runtime.zero)
        buckets = [sharded.bucket for sharded in runtime.zero.sharded]
        # The buckets of stage 3 are whole layers: one on its way is enough to hide it.
        in_flight = IN_FLIGHT if runtime.weights is None else 1
        runtime.syncs.append(GradientSync(buckets, tp=tp, reduction=runtime.zero, meet=meet, in_flight=in_flight))
        sharded = {id(p) for p in runtime.zero.parameters}
        trainable = [p for p in trainable if id(p) not in sharded]
    # On one data-parallel rank, only partial gradients need anything done to them.
    reduced = [p for p in trainable if dp.size > 1 or record_of(p).is_grad_partial]
    unreduced = [p for p in trainable if dp.size == 1 and not record_of(p).is_grad_partial]
    buckets = make_buckets(reduced, max_bytes=bucket_bytes, multiple=1, accumulate_in_float32=False)
    if trainable:
        runtime.syncs.append(GradientSync(buckets, tp=tp, reduction=AllReduce(dp), unreduced=unreduced, meet=meet))
    if optimizer is not None:
        runtime.has_optimizer = True
        optimizer.register_step_pre_hook(runtime.check_synced)
        if runtime.comparison is not None:
            runtime.comparison.watch(optimizer)
        if runtime.zero is not None and runtime.weights is None:
            # Publishing the stepped weights is a collective: one rank that leaves it out would be waited for in vain.
            optimizer.register_step_pre_hook(runtime.meet_before_publishing)
        attach(optimizer, runtime)


def leave_gradients_to_engine(runtime: Runtime, model: nn.Module) -> None:
    """Do what only the runtime can: an engine that sees one rank's parameters knows nothing of their copies over tp."""
    runtime.parameters = [p for p in model.parameters() if p.requires_grad]
    sum_copies_in_backward(runtime.parameters, runtime.tp)


def _zero(
    runtime: Runtime, trainable: list[nn.Parameter], optimizer: Optimizer | None, stage: int, bucket_bytes: int
) -> ReduceScatter | None:
    """The reduction of a stage, over the trainable parameters in the order in which backward finishes them."""
    dp = runtime.dp
    if runtime.weights is not None:
        return ReduceScatter(runtime.weights.sharded_buckets(), dp, can_wait=False)
    stage = stage if dp.size > 1 else min(stage, 1)
    if stage == 0 or (stage == 1 and optimizer is None):
        return None
    groups = []
    if optimizer is not None:
        groups = [[p for p in reversed(group["params"]) if p.requires_grad] for group in optimizer.param_groups]
    if stage > 1:  # the optimizer need not step all: of the others too, each rank keeps its share of the gradients
        stepped = {id(p) for group in groups for p in group}
        groups.append([p for p in trainable if id(p) not in stepped])
    return shard_whole_weights(groups, dp=dp, bucket_bytes=bucket_bytes, can_wait=stage == 1)


def shard_optimizer(
    optimizer: Optimizer,
    *,
    mesh: ProcessMesh | DeviceMesh | None = None,
    stage: int = 1,
    axis: str = "dp",
    bucket_size_mb: float = 25.0,
) -> Optimizer:
    """Shard an optimizer's state over the data-parallel axis of a mesh (ZeRO), in place.

    For a program that is data-parallel by itself: the parameters are whole and equal on every rank,
    and each rank's loss is the mean over its own rows. Gradients are averaged over the axis during
    backward. ``to_distributed`` does this (and more) with ``ParallelPlan.zero_stage``.

    Parameters that ``shard_tensor`` placed are DTensors, whose state torch makes with the same placements: without a
    mesh, the optimizer over them is returned as it is.

    Args:
        optimizer: elementwise (AdamW, SGD, ...), over parameters that are whole on every rank.
        mesh: a ProcessMesh or DeviceMesh with the axis; every rank of the world makes the call. None for parameters
            that are DTensors.
        stage: 1; or 2, which keeps no whole gradients under ``no_sync``. Stage 3 needs ``to_distributed``.
        axis: the name of the data-parallel axis.
        bucket_size_mb: gradients communicate in buckets of this size.

    Returns:
        The same optimizer object.

    Raises:
        PlanError: for a missing mesh or axis, or another stage.
        OptimizerMismatchError: for an optimizer whose update is not elementwise.

    Example::

        optimizer = mw.shard_optimizer(optimizer, mesh=mw.ProcessMesh([0, 1], ["dp"]), stage=1)
    """
    if stage == 3:
        raise PlanError(
            "shard_optimizer(stage=3) would shard the parameters, but knows no model whose layers could gather them; "
            "use stage=2, or ParallelPlan(zero_stage=3) in to_distributed"
        )
    if stage not in (1, 2):
        raise PlanError(f"shard_optimizer(stage={stage!r}) must be 1 or 2")
    if not isinstance(optimizer, Optimizer):
        raise PlanError(f"shard_optimizer takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not parameters:
        raise PlanError("shard_optimizer got an optimizer without parameters")
    if placed := [p for p in parameters if isinstance(p, DTensor)]:
        if mesh is not None:
            raise PlanError(
                f"{len(placed)} of {len(parameters)} parameters are DTensors, whose state is placed as they are; leave "
                "mesh out: shard_optimizer(optimizer)"
            )
        return optimizer
    check_elementwise(optimizer, is_trusted=False)
    if any(hasattr(p, "meshwright") for p in parameters):
        raise PlanError("these parameters are distributed already; use ParallelPlan.zero_stage in to_distributed")
    dp = _axis_of(mesh, axis, parameters[0].device.type)
    for index, parameter in enumerate(parameters):
        rows = RowLayout.replicated(parameter.shape[0] if parameter.ndim else 1, 1)
        parameter.meshwright = ShardRecord(str(index), parameter.shape, rows, 0, False)
    runtime = Runtime(tp=Axis("tp"), dp=dp, parameters=parameters)
    install_gradient_sync(
        runtime,
        nn.ParameterList(parameters),
        optimizer,
        zero_stage=stage,
        bucket_bytes=int(bucket_size_mb * 2**20),
    )
    return optimizer


def _axis_of(mesh: ProcessMesh | DeviceMesh | None, name: str, device_type: str) -> Axis:
    if mesh is None:
        raise PlanError("shard_optimizer needs mesh=..., with the axis over which to shard the state")
    names = mesh.dim_names if isinstance(mesh, ProcessMesh) else mesh.mesh_dim_names or ()
    if name not in names:
        raise PlanError(f"the mesh has the axes {', '.join(names)}, but no {name!r}; pass axis=...")
    ranks = mesh.ranks if isinstance(mesh, ProcessMesh) else mesh.mesh.flatten().tolist()
    if outside := sorted(set(range(world_size())) - set(ranks)):
        # On every rank, in the mesh or not: those inside would wait for the others at the first collective.
        raise PlanError(f"rank(s) {', '.join(map(str, outside))} of {world_size()} are in no part of the mesh:\n{mesh}")
    device_mesh = mesh.to_device_mesh(device_type) if isinstance(mesh, ProcessMesh) else mesh
    sub = device_mesh[name]
    return Axis(name, size=sub.size(), rank=sub.get_local_rank(), group=sub.get_group())
