"""Stand-ins: tensors that must not be read as the whole, since this rank holds a part of it, or nothing.

A read never communicates, since a single rank that reads a tensor would hang in a hidden collective. It raises an error
that names the call which gives the whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from meshwright.errors import UnreadableTensorError
from meshwright.layout.tensor_layout import layout_if_any
from meshwright.parallel.shards.reads import reading_shards

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
