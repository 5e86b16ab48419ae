"""Find and replace the loss in a model's output of any type."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from torch import Tensor


def loss_of(output: object) -> Tensor | None:
    """Return an output's loss: its ``loss``, a tuple's first item, or the output itself if scalar; None without one."""
    if isinstance(output, tuple | list):
        output = output[0] if output else None
    if isinstance(output, Tensor):
        return output if output.ndim == 0 else None
    loss = output.get("loss") if isinstance(output, MutableMapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) else None


def with_loss(output: Any, loss: Tensor) -> object:
    """Return the output with another loss, changed in place where possible."""
    if isinstance(output, Tensor):
        return loss
    if isinstance(output, tuple | list):
        rest = [loss, *output[1:]]
        return type(output)(*rest) if hasattr(output, "_fields") else type(output)(rest)
    if isinstance(output, MutableMapping):
        output["loss"] = loss
    else:
        output.loss = loss
    return output


def tensors_of(output: Any) -> list[Tensor]:
    """Return the tensors at the top level of an output."""
    if isinstance(output, Tensor):
        return [output]
    values = output.values() if isinstance(output, MutableMapping) else output
    if not isinstance(output, tuple | list | MutableMapping):
        values = vars(output).values() if hasattr(output, "__dict__") else ()
    return [x for x in values if isinstance(x, Tensor)]
