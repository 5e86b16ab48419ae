"""Follows tensor types through the stages of a pipeline, on one rank of a world in which nothing is sent."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any
from unittest import mock

from conformance.spmd.mode import TypeMode
from conformance.spmd.types import Kind
from meshwright.optim.runtime import Runtime
from meshwright.pipeline.executor import Step, WeightGradients
from meshwright.pipeline.links import Crossing, Receiver


@contextlib.contextmanager
def receiving(mode: TypeMode, runtime: Runtime) -> Iterator[None]:
    """Give a type to what a stage receives, inside the context.

    Under sequence parallelism a rank receives its own tokens; otherwise all ranks of tp receive the same. Backward,
    which runs inside the model's forward, is not followed.

    Args:
        mode: the mode that follows the types.
        runtime: the runtime of the model.
    """
    assert runtime.plan is not None
    is_sharded = runtime.plan.sequence_parallel and runtime.mesh.tp.size > 1
    kind = Kind.VARYING if is_sharded else Kind.INVARIANT

    def receive(receiver: Receiver, key: Hashable) -> Crossing:
        x, *others = take(receiver, key)
        mode.declare(x, kind)
        for numbers in others:  # statistics of the tokens that this rank routes
            mode.declare(numbers, Kind.VARYING)
        return x, *others

    def unfollowed(method: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            with mode.unfollowed():
                method(*args)

        return call

    take = Receiver.take
    with (
        mock.patch.object(Receiver, "take", receive),
        mock.patch.object(Step, "backward", unfollowed(Step.backward)),
        mock.patch.object(WeightGradients, "add_to", unfollowed(WeightGradients.add_to)),
    ):
        yield
