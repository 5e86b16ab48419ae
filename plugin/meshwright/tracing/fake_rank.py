"""Installs a plan on one rank of a fake world, with fake tensors, so that its steps run without values.

The world is a fake process group of any size in one process.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import Optimizer

from meshwright.construct.initial_weights import NewTensors, tensors_beside_parameters
from meshwright.distribute import installation
from meshwright.distribute.decide import build_on_fake_rank
from meshwright.faults.guard import Guard
from meshwright.features import splits
from meshwright.layout.packed_weights import Attribute
from meshwright.layout.tensor_layout import TensorLayout
from meshwright.mesh.axes import Mesh
from meshwright.optim.runtime import Runtime
from meshwright.parallel.batch.document_rows import Documents
from meshwright.parallel.losses import cross_entropy
from meshwright.parallel.method_chain import find_step
from meshwright.parallel.tensor_parallel.apply import Keep, make_shards
from meshwright.pipeline.pipeline_forward import PipelineForward
from meshwright.plan.config import ParallelPlan, ToDistributedConfig

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


def foresee(model: nn.Module, ids: Tensor, *, hidden: torch.dtype) -> None:
    """Tell the stages of a pipeline what they will receive, since no rank sends it."""
    for module in model.modules():  # adapters wrap the decoder
        if (step := find_step(module, PipelineForward)) is not None:
            step.foresee({"input_ids": ids}, hidden=hidden, loss=torch.float32)


def install(
    model: Any,
    plan: ParallelPlan,
    make_optimizer: OptimizerFactory,
    fake: FakeTensorMode,
    *,
    config: ToDistributedConfig | None = None,
    device: str = "cpu",
    guard: Guard | None = None,
) -> tuple[Runtime, Optimizer]:
    """Turn a model on the meta device into the model of one rank of the plan, with fake weights on a device.

    Args:
        model: the model, which is changed.
        plan: the plan.
        make_optimizer: a function that makes the optimizer from the model's parameters.
        fake: the mode of the fake tensors.
        config: the options of ``to_distributed``.
        device: the device of the weights.
        guard: stands in for the guard; None to leave out what the ranks compare.
    """
    optimizer = make_optimizer(model.parameters())

    def empty_shard(parameter: nn.Parameter, layout: TensorLayout) -> Tensor:
        with fake:
            return torch.empty(layout.local_shape, dtype=parameter.dtype, device=device)

    def make(
        model: nn.Module, layouts: Mapping[str, TensorLayout], mesh: Mesh, to: torch.device, keep: Keep = lambda _, x: x
    ) -> NewTensors:
        return NewTensors(make_shards(model, layouts, mesh, to, empty_shard, keep), _empty_buffers(model, fake, to))

    build = build_on_fake_rank(model, plan, config=config, device=device, guard=guard)
    with fake:
        made = installation.make_weights(build, make)
    made.attach(model)
    with fake:
        installation.install(build, optimizer, seed=0)
    return build.runtime, optimizer


def _empty_buffers(model: nn.Module, fake: FakeTensorMode, device: torch.device) -> list[Attribute]:
    found = [x for x in tensors_beside_parameters(model) if x[2].is_meta]
    with fake:
        return [(owner, name, torch.empty(x.shape, dtype=x.dtype, device=device)) for owner, name, x in found]


@contextlib.contextmanager
def traceable(*, has_equal: bool = False) -> Iterator[None]:
    """Patch code that fake tensors do not support: subclasses that guard reads, and loops over cache-sized pieces.

    Args:
        has_equal: whether ``torch.equal`` runs and gets its result from elsewhere; otherwise it returns True.
    """
    as_subclass = Tensor.as_subclass

    def keep_fake(tensor: Tensor, kind: type[Tensor]) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else as_subclass(tensor, kind)

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(Tensor, "as_subclass", keep_fake))
        patches.enter_context(mock.patch.object(cross_entropy, "_CACHE_BYTES", 2**60))
        patches.enter_context(mock.patch.object(splits, "set_timeouts", lambda _: None))
        # ZeRO checks whether the program wrote into half-precision weights, which does not happen here.
        if not has_equal:
            patches.enter_context(mock.patch.object(torch, "equal", lambda *_: True))
        # transformers checks for packed rows, which fake positions cannot show, and builds a mask if in doubt.
        masking = sys.modules.get("transformers.masking_utils")
        if hasattr(masking, "find_packed_sequence_indices"):
            patches.enter_context(mock.patch.object(masking, "find_packed_sequence_indices", lambda *_: None))
        patches.enter_context(mock.patch.object(Documents, "of", lambda batch: None))
        yield


@contextlib.contextmanager
def fake_world(world_size: int, rank: int) -> Iterator[None]:
    """Open a fake process group inside the context; its collectives send nothing."""
    if dist.is_initialized():
        raise ValueError("this process is already in a process group; trace or check a plan in a process of its own")
    if world_size == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
