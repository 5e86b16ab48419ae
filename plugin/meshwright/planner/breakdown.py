"""The parts of the estimated time of a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step; the parts add up to ``total``.

    Args:
        matmul: the matmuls of the layers and the head, in the slowest stage.
        attention: the attention kernels.
        elementwise: norms, activations, residuals, the loss, and kernel launches that compute cannot hide.
        recompute: the layers that backward recomputes.
        tensor: communication over tp.
        context: communication over cp that attention does not hide.
        data: communication over dp that compute does not hide.
        bubble: waiting in the pipeline, including transfers between stages.
        optimizer: the optimizer step.
        other: the fixed cost of a step, and waiting for the slowest of many nodes.
    """

    matmul: float
    attention: float
    elementwise: float
    recompute: float
    tensor: float
    context: float
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
    """Seconds of a part of the model for one micro-batch, forward and backward."""

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    recompute: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
