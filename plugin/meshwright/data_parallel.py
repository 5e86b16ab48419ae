"""``DataParallel`` wraps a module and averages its gradients over the ranks while backward runs.

It uses GradientSync, as ``to_distributed`` does. It does not use torch's DistributedDataParallel (2.13):

- If the loss does not use a parameter, DDP leaves the parameter's whole bucket local, on every rank and without an
  error. The optimizer steps, the replicas drift apart, and only the next forward pass raises.
- DDP sends its small bucket first, or ``bucket_cap_mb_list`` sets the sizes from the first bucket on. The size of the
  last bucket, whose communication backward does not hide, cannot be limited.
- DDP's collectives start in C++ and bypass ``parallel/collectives.py``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from meshwright.faults.collective_log import set_timeout
from meshwright.faults.guard import Guard, active_guard, start_guard
from meshwright.layout.tensor_layout import TensorLayout, layout_if_any
from meshwright.mesh.axes import Axis, Mesh
from meshwright.mesh.host import check_is_alone
from meshwright.mesh.process_group import start_process_group
from meshwright.mesh.process_mesh import ProcessMesh
from meshwright.optim.gradients import Gradients
from meshwright.optim.runtime import Runtime, attach, device_of, find_runtime, runtime_of
from meshwright.parallel.autograd_graph import tensors_in, unused_parameters
from meshwright.parallel.batch.mixed_rows import EMBEDDING, SET_OFF, refused_option
from meshwright.parallel.foreign_hooks import wrapper_of
from meshwright.parallel.gradients.buckets import Bucket, group_parameters, make_buckets
from meshwright.parallel.gradients.gradient_hooks import GradientHooks
from meshwright.parallel.gradients.sync import AllReduce, GradientSync
from meshwright.parallel.replicas.comparison import ReplicaComparison
from meshwright.parallel.replicas.replicate_model import (
    ModuleTensors,
    broadcast_tensors,
    check_agreement,
    describe_tensors,
)
from meshwright.parallel.tensor_parallel.float8 import float8_layers

logger = logging.getLogger(__name__)

MB = 2**20
FUSED_BYTES = 25 * MB
CHECK_EVERY = 50  # steps between two comparisons of the replicas' weights


class DataParallel(nn.Module):
    """Train a model on several ranks with different rows, and average the gradients over the ranks.

    The ranks start with the parameters and buffers of the group's first rank. Backward averages the gradients in
    buckets, starting with the last layers, while it computes the gradients of earlier layers. Forward does not
    communicate, so each rank keeps its own buffers, such as BatchNorm's statistics (see ``nn.SyncBatchNorm``).

    Parameters may be unused in a step, on some ranks or on all. A missing gradient counts as zero, and a parameter
    without a gradient on every rank keeps ``None``. If no parameter contributes to the loss of one rank, that rank runs
    no backward pass, and the other ranks wait for it.

    The wrapper forwards attribute access to the model, as in ``ddp.config``, and parameters keep their names without a
    prefix. A wrapper can be copied and pickled. Every rank must make or load the copy; its ``group`` has all ranks.

    Args:
        model: the model, with its weights, on this rank's device. Nothing else may have distributed it.
        strategy: a deprecated argument without effect; must be None.
        comm_buffer_size: the size of a gradient bucket, in MB.
        last_comm_buffer_size: the size in MB of the last bucket. It holds the first layers' gradients, and backward
            does not hide its communication.
        find_unused_parameters: whether to search the graph of each forward pass for unused parameters, so that the
            buckets behind an unused parameter do not wait for the end of backward. Gradients are correct either way.
        group: the ranks that share the batch; None for all. If no process group is initialised, one is made from the
            launcher's environment.
        timeout_s: the number of seconds that a rank may keep the others waiting before all ranks end with an error that
            names the late rank.
        layers: another name for ``model``.

    Raises:
        ValueError: on every rank, if the model cannot be wrapped or differs between ranks.

    Example::

        ddp = mw.DataParallel(model)
        for i, (x, y) in enumerate(rows_of_this_rank):
            with contextlib.nullcontext() if i % 4 == 3 else ddp.no_sync():
                (loss_fn(ddp(x), y) / 4).backward()
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    """

    module: nn.Module

    def __init__(
        self,
        model: nn.Module | None = None,
        strategy: None = None,
        comm_buffer_size: float = 25,
        last_comm_buffer_size: float = 1,
        find_unused_parameters: bool = False,
        *,
        group: ProcessGroup | None = None,
        timeout_s: float = 120.0,
        layers: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if model is not None and layers is not None:
            raise ValueError("DataParallel got both model= and layers=, which mean the same; write DataParallel(model)")
        model = layers if model is None else model
        if not isinstance(model, nn.Module):
            raise ValueError(f"DataParallel takes a torch.nn.Module, not {type(model).__name__}")
        sizes = {"comm_buffer_size": comm_buffer_size, "last_comm_buffer_size": last_comm_buffer_size}
        if not timeout_s > 0:
            raise ValueError(f"DataParallel(timeout_s={timeout_s!r}): a time in seconds must be above 0")
        axis = _join(group, device_of(model), timeout_s)
        guard = _guard_of(axis, timeout_s)
        problem = _problem_of_arguments(strategy, sizes) or _problem_of_model(model)
        arguments = f"DataParallel(..., {comm_buffer_size=}, {last_comm_buffer_size=}, {find_unused_parameters=})"
        check_agreement(problem, [] if problem else [arguments, *describe_tensors(model)], axis)

        self.module = model
        self.find_unused_parameters = find_unused_parameters
        self._options = {**sizes, "find_unused_parameters": find_unused_parameters, "timeout_s": timeout_s}
        self._frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        # Backward finishes parameters roughly in the reverse of their order.
        self._trainable = [p for p in reversed(list(model.parameters())) if p.requires_grad]
        for name, parameter in model.named_parameters():
            parameter.meshwright = TensorLayout(shape=parameter.shape, name=name)  # type: ignore[attr-defined]
        runtime = Runtime(mesh=Mesh(dp=axis), gradients=Gradients(self._trainable), guard=guard)
        self._sync: GradientSync | None = None
        if axis.size == 1:
            logger.warning("DataParallel has no effect in one process; launch more with torchrun --nproc-per-node N")
        else:
            broadcast_tensors([*model.parameters(), *model.buffers()], axis)
            if guard is not None:
                tensors = ModuleTensors(model, written_apart=True)
                runtime.comparison = ReplicaComparison(
                    model.named_parameters(),
                    mesh=runtime.mesh,
                    guard=guard,
                    every=CHECK_EVERY,
                    has_weights=True,
                    tensors=tensors,
                )
            buckets = make_buckets(
                self._trainable,
                max_bytes=int(comm_buffer_size * MB),
                last_bytes=int(last_comm_buffer_size * MB),
                accumulate_in_float32=False,
            )
            hooks = runtime.gradients.hooks = GradientHooks(runtime.mesh, model.parameters())
            if runtime.comparison is not None:
                runtime.comparison.hooks = hooks
            meet = functools.partial(runtime.meet_over, axis)
            self._sync = GradientSync(buckets, tp=Axis("tp"), reduction=AllReduce(axis), hooks=hooks, meet=meet)
        syncs = runtime.gradients.syncs = [] if self._sync is None else [self._sync]
        # The model keeps the syncs alive, so that gradients are averaged even if only the model is kept.
        object.__setattr__(model, "_meshwright_syncs", syncs)
        attach(self, runtime)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model and return its output.

        Raises:
            ValueError: if a parameter was frozen when the model was wrapped and is trainable now.
        """
        if self._sync is None:
            return self.module(*args, **kwargs)
        if thawed := [name for name, p in self._frozen if p.requires_grad]:
            raise ValueError(
                f"{', '.join(thawed)}: frozen when DataParallel was made but trainable now, so nothing would average "
                "the gradients; set requires_grad before DataParallel(model). (Freezing later is fine.)"
            )
        guard = runtime_of(self).guard
        if guard is not None and self.training and torch.is_grad_enabled():
            guard.begin_step(runtime_of(self).mesh.tokens.group)
        output = self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            tensors = [t for t in tensors_in(output) if t.grad_fn is not None]
            for tensor in tensors:
                tensor.register_hook(lambda _, sync=self._sync: sync.begin())
            if self.find_unused_parameters:
                self._sync.expect_none(unused_parameters(tensors, self._trainable))
        return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally inside the block; the first backward pass after it averages over the ranks."""
        with contextlib.nullcontext() if self._sync is None else self._sync.no_sync():
            yield

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's state dict, with the names of the unwrapped model."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state dict with the names of the unwrapped model; every rank must load the same values."""
        return self.module.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the model's parameters, with their names in the unwrapped model."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's buffers, with their names in the unwrapped model."""
        return self.module.named_buffers(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def __reduce_ex__(self, protocol: object) -> Any:
        # As with torch's DDP, a copy or the result of torch.load is wrapped again, over all ranks.
        size, world = runtime_of(self).mesh.tokens.size, dist.get_world_size() if dist.is_initialized() else 1
        if size not in (1, world):
            raise ValueError(
                f"this DataParallel is on {size} of {world} ranks, but a copy would be on all of them; copy "
                "ddp.module, and wrap the copy: DataParallel(copied, group=group)"
            )
        return _wrapped_anew, (self.module, self._options)

    def _apply(self, *args: object, **kwargs: object) -> Any:
        result = super()._apply(*args, **kwargs)
        for bucket in [] if self._sync is None else self._sync.buckets:
            bucket.dtype = bucket.parameters[0].dtype  # after .half() and the like
        return result


def _wrapped_anew(model: nn.Module, options: dict[str, Any]) -> DataParallel:
    for parameter in model.parameters():
        vars(parameter).pop("meshwright", None)  # the copied wrapper's layout
    return DataParallel(model, **options)


def fused_allreduce_gradients(params: Iterable[Tensor], mesh: ProcessMesh | DeviceMesh | None = None) -> None:
    """Average gradients that were accumulated under ``no_sync`` over the ranks of a mesh.

    A gradient that only some ranks have counts as zero on the others. A gradient that no rank has stays None.

    Args:
        params: the parameters, the same on every rank and in the same order.
        mesh: the ranks to average over; None for all. A ProcessMesh must hold all ranks. For fewer ranks pass a
            DeviceMesh, whose process groups are made once instead of in each step.

    Raises:
        ValueError: if a parameter is a shard, a gradient is sparse, the mesh lacks this rank, or a ProcessMesh
            holds only some of the ranks.

    Example::

        with ddp.no_sync():
            loss_fn(ddp(x), y).backward()
        mw.fused_allreduce_gradients(ddp.parameters())
        optimizer.step()
    """
    parameters = [p for p in params if p.requires_grad]
    for index, parameter in enumerate(parameters):
        layout = layout_if_any(parameter)
        if layout is not None and (layout.is_sharded or layout.has_addends):
            raise ValueError(f"{layout.name} is sharded, so its gradient differs between ranks; use meshwright.no_sync")
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise ValueError(f"parameter {index} of params has a sparse gradient; use nn.Embedding(sparse=False)")
    for axis in _axes(mesh):
        reduction = AllReduce(axis)
        for group in group_parameters(parameters, FUSED_BYTES):  # type: ignore[arg-type]
            bucket = Bucket(group, group[0].dtype)
            reduction.start(bucket, reduction.take(bucket))()


def _axes(mesh: ProcessMesh | DeviceMesh | None) -> list[Axis]:
    """Return axes over which successive means give the mean over the mesh."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    size = world if mesh is None else mesh.size if isinstance(mesh, ProcessMesh) else mesh.size()
    if size == world:
        return [Axis("dp", size, dist.get_rank(), dist.group.WORLD)] if size > 1 else []
    if isinstance(mesh, ProcessMesh):
        raise ValueError(
            f"a ProcessMesh of {size} of {world} ranks has no process groups; make them once with "
            f"mesh.to_device_mesh(device_type) and pass the result:\n{mesh}"
        )
    assert mesh is not None
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not in the mesh {mesh}; call this on the mesh's ranks only")
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    return [Axis("dp", group.size(), group.rank(), group) for group in groups]


def _join(group: ProcessGroup | None, device: torch.device, timeout_s: float) -> Axis:
    """Return the axis of the ranks that share the batch, with this rank's place on it."""
    if group is None:
        check_is_alone()
        start_process_group(device, timeout_s)
        if not dist.is_initialized():
            return Axis("dp")
        group = dist.group.WORLD
    assert group is not None
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in group; make DataParallel on the group's ranks only")
    return Axis("dp", dist.get_world_size(group), rank, group)


def _guard_of(axis: Axis, timeout_s: float) -> Guard | None:
    """Return this process's guard, and start it first if the axis has all ranks; None if there is no guard."""
    if axis.size > 1 and axis.size == dist.get_world_size():
        return start_guard(timeout=timeout_s, coordinates=f"dp={axis.rank}")
    if axis.group is not None:
        set_timeout(axis.group, timeout_s)
    return active_guard()


def _problem_of_arguments(strategy: object, sizes: dict[str, Any]) -> str | None:
    if strategy is not None:
        return f"DataParallel(strategy={strategy!r}): strategy is deprecated and has no effect; leave it out"
    for name, size in sizes.items():
        if not isinstance(size, (int, float)) or isinstance(size, bool) or not 0 < size < float("inf"):
            return f"DataParallel({name}={size!r}): a size in MB must be a number above 0"
    return None


def _problem_of_model(model: nn.Module) -> str | None:
    """Return why a model cannot be wrapped, or None."""
    for name, module in model.named_modules():
        if wrapper := wrapper_of(module):
            return f"{name or 'the model'} is wrapped by {wrapper} already; pass the plain module"
    if found := refused_option(model):
        return f"{EMBEDDING}. {SET_OFF}".format(**found)
    if layer := next((name for name, _ in float8_layers(model)), None):
        return f"{layer} is a float8 layer, whose scale is of the tokens of all ranks; use mw.to_distributed(model)"
    if find_runtime(model) is not None:
        return "the model was distributed by to_distributed, which synchronises its gradients already"
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        if hasattr(tensor, "meshwright"):
            return f"{name} is in a DataParallel already, or sharded by an earlier call; build a new model"
        if hasattr(tensor, "placements"):
            return f"{name} is a DTensor: the model was sharded by something else"
        if nn.parameter.is_lazy(tensor):
            return f"{name} has no shape yet; run a forward pass before DataParallel(model)"
        if tensor.is_meta:
            return f"{name} is on the meta device; give the model its weights before DataParallel(model)"
    if not any(p.requires_grad for p in model.parameters()):
        return f"{type(model).__name__} has no trainable parameter; there is no gradient to average"
    devices = {tensor.device: name for name, tensor in tensors}
    if len(devices) > 1:
        where = ", ".join(f"{name} on {device}" for device, name in devices.items())
        return f"a process drives one device, but the model is on {len(devices)}: {where}"
    return None
