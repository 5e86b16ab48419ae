"""The trained parameters of one model, and what synchronises, counts and shards their gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.layout.tensor_layout import TensorLayout, layout_of
from meshwright.mesh.axes import Mesh
from meshwright.optim.zero.segments import stepped_over
from meshwright.optim.zero.zero_optimizer import ReduceScatter, slice_copies
from meshwright.parallel.gradients.gradient_hooks import GradientHooks
from meshwright.parallel.gradients.sync import GradientSync
from meshwright.plan.parts import BUCKET_MB


class RequiresGrad(Protocol):
    """Follows which parameters the program freezes and thaws."""

    def follow(self) -> None:
        """Called before each forward pass of the model, to take in what has changed."""

    def check(self) -> None:
        """Called before a step; raises ValueError if the gradient of a thawed parameter is this rank's own."""


class StepsWhole(Protocol):
    """Steps parameters whole, each on one rank."""

    def has(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter is stepped whole."""

    def part_of(self, parameter: nn.Parameter) -> tuple[TensorLayout, nn.Parameter | None]:
        """Return where the state of a parameter is: its layout, and on the owner the key of the state."""

    def open(self) -> None:
        """Let the optimizer have the whole parameters that this rank owns; every rank makes the call."""

    def close(self) -> None:
        """Give every rank its parts of what the owners have made of the parameters."""


@dataclass(eq=False)
class Engine:
    """A training engine that averages gradients over dp, steps and clips in the runtime's place.

    Args:
        name: its name, e.g. "DeepSpeed".
        materialise: a function that returns a context manager, inside which this rank's shard of a parameter is whole
            although the engine splits the shard further.
    """

    name: str
    materialise: Callable[[Tensor], contextlib.AbstractContextManager[object]] | None = None


@dataclass(eq=False)
class Gradients:
    """The gradients of a model's trained parameters.

    Args:
        parameters: the parameters that were ever trainable.
        syncs: the objects that synchronise the gradients.
        hooks: the program's hooks on the gradients; None if an engine handles these.
        zero: the ZeRO reduction with its sharded buckets, if any.
        trained: the object that tracks which parameters require a gradient.
        has_optimizer: whether an optimizer is bound to the parameters.
        whole: what steps parameters whole, each on one rank, if the optimizer reads a parameter at a time.
        engine: the engine that handles the gradients; None if the runtime does so.
        bucket_bytes: the size of the buckets in which gradients are reduced, also those of a copy of the model.
    """

    parameters: list[nn.Parameter] = field(default_factory=list)
    syncs: list[GradientSync] = field(default_factory=list)
    hooks: GradientHooks | None = None
    zero: ReduceScatter | None = None
    trained: RequiresGrad | None = None
    has_optimizer: bool = False
    whole: StepsWhole | None = None
    engine: Engine | None = None
    bucket_bytes: int = int(BUCKET_MB * 2**20)

    def count_sharded_steps(self) -> int:
        """Return how often an optimizer has stepped ZeRO's shards, which the parameters' versions do not show."""
        return 0 if self.zero is None else self.zero.num_steps

    def follow(self) -> None:
        """Update ``trained`` for the parameters that the program froze or thawed since the last pass."""
        if self.trained is not None:
            self.trained.follow()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """See :func:`meshwright.no_sync`."""
        with contextlib.ExitStack() as stack:
            for sync in self.syncs:
                stack.enter_context(sync.no_sync())
            yield

    def part_of(self, parameter: nn.Parameter) -> tuple[TensorLayout, nn.Parameter | None]:
        """Return which elements of a parameter each rank steps, and this rank's elements; None if it has none."""
        bucket = None if self.zero is None else self.zero.bucket_of(parameter)
        if bucket is None:
            layout = layout_of(parameter)
            return layout, parameter if layout.is_held else None
        return bucket.layout(parameter), next((s.stepped for s in bucket.slices if s.parameter is parameter), None)

    def stepped(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """Return the key of this rank's state of a parameter; None if it has none."""
        of = self.part_of if self.whole is None or not self.whole.has(parameter) else self.whole.part_of
        return of(parameter)[1]

    def dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        """Return the dtype in which a parameter is stepped: that of its float32 copy, if ZeRO keeps one."""
        bucket = None if self.zero is None else self.zero.bucket_of(parameter)
        return parameter.dtype if bucket is None else bucket.bucket.dtype

    def are_stepped_by(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer has any of the parameters."""
        own = {id(p) for p in self.parameters}
        return any(id(p) in own for group in optimizer.param_groups for p in group["params"])

    def settle(self) -> None:
        """Pass on to ZeRO's slices what the program has set or cleared among the parameters' gradients."""
        if self.zero is not None:
            self.zero.settle()

    def counted(self, mesh: Mesh) -> list[tuple[Tensor, Tensor | float]]:
        """Return this rank's gradients, each with the number of ranks that hold each of its elements."""
        counted: list[tuple[Tensor, Tensor | float]] = []
        held = set()
        if self.zero is not None:
            self.zero.settle()
            for bucket in self.zero.sharded:
                held |= {id(p) for p in bucket.bucket.parameters}
                counted += [
                    (piece.shard.grad.as_subclass(Tensor), slice_copies(piece))
                    for piece in bucket.slices
                    if piece.shard.grad is not None
                ]
        for parameter in self.parameters:
            if id(parameter) not in held and parameter.grad is not None:
                layout, gradient = layout_of(parameter), parameter.grad.as_subclass(Tensor)
                layout.zero_padding(gradient)  # the program may have set the gradient
                replicas = stepped_over(layout, mesh).size
                counted.append((gradient, layout.copies(parameter) * replicas * layout.stage_copies))
        return counted

    def check_synced(self, *_: object) -> None:
        """Raise if gradients were never synchronised: accumulated under no_sync, or of parameters thawed too late.

        Raises:
            ValueError: if there are such gradients, on every rank that runs the same program.
        """
        if self.trained is not None:
            self.trained.check()
        if any(sync.has_unsynced for sync in self.syncs):
            raise ValueError(
                "the last backward pass ran under no_sync(), so its gradients are this rank's own and a step would "
                "let the replicas drift apart; run the last pass of an accumulation window outside no_sync()"
            )
