"""Attaches gradient reduction to a model, and ZeRO to its optimizer.

Schedule-free optimizers keep other weights for evaluation than for training, and have ``train()`` and ``eval()`` for
it; what these write reaches the model. Under a GradScaler every rank finds the infinite gradients of all ranks, so that
all of them skip the same steps.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshwright.errors import PlanError
from meshwright.faults.guard import start_guard
from meshwright.faults.memory_digest import value_digest
from meshwright.faults.together import Claim, agreed
from meshwright.layout.tensor_layout import TensorLayout
from meshwright.mesh.axes import Axis, Mesh
from meshwright.mesh.process_group import ensure_process_group, world_size
from meshwright.mesh.process_mesh import ProcessMesh
from meshwright.optim.chained import ChainedOptimizer, chain_of, members, step_name, stepping
from meshwright.optim.elementwise import check_elementwise
from meshwright.optim.gradients import Gradients
from meshwright.optim.offload import HostSteps
from meshwright.optim.runtime import Runtime, attach, find_runtime, live_runtimes
from meshwright.optim.state_dicts import guard_optimizer
from meshwright.optim.steps import StepHooks
from meshwright.optim.trained_parameters import FixedParameters, TrainedParameters
from meshwright.optim.whole_steps import WholeSteps
from meshwright.optim.zero.sliced_optimizer import LentSlices, hook_optimizer
from meshwright.parallel.collectives import maximum
from meshwright.parallel.gradients.summed import LossScale, sum_copies_in_backward
from meshwright.parallel.replicas.comparison import ReplicaComparison
from meshwright.parallel.shards.partial_gradients import StepWindow
from meshwright.parallel.shards.stand_in import reading_shards
from meshwright.plan.parts import BUCKET_MB

Found = dict[torch.device, Tensor]  # a number for each device of gradients: not 0 if some are infinite or NaN


def install_gradient_sync(
    runtime: Runtime,
    parameters: Sequence[nn.Parameter],
    optimizer: Optimizer | None,
    *,
    zero_stage: int,
    bucket_bytes: int,
    whole_groups: Sequence[int] = (),
) -> None:
    """Add the hooks that reduce gradients, and shard the optimizer's state if ``zero_stage`` is not 0.

    Args:
        runtime: the model's runtime, which this call fills in.
        parameters: the parameters of the model, which have layouts.
        optimizer: the optimizer of the model's parameters, if any.
        zero_stage: the ZeRO stage, 0 to 3. On one data-parallel rank, stages 2 and 3 act as stage 1. For stage 3,
            ``runtime.weights`` must be attached.
        bucket_bytes: size of the buckets in which gradients are reduced.
        whole_groups: the indices of the optimizer's groups whose parameters are stepped whole.
    """
    gradients = runtime.gradients
    share_overflow()
    gradients.bucket_bytes = bucket_bytes
    gradients.syncs.clear()  # hooks of an earlier call refer to these weakly, and then do nothing
    on_host = runtime.plan is not None and runtime.plan.offload is not None
    whole = None
    if optimizer and whole_groups:
        whole = WholeSteps(optimizer, whole_groups, runtime.mesh, gradients, on_host=on_host)
    trained = TrainedParameters(parameters, optimizer, runtime, zero_stage=zero_stage, bucket_bytes=bucket_bytes)
    gradients.trained, gradients.parameters, gradients.zero = trained, trained.parameters, trained.zero
    gradients.hooks = trained.hooks
    if runtime.comparison is not None:
        runtime.comparison.hooks = trained.hooks
        trained.hooks.losses = runtime.loss_gradients
    if optimizer is not None:
        gradients.has_optimizer = True
        hooks = StepHooks(optimizer, is_inside=len(whole_groups) == len(optimizer.param_groups))
        optimizer.register_step_pre_hook(gradients.check_synced)
        if runtime.comparison is not None:
            stepped = gradients.stepped if zero_stage > 0 or whole is not None else None
            runtime.comparison.watch(optimizer, stepped=stepped, stepping=lambda: stepping(optimizer))
        # Sending parameters to be stepped, or publishing stepped ones, is a collective, which hangs if a rank does not
        # step.
        host = HostSteps(optimizer, gradients.zero, whole_groups) if gradients.zero is not None and on_host else None
        if whole is not None:
            optimizer.register_step_pre_hook(lambda *_: runtime.meet_all(step_name(optimizer)))
            whole.hook_end()
        elif gradients.zero is not None and runtime.weights is None:
            optimizer.register_step_pre_hook(runtime.meet_before_publishing)
        if host is not None:
            host.hook_end()
        ends: list[Callable[[], object]] = []
        if gradients.zero is not None:
            ends.append(hook_optimizer(optimizer, gradients.zero))
        if host is not None:
            host.hook_begin()
            ends.insert(0, host.take_back)
        if whole is not None:
            whole.hook_begin()
            gradients.whole = whole
            ends.insert(0, whole.abandon)
        if runtime.weights is not None:
            optimizer.register_step_post_hook(runtime.weights.release)
        window = StepWindow()
        window.over(optimizer)
        hooks.surround([window.close, *ends])
        if runtime.spreads_gradients:
            hooks.arrange()
        if isinstance(optimizer, ChainedOptimizer):
            optimizer.step_together()
        for each in {optimizer, *members(optimizer)}:
            attach(each, runtime)
            follow_modes(each, runtime, host)
        guard_optimizer(optimizer, runtime)


def leave_gradients_to_engine(runtime: Runtime, parameters: Sequence[nn.Parameter]) -> None:
    """Sum partial gradients over tp, since an engine does not, and leave all other gradient work to the engine."""
    runtime.gradients.parameters = [p for p in parameters if p.requires_grad]
    sum_copies_in_backward(runtime.gradients.parameters, runtime.mesh.tp)
    assert runtime.engine is not None
    runtime.gradients.trained = FixedParameters(parameters, runtime.engine)


def shard_optimizer(
    optimizer: Optimizer,
    *,
    mesh: ProcessMesh | DeviceMesh | None = None,
    stage: int = 1,
    axis: str = "dp",
    bucket_size_mb: float = BUCKET_MB,
    timeout_s: float = 120.0,
) -> Optimizer:
    """Shard an optimizer's state over the data-parallel axis of a mesh (ZeRO), in place.

    Use this function in a program that does its own data parallelism: the parameters are whole and equal on every
    rank, and each rank's loss is the mean over its own rows. Gradients are averaged over the axis during
    backward. ``to_distributed`` does this (and more) with ``ParallelPlan.zero_stage``.

    Parameters that ``shard_tensor`` placed are DTensors, and torch gives their state the same placements. For these
    parameters call the function without a mesh. The optimizer is then returned unchanged.

    Args:
        optimizer: an elementwise optimizer (AdamW, SGD, ...) of parameters that are whole on every rank.
        mesh: the ProcessMesh or DeviceMesh that has the axis; None for parameters that are DTensors, or for an axis of
            all ranks, whose parameters are then compared. Every rank of the world must make the call.
        stage: the ZeRO stage: 1, or 2, which keeps no whole gradients under ``no_sync``. Stage 3 needs
            ``to_distributed``.
        axis: name of the data-parallel axis.
        bucket_size_mb: size in MiB of the buckets in which gradients are reduced.
        timeout_s: the number of seconds that a rank may keep the others waiting before all ranks end with an error that
            names the late rank.

    Returns:
        The same optimizer object. Ranks that step it differently, or with other settings, end with a DivergenceError.

    Raises:
        PlanError: if the axis is missing, or the stage is not 1 or 2.
        OptimizerMismatchError: if the optimizer's update is not elementwise.
        ValueError: without a mesh, if the parameters of two ranks differ.

    Example::

        optimizer = mw.shard_optimizer(optimizer, mesh=mw.ProcessMesh([0, 1], ["dp"]), stage=1)
    """
    if stage == 3:
        raise PlanError(
            "shard_optimizer(stage=3) would shard the parameters, but it has no model whose layers could gather them. "
            "Use stage=2, or to_distributed with ParallelPlan(zero_stage=3)"
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
                f"{len(placed)} of {len(parameters)} parameters are DTensors, whose state has the same placements; "
                "leave mesh out: shard_optimizer(optimizer)"
            )
        return optimizer
    check_elementwise(optimizer, is_trusted=False)
    if any(hasattr(p, "meshwright") for p in parameters):
        raise PlanError("these parameters are distributed already; use ParallelPlan.zero_stage in to_distributed")
    ensure_process_group()
    dp = _axis_of(_mesh_of_all(parameters, axis) if mesh is None else mesh, axis, parameters[0].device.type)
    guard = start_guard(timeout=timeout_s)  # which watches the ranks of the mesh, since they are all
    runtime = Runtime(mesh=Mesh(dp=dp), gradients=Gradients(parameters), guard=guard)
    for index, parameter in enumerate(parameters):
        parameter.meshwright = TensorLayout(shape=parameter.shape).placed(str(index), runtime.mesh)
    if guard is not None:
        # No forward pass of ours counts steps, so what is compared at each meeting is all.
        named = [(str(index), parameter) for index, parameter in enumerate(parameters)]
        runtime.comparison = ReplicaComparison(named, mesh=runtime.mesh, guard=guard, every=0, has_weights=True)
    install_gradient_sync(runtime, parameters, optimizer, zero_stage=stage, bucket_bytes=int(bucket_size_mb * 2**20))
    return optimizer


def _mesh_of_all(parameters: Sequence[nn.Parameter], axis: str) -> ProcessMesh:
    """Return a mesh whose only axis has all ranks, after they have compared the parameters.

    Raises:
        ValueError: if the parameters differ, so that the ranks would train the mean of different models.
    """
    digests = {f"values of parameter {i} {tuple(p.shape)}": f"{value_digest(p):016x}" for i, p in enumerate(parameters)}
    agreed(lambda: Claim(None, {"call": "shard_optimizer without mesh=", **digests}))
    return ProcessMesh(range(world_size()), [axis])


def _axis_of(mesh: ProcessMesh | DeviceMesh, name: str, device_type: str) -> Axis:
    names = mesh.dim_names if isinstance(mesh, ProcessMesh) else mesh.mesh_dim_names or ()
    if name not in names:
        raise PlanError(f"the mesh has the axes {', '.join(names)}, but no {name!r}; pass axis=...")
    ranks = mesh.ranks if isinstance(mesh, ProcessMesh) else mesh.mesh.flatten().tolist()
    if outside := sorted(set(range(world_size())) - set(ranks)):
        # Every rank raises, since the ranks in the mesh would wait for the others at the first collective.
        raise PlanError(f"rank(s) {', '.join(map(str, outside))} of {world_size()} are not in the mesh:\n{mesh}")
    device_mesh = mesh.to_device_mesh(device_type) if isinstance(mesh, ProcessMesh) else mesh
    sub = device_mesh[name]
    return Axis(name, size=sub.size(), rank=sub.get_local_rank(), group=sub.get_group())


def follow_modes(optimizer: Optimizer, runtime: Runtime, host: HostSteps | None = None) -> None:
    """Let what an optimizer's ``train()`` and ``eval()`` do to what it steps of the weights reach the model.

    Schedule-free optimizers have these methods. Every rank must call them.

    Args:
        optimizer: the optimizer.
        runtime: the runtime of its model.
        host: the steps on the host, if the plan offloads the optimizer.
    """
    for name in ("train", "eval"):
        if callable(method := getattr(optimizer, name, None)):
            setattr(optimizer, name, functools.partial(_switch, method, optimizer, runtime, host))


def _switch(method: Callable[[], object], optimizer: Optimizer, runtime: Runtime, host: HostSteps | None) -> None:
    zero, window = runtime.gradients.zero, StepWindow()
    runtime.meet_all("optimizer.train() or eval()")
    with contextlib.ExitStack() as stack:
        if zero is not None:
            zero.take_over()
            stack.enter_context(LentSlices(chain_of(optimizer), zero))
        if host is not None:
            host.lend()
            stack.callback(host.return_all)
        if (whole := runtime.gradients.whole) is not None:
            whole.open()
            stack.callback(whole.close)
        window.open(optimizer)
        stack.callback(window.close)
        method()
    if zero is not None:
        zero.publish()


def share_overflow() -> None:
    """Make the scalers of this process look at the gradients of all ranks, where ranks have different gradients.

    A scaler has no hook between its search for infinite gradients and its decision, so a method of its class is
    replaced. For optimizers of models that are not distributed the method is torch's.
    """
    original: Any = GradScaler._unscale_grads_
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def _unscale_grads_(
        self: GradScaler, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> Found:
        runtimes = _runtimes(optimizer)
        for runtime in runtimes:
            runtime.gradients.settle()
            if (scale := runtime.features.find(LossScale)) is not None:
                scale.follow(self)
        with contextlib.ExitStack() as stack:
            stack.enter_context(reading_shards())
            if find_runtime(optimizer) is not None and (zero := runtimes[0].gradients.zero) is not None:
                stack.enter_context(LentSlices(chain_of(optimizer), zero))
            found: Found = original(self, optimizer, inv_scale, found_inf, allow_fp16)
        for runtime in runtimes:
            found = _of_all_ranks(found, found_inf, runtime)
        return found

    GradScaler._unscale_grads_ = _unscale_grads_  # type: ignore[method-assign]


def _runtimes(optimizer: Optimizer) -> list[Runtime]:
    """Return the runtimes of the models that an optimizer steps, whether it was passed to the call or not."""
    if (own := find_runtime(optimizer)) is not None:
        return [own]
    return [runtime for runtime in live_runtimes() if runtime.gradients.are_stepped_by(optimizer)]


def _of_all_ranks(found: Found, none: Tensor, runtime: Runtime) -> Found:
    """Return what any rank has found.

    Args:
        found: what this rank has found.
        none: what a rank has found that has no gradients.
        runtime: the runtime of the model that has the gradients.
    """
    if not runtime.spreads_gradients:
        return found
    runtime.meet_all("GradScaler.unscale_")
    devices = list(found) or [none.device]
    total = none.clone()
    for each in found.values():
        total += each.to(total.device)
    for axis in runtime.mesh.factors.values():
        total = maximum(total, axis)
    return {device: total.to(device) for device in devices}
