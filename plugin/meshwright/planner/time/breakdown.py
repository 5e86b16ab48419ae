"""The parts of the estimated time of a training step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The estimated seconds of one training step by part; the parts add up to ``total``.

    Args:
        matmul: the matmuls of the layers and the head, in the slowest pipeline stage.
        attention: the attention kernels.
        elementwise: norms, activation functions, residual sums, the loss, and kernel launches that compute cannot hide.
        recompute: the recomputation of layers in backward.
        tensor: communication over tp.
        context: communication over cp that attention does not hide.
        experts: the exchanges of tokens between the ranks that share experts.
        data: communication over dp that compute does not hide.
        bubble: the idle time in the pipeline, including transfers between stages.
        optimizer: the optimizer step.
        other: the fixed time of a step, and the wait for the slowest node.
    """

    matmul: float
    attention: float
    elementwise: float
    recompute: float
    tensor: float
    context: float
    experts: float
    data: float
    bubble: float
    optimizer: float
    other: float

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        return dict(vars(self))


@dataclass(frozen=True, kw_only=True)
class Work:
    """Seconds for a part of the model and one micro-batch: by kind of work, and in total for forward and backward.

    ``weight_grad`` is the part of ``backward`` that computes the gradients of the weights. ``hidden`` is the
    communication over cp that attention hides, which is in none of the others.
    """

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    recompute: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    experts: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    weight_grad: float = 0.0
    hidden: float = 0.0


def mean_work(works: Sequence[Work], counts: Sequence[int]) -> Work:
    """Return the mean over layers of which ``counts`` have each ``Work``."""
    if len(works) == 1:
        return works[0]
    weights = [count / sum(counts) for count in counts]
    names = (field.name for field in fields(Work))
    return Work(
        **{name: sum(w * getattr(work, name) for w, work in zip(weights, works, strict=True)) for name in names}
    )


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Communication over dp that runs at the same time as compute.

    Args:
        phase: the compute of one micro-batch that hides it.
        is_repeated: whether it runs for each micro-batch; if not, it runs once per step.
        seconds: time of the communication.
        exposed: part of this time that compute does not hide.
    """

    phase: Literal["forward", "backward"]
    is_repeated: bool
    seconds: float
    exposed: float
