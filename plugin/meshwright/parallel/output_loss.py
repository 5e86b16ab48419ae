"""Find and replace the loss in a model's output of any type."""

from __future__ import annotations

from collections.abc import MutableMapping

from torch import Tensor

from meshwright.containers import rebuilt


def loss_of(output: object) -> Tensor | None:
    """Return an output's loss: its ``loss``, a tuple's first item, or the output itself if scalar; None without one."""
    if isinstance(output, tuple | list):
        output = output[0] if output else None
    if isinstance(output, Tensor):
        return output if output.ndim == 0 else None
    loss = output.get("loss") if isinstance(output, MutableMapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) else None


def with_loss(output: object, loss: Tensor) -> object:
    """Return the output with another loss, changed in place where possible."""
    if isinstance(output, Tensor):
        return loss
    if isinstance(output, tuple | list):
        return rebuilt(output, [loss, *output[1:]])
    if isinstance(output, MutableMapping):
        output["loss"] = loss
    else:
        setattr(output, "loss", loss)  # noqa: B010
    return output


def tensors_of(output: object) -> list[Tensor]:
    """Return the tensors at the top level of an output."""
    if isinstance(output, Tensor):
        return [output]
    named = output if isinstance(output, MutableMapping) else getattr(output, "__dict__", {})
    values = output if isinstance(output, tuple | list) else named.values()
    return [x for x in values if isinstance(x, Tensor)]
