"""Traces a training step on one rank of a fake world of any size, with fake tensors, in one process.

Nothing is computed or sent, but every operation and every collective of the real runtime runs, so memory and traffic
are measured instead of estimated. A laptop can trace one rank of thousands.

The collectives of a step and their bytes are counted for each mesh axis, where torch dispatches them.

The world is a fake process group of any size in one process.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.construct.initial_weights import NewTensors, tensors_beside_parameters
from meshwright.distribute import installation
from meshwright.distribute.decide import build_on_fake_rank
from meshwright.facts import Facts
from meshwright.faults.guard import Guard
from meshwright.features import splits
from meshwright.layout.packed_weights import Attribute
from meshwright.layout.tensor_layout import TensorLayout
from meshwright.mesh.axes import Axis, Mesh
from meshwright.optim.runtime import Runtime
from meshwright.parallel.batch.document_rows import Documents
from meshwright.parallel.fake_passes.known_values import KnownValues
from meshwright.parallel.fake_passes.measured_shape import LiveBytes
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
        facts: Facts, layouts: Mapping[str, TensorLayout], mesh: Mesh, to: torch.device, keep: Keep = lambda _, x: x
    ) -> NewTensors:
        return NewTensors(make_shards(facts, layouts, mesh, to, empty_shard, keep), _empty_buffers(facts, fake, to))

    build = build_on_fake_rank(model, plan, config=config, device=device, guard=guard)
    with fake:
        made = installation.make_weights(build, make)
    made.attach(build.facts)
    with fake:
        installation.install(build, optimizer, seed=0)
    return build.runtime, optimizer


def _empty_buffers(facts: Facts, fake: FakeTensorMode, device: torch.device) -> list[Attribute]:
    found = [x for x in tensors_beside_parameters(facts) if x[2].is_meta]
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


KINDS = {
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "alltoall_base_": "all-to-all",
    "broadcast_": "broadcast",
    "send": "send",
}


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The memory and the collectives of one rank in a step; sizes are in bytes.

    Args:
        parameters: the parameters and buffers.
        activations: the tensors that forward leaves for backward.
        gradients: the gradients after backward.
        optimizer: the optimizer's state after the first step.
        peaks: the peak of all live tensors in forward, backward and the optimizer's step.
        traffic: the collectives by phase and axis.
    """

    parameters: int
    activations: int
    gradients: int
    optimizer: int
    peaks: dict[str, int]
    traffic: dict[str, dict[str, Traffic]]

    @property
    def peak(self) -> int:
        return max(self.peaks.values())


def trace_step(
    model: nn.Module,
    plan: ParallelPlan,
    *,
    rows: int,
    length: int,
    make_optimizer: OptimizerFactory = torch.optim.AdamW,
    rank: int = 0,
    config: ToDistributedConfig | None = None,
    batch: Mapping[str, object] | None = None,
) -> Trace:
    """Trace the second training step of one rank, when the optimizer has its state.

    Args:
        model: a causal LM on the meta device; the call shards it.
        plan: the plan, of any size.
        rows: the number of rows per step on this rank.
        length: the number of tokens per row.
        make_optimizer: a function that makes the optimizer from the model's parameters.
        rank: the rank of the plan to trace.
        config: the options of ``to_distributed``.
        batch: the arguments of the step on this rank, with values, such as images; by default tokens and labels.

    Raises:
        ValueError: if this process is already in a process group, or the model is not on the meta device.
        PlanError: if the model or this version cannot run the plan.

    Example:
        >>> with torch.device("meta"):  # doctest: +SKIP
        ...     model = LlamaForCausalLM(config)
        >>> plan = ParallelPlan(dp=128, tp=8, sequence_parallel=True, zero_stage=1)  # doctest: +SKIP
        >>> trace_step(model, plan, rows=1, length=8192).activations  # doctest: +SKIP
        3423600640
    """
    if not all(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("the model to trace is not on the meta device; build it under torch.device('meta')")
    with fake_world(plan.world_size, rank), traceable():
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        runtime, optimizer = install(model, plan, make_optimizer, fake, config=config)
        with fake:
            ids = torch.zeros(rows, length, dtype=torch.int64)
            foresee(model, ids, hidden=next(model.parameters()).dtype)
            if batch is None:
                return TracedStep(model, optimizer, runtime, {"input_ids": ids, "labels": ids}).trace()
            with KnownValues(batch) as known:
                return TracedStep(model, optimizer, runtime, known.batch).trace()


class TracedStep:
    """Measures the second training step of a distributed model by phase, with fake or real tensors."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, runtime: Runtime, batch: Mapping[str, object]):
        self.model, self.optimizer, self.runtime, self.batch = model, optimizer, runtime, batch
        self.peaks: dict[str, int] = {}
        self.traffic: dict[str, dict[str, Traffic]] = {}

    def trace(self) -> Trace:
        held = [*self.model.parameters(), *self.model.buffers()]
        held += [x for x in self.batch.values() if isinstance(x, Tensor)]
        if self.runtime.weights is not None:
            held += [flat.master for flat in self.runtime.weights.flats]
        with LiveBytes(held) as memory:
            parameters = memory.now
            self._run(memory)  # the first step makes the optimizer's state
            optimizer = memory.now - parameters
            before = memory.now
            with self._phase(memory, "forward"):
                loss = self.model(**self.batch).loss
            activations = memory.now - before
            with self._phase(memory, "backward"):
                loss.backward()
            del loss
            gradients = memory.now - before
            with self._phase(memory, "optimizer"):
                self.optimizer.step()
            return Trace(
                parameters=parameters,
                activations=activations,
                gradients=gradients,
                optimizer=optimizer,
                peaks=self.peaks,
                traffic=self.traffic,
            )

    def _run(self, memory: LiveBytes) -> None:
        self.model(**self.batch).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @contextlib.contextmanager
    def _phase(self, memory: LiveBytes, name: str) -> Iterator[None]:
        memory.restart_peak()
        with TracedAxis(self.runtime.mesh.tp, self.runtime.mesh.cp, self.runtime.mesh.tokens) as traffic:
            yield
        self.peaks[name], self.traffic[name] = memory.peak, traffic.axes


@dataclass
class Traffic:
    """The collectives over one axis: the number of each kind, and the bytes of their whole (gathered) tensors.

    Of the messages between two ranks, only the sends are counted.
    """

    counts: Counter[str] = field(default_factory=Counter)
    bytes: int = 0

    def __str__(self) -> str:
        counts = " + ".join(f"{count} {kind}" for kind, count in sorted(self.counts.items()))
        return f"{counts or 'none'}, {self.bytes / 2**20:.1f} MiB"


class TracedAxis(TorchDispatchMode):
    """Counts every collective over each axis inside this context.

    Args:
        axes: the axes of the mesh. A collective over a part of an axis counts for the first axis that holds its ranks.
    """

    def __init__(self, *axes: Axis):
        super().__init__()
        self._names = {axis.group.group_name: axis.name for axis in axes if axis.group is not None}
        self._ranks = {
            axis.name: set(dist.get_process_group_ranks(axis.group)) for axis in axes if axis.group is not None
        }
        self.axes = {axis.name: Traffic() for axis in axes if axis.size > 1}

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "namespace", None) == "c10d" and (kind := KINDS.get(func._opname)):
            leaves = tree_leaves((args, kwargs))
            group = group_in(leaves)
            name = None if group is None else self._name(group)
            if name in self.axes:
                traffic = self.axes[name]
                traffic.counts[kind] += 1
                traffic.bytes += max(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
        return result

    def _name(self, group: dist.ProcessGroup) -> str | None:
        if (name := self._names.get(group.group_name)) is None:
            ranks = set(dist.get_process_group_ranks(group))
            name = next((name for name, of_axis in self._ranks.items() if ranks <= of_axis), None)
        return name


def group_in(arguments: list[Any]) -> dist.ProcessGroup | None:
    """Return the process group among the arguments of one of c10d's operations."""
    for boxed in arguments:
        if isinstance(boxed, torch.ScriptObject) and boxed._type().name() == "ProcessGroup":  # type: ignore[attr-defined]
            return dist.ProcessGroup.unbox(boxed)
    return None
