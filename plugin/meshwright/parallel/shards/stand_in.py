"""Stand-ins for tensors that must not be read as the whole, and the errors of code that does so.

A read never communicates, since a single rank that reads a tensor would hang in a hidden collective. It raises an error
that names the call which gives the whole.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

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


# Attributes and methods that do not read a tensor's values.
_ATTRIBUTES = ("device", "dtype", "layout", "is_sparse", "requires_grad", "grad_fn", "is_leaf")
FACTS = frozenset((*_ATTRIBUTES, "as_subclass", "detach", "register_hook"))
SHAPE = frozenset(("size", "numel", "dim", "shape", "ndim"))
VALUES = ("data", "T", "mT", "H", "mH", "real", "imag")  # attributes that have a tensor's values
_MORE_FACTS = """
    ndimension stride storage_offset untyped_storage storage _typed_storage data_ptr element_size is_contiguous
    is_floating_point is_complex is_signed get_device register_post_accumulate_grad_hook requires_grad_ retain_grad
    is_pinned is_shared new_empty new_zeros new_ones new_full new_tensor result_type is_same_size is_set_to
    _has_compatible_shallow_copy_type _is_view record_stream __hash__ __len__ __format__ is_conj is_neg is_inference
"""
METADATA = FACTS | SHAPE | frozenset(_MORE_FACTS.split())
_OF_WHOLE = SHAPE | frozenset(("nelement", "ndimension", "stride", "nbytes", "is_contiguous", "__len__"))


def is_metadata(func: Callable[..., Any], name: str) -> bool:
    """Return whether an operation, or the attribute that it gets, does not depend on a tensor's values."""
    return name in METADATA or (func.__name__ == "__get__" and name not in VALUES)


class StandIn(Tensor):
    """A tensor that raises where an operation would read it as the whole.

    Its shape is that of the whole tensor, if it has a layout.

    Attributes:
        MESSAGE: what the error says.
        FREE: the names of the operations that run as on a plain tensor, and give a stand-in if they give a tensor.
    """

    MESSAGE: ClassVar[str] = ""
    FREE: ClassVar[frozenset[str]] = FACTS | SHAPE

    @classmethod
    def of_shape(cls, shape: Iterable[int], dtype: torch.dtype, device: torch.device | None = None) -> Self:
        """Return a stand-in without memory; ``as_subclass(Tensor)`` gives a plain tensor again."""
        return torch.empty((), dtype=dtype, device=device).expand(tuple(shape)).as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        name = func.__name__
        if name == "__get__":
            name = getattr(func.__self__, "__name__", "")  # type: ignore[attr-defined]
        if name in _OF_WHOLE and (layout := layout_if_any(args[0])) is not None:
            with reading_shards():
                dtype = args[0].dtype
            return func(_like(layout.shape, dtype), *args[1:], **(kwargs or {}))
        return cls.run(func, name, args, kwargs or {})

    @classmethod
    def run(cls, func: Callable[..., Any], name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Run an operation on a stand-in, or raise.

        Args:
            func: the operation.
            name: its name, or that of the attribute that it reads.
            args: its arguments.
            kwargs: its named arguments.
        """
        if not cls.allows(name, args):
            raise UnreadableTensorError(cls.MESSAGE)
        with reading_shards():
            result = func(*args, **kwargs)
            is_new = isinstance(result, Tensor) and not isinstance(result, cls) and name != "as_subclass"
            return result.as_subclass(cls) if is_new else result

    @classmethod
    def allows(cls, name: str, args: tuple[object, ...]) -> bool:
        """Return whether an operation does not read the stand-in as the whole."""
        return name in cls.FREE

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.MESSAGE})"


@functools.lru_cache(maxsize=4096)
def _like(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a tensor without memory that answers questions about its shape."""
    with _disable_current_modes():  # a fake tensor would be kept after its mode has ended
        return torch.empty(shape, dtype=dtype, device="meta")


def become(tensor: object, kind: type) -> None:
    """Change the class of a tensor, which stays the same object."""
    tensor.__class__ = kind


class ShardedLogits(StandIn):
    """Logits of this rank's vocabulary rows, in training with labels.

    Models scale and cap logits before the loss, so elementwise arithmetic with numbers works.
    Everything else raises an error that names the option that gathers the logits.
    """

    MESSAGE = (
        "in training with labels the logits stay sharded over the vocabulary, and each rank has only its own "
        "words. To read outputs.logits, pass ToDistributedConfig(gather_logits=True), or call the model in eval "
        "mode or without labels, where the logits are whole"
    )
    FREE = FACTS
    _ARITHMETIC = frozenset(
        ("tanh", "mul", "__mul__", "__rmul__", "div", "__truediv__", "true_divide", "float", "to", "contiguous")
    )

    @classmethod
    def allows(cls, name: str, args: tuple[object, ...]) -> bool:
        others_are_numbers = not any(isinstance(arg, Tensor) for arg in args[1:])
        return name in FACTS or (name in cls._ARITHMETIC and others_are_numbers)


class HeldGradient(StandIn):
    """Stands in ``parameter.grad`` for a gradient that ZeRO has moved to its shards.

    The placeholder has the parameter's shape and no memory. Setting ``parameter.grad`` to None, or zeroing it in
    place, clears the gradient.
    """

    MESSAGE = (
        "under ZeRO the reduced gradient is in shards over the data-parallel axis, not in parameter.grad. Clip "
        "with meshwright.clip_grad_norm_(model, max_norm), and read with meshwright.full_gradients(model)"
    )

    @classmethod
    def stand_in(cls, parameter: Tensor, zero: Tensor | None = None) -> HeldGradient:
        """Return a stand-in for a parameter's gradient.

        Args:
            parameter: the parameter.
            zero: a zero of the parameter's dtype and device, which several stand-ins may share.
        """
        if zero is None:
            zero = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        with reading_shards():
            held = zero.expand(parameter.shape).as_subclass(cls)
        held.__dict__["is_cleared"] = False
        if (layout := layout_if_any(parameter)) is not None:
            held.__dict__["meshwright"] = layout
        return held

    @staticmethod
    def restore(grad: Tensor) -> None:
        """Mark a stand-in as not cleared, once its clearing has been applied to the sharded gradient."""
        if is_stand_in(grad):
            grad.__dict__["is_cleared"] = False

    @classmethod
    def run(cls, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        if name in ("requires_grad_", "detach_"):
            return args[0]
        if name not in ("zero_", "_foreach_zero_"):
            return super().run(func, name, args, kwargs)
        for tensor in args[0] if isinstance(args[0], list | tuple) else [args[0]]:
            if isinstance(tensor, HeldGradient):
                tensor.__dict__["is_cleared"] = True
            else:
                tensor.zero_()
        return args[0]


def is_stand_in(grad: Tensor | None) -> bool:
    """Return whether ``grad`` is a stand-in, by its mark: in a traced step its class is that of a fake tensor."""
    return grad is not None and "is_cleared" in grad.__dict__


def is_cleared(grad: Tensor | None) -> bool:
    """Return whether a parameter's gradient was cleared since ZeRO moved it."""
    return grad is None or grad.__dict__.get("is_cleared", False)


class InHead:
    """Takes the place of a head's input, and runs a function inside the head's call, where its weight is whole."""

    def __init__(self, run: Callable[[], Tensor]):
        self.run = run
