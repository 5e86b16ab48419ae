"""Errors for code that reads this rank's part of a tensor as the whole; they say what to call instead."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Protocol

import torch
from torch import Tensor

from meshwright.errors import UnreadableTensorError
from meshwright.layout.tensor_layout import layout_if_any
from meshwright.temporarily import temporarily

_stage = SimpleNamespace(is_running=False)


def running_stage() -> contextlib.AbstractContextManager[None]:
    """Let the model's forward read weights of other pipeline stages as NaN, which shows where a result is used."""
    return temporarily(_stage, is_running=True)


def is_stage_running() -> bool:
    """Return whether a pipeline stage runs the model's forward."""
    return bool(_stage.is_running)


reading_shards = torch._C.DisableTorchFunctionSubclass
"""A context manager in which shards behave as plain tensors, for code that handles shards."""

_MODULES_NAMES = "linear bilinear embedding embedding_bag matmul rmatmul mm addmm bmm einsum mv dot t"
MODULES = frozenset(_MODULES_NAMES.split())
"""Operations that a module applies to its weight."""

ROW_READS = "_meshwright_row_reads"
"""The attribute of a weight with the object that reads one of its rows in forward, if it is cut over the vocabulary."""

VALUES_OF = "_meshwright_values"
"""The attribute of a shard without memory of its own with its values."""

_DRAWS_NAMES = "normal uniform bernoulli random exponential trunc_normal rand_like randn_like dropout"
_DRAWS = frozenset(_DRAWS_NAMES.split())


class Values(Protocol):
    """The values of a parameter that has no memory of its own (ZeRO stage 3)."""

    def own(self) -> Tensor:
        """Return this rank's elements as a 1-d tensor. Writing into it changes the parameter."""

    def cut(self, local: Tensor) -> Tensor:
        """Return this rank's elements of a tensor that has the shard's shape."""

    def changed(self) -> None:
        """Called after the elements were written."""

    def lend(self) -> None:
        """Give the parameter all of its values in a backward pass that runs its module's forward again."""


def values_of(x: object) -> Values | None:
    """Return the values of a shard that has no memory of its own; None for any other tensor."""
    return getattr(x, "__dict__", {}).get(VALUES_OF)


def own_shape(x: Tensor) -> torch.Size:
    """Return the shape of what this rank has of a tensor, where ``x.shape`` is that of the whole tensor."""
    with reading_shards():
        return x.shape


def own_nbytes(x: Tensor) -> int:
    """Return the number of bytes of what this rank has of a tensor."""
    with reading_shards():
        return x.nbytes


def plain_name(name: str) -> str:
    """Return an operation's name without the affixes of its in-place and list variants."""
    return name.strip("_").removeprefix("foreach_")


def describe(x: Tensor) -> str:
    """Return a shard's ``repr`` without communication."""
    with reading_shards():
        layout, shape, dtype = layout_if_any(x), list(x.shape), x.dtype
    what = f"this rank's {shape}"
    if layout is not None:
        whole = f"{layout.name} {[*layout.shape]}"
        what = f"{what} of {whole}" if layout.is_held else f"another pipeline stage's {whole}"
    return f"{type(x).__name__}({what}, {dtype})"


def unreadable(
    name: str, x: Tensor, *, into: Tensor | None = None, other: Tensor | None = None, is_cast: bool = False
) -> UnreadableTensorError:
    """Return the error for an operation on a shard.

    Args:
        name: the operation.
        x: the shard.
        into: the tensor that the operation would write the shard's values into, if that is the problem.
        other: the tensor that the operation would combine the shard with, if that is the problem.
        is_cast: whether the operation would change the dtype of values that are stored elsewhere.
    """
    with reading_shards():
        layout, plain, is_gradient = layout_if_any(x), plain_name(name), getattr(x, "is_gradient", False)
        what = "the gradient" if is_gradient else "a tensor"
        if layout is not None:
            what = f"{'the gradient of ' if is_gradient else ''}{layout.name} {[*layout.shape]}"
        is_elsewhere = layout is not None and not layout.is_held
        held = f"this rank holds {'a part' if values_of(x) is not None else [*x.shape]} of {what}"
        if is_elsewhere:
            held = f"another pipeline stage holds {what}"
        if is_cast:
            why = "a cast would not reach the parts that ZeRO stage 3 keeps"
            cure = "call model.to(...), .double(), .float() or the like before to_distributed"
        elif into is not None:
            why = f"{name}() would write this part into a tensor {list(into.shape)} that is not a shard"
            cure = (
                "make an average of weights after to_distributed (AveragedModel(model), copy.deepcopy(model)), or "
                "distribute the average too: mw.to_distributed(ema.module, config=config)"
            )
        elif other is not None:
            why = f"{name}() with a tensor {list(other.shape)} would not give this rank's part of the one-device result"
            cure = "combine it with whole tensors of its one-device shape, or with tensors that are sharded like it"
        elif plain in MODULES:
            why = f"{name}() would use this part only"
            cure = "call the module that owns the weight, e.g. model.lm_head(hidden), which communicates"
        elif plain in _DRAWS or plain.endswith(("normal", "uniform")):
            why = f"{name}() would draw different numbers than on one device"
            cure = "initialise before to_distributed, or load whole values: model.load_state_dict(state)"
        elif is_gradient:
            why = f"the result of {name} differs between the ranks and from one device"
            cure = (
                "clip with meshwright.clip_grad_norm_(model, max_norm), which also returns the norm, or call "
                "meshwright.full_gradients(model) on all ranks and read the whole gradient on rank 0"
            )
        else:
            why = f"the result of {name} differs between the ranks and from one device"
            cure = (
                "call meshwright.full_state_dict(model) on all ranks and read the whole tensor on rank 0; for a "
                "penalty on weights, set the optimizer's weight_decay"
            )
        if values_of(x) is not None and not is_gradient and not is_elsewhere:
            cure += ". If the model reads this weight outside of the forward of its module, use zero_stage=2"
    part = "" if is_elsewhere else " (This rank's part is tensor.as_subclass(torch.Tensor).)"
    return UnreadableTensorError(f"{held}, and {why}. Instead, {cure}.{part}")
