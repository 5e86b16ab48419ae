"""Guards that raise an error on wrong uses of tensors and models of which this rank holds only a part.

A read never communicates, since a single rank that reads a tensor would hang in a hidden collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from meshwright.errors import AlreadyDistributedError, UnreadableTensorError

METADATA: frozenset[Any] = frozenset(
    getattr(Tensor, name).__get__
    for name in ("device", "dtype", "requires_grad", "grad_fn", "is_leaf", "layout", "is_sparse")
) | {Tensor.as_subclass, Tensor.detach, Tensor.register_hook}


SHAPE: frozenset[Any] = frozenset(
    {Tensor.size, Tensor.numel, Tensor.dim} | {getattr(Tensor, name).__get__ for name in ("shape", "ndim")}
)


class UnreadableTensor(Tensor):
    """A tensor that raises where an operation would read its values."""

    _MESSAGE: ClassVar[str]

    @classmethod
    def _allows(cls, func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        return func in METADATA or func in SHAPE

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if cls._allows(func, args):
            return super().__torch_function__(func, types, args, kwargs or {})
        raise UnreadableTensorError(cls._MESSAGE)


class ShardedLogits(UnreadableTensor):
    """Logits of this rank's vocabulary rows, in training with labels.

    Models scale and cap logits before the loss, so elementwise arithmetic with numbers works.
    Everything else raises an error that names the option that gathers the logits.
    """

    _MESSAGE = (
        "in training with labels the logits stay sharded over the vocabulary, and each rank has only its own "
        "words. To read outputs.logits, pass ToDistributedConfig(gather_logits=True), or call the model in eval "
        "mode or without labels, where the logits are whole"
    )
    _ELEMENTWISE: ClassVar[set[Any]] = {
        torch.tanh,
        Tensor.tanh,
        torch.mul,
        Tensor.mul,
        Tensor.__mul__,
        Tensor.__rmul__,
        torch.div,
        Tensor.div,
        Tensor.__truediv__,
        torch.true_divide,
        Tensor.float,
        Tensor.to,
        Tensor.contiguous,
    }

    @classmethod
    def _allows(cls, func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        others_are_numbers = not any(isinstance(arg, Tensor) for arg in args[1:])
        return func in METADATA or (func in cls._ELEMENTWISE and others_are_numbers)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return "ShardedLogits(not gathered: see ToDistributedConfig.gather_logits)"


class HeldGradient(UnreadableTensor):
    """Stands in ``parameter.grad`` for a gradient that ZeRO has moved to its shards.

    The placeholder has the parameter's shape and no memory. Setting ``parameter.grad`` to None, or zeroing it in
    place, clears the gradient.
    """

    _MESSAGE = (
        "under ZeRO the reduced gradient is in shards over the data-parallel axis, not in parameter.grad. Clip "
        "with meshwright.clip_grad_norm_(model, max_norm), and read with meshwright.full_gradients(model)"
    )
    _CLEARING: ClassVar[set[Any]] = {Tensor.zero_, torch._foreach_zero_, Tensor.requires_grad_, Tensor.detach_}

    @classmethod
    def stand_in(cls, parameter: Tensor, zero: Tensor | None = None) -> HeldGradient:
        """Return a stand-in for a parameter's gradient.

        Args:
            parameter: the parameter.
            zero: a zero of the parameter's dtype and device, which several stand-ins may share.
        """
        if zero is None:
            zero = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        held = zero.expand(parameter.shape).as_subclass(cls)
        held.__dict__["is_cleared"] = False
        return held

    @staticmethod
    def restore(grad: Tensor) -> None:
        """Mark a stand-in as not cleared, once its clearing has been applied to the sharded gradient."""
        if is_stand_in(grad):
            grad.__dict__["is_cleared"] = False

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in cls._CLEARING:
            tensors = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            if func in (Tensor.zero_, torch._foreach_zero_):
                for tensor in tensors:
                    if isinstance(tensor, HeldGradient):
                        tensor.__dict__["is_cleared"] = True
                    else:
                        tensor.zero_()
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return "HeldGradient(in the ZeRO shards: see meshwright.full_gradients)"


class _NoWrapper:
    """Raises when DistributedDataParallel looks up which parameters to ignore."""

    def __iter__(self) -> Iterator[str]:
        raise AlreadyDistributedError(
            "this model is distributed by meshwright. DistributedDataParallel (which accelerate's prepare and the "
            "stock Trainer put around models) would overwrite the shards of all ranks with those of the first. Use "
            "the model as it is, or prepare it with meshwright_hf"
        )


def refuse_wrapping(model: nn.Module) -> None:
    """Make DistributedDataParallel raise for a model whose ranks hold different shards."""
    object.__setattr__(model, "_ddp_params_and_buffers_to_ignore", _NoWrapper())


def is_stand_in(grad: Tensor | None) -> bool:
    """Return whether ``grad`` is a stand-in, by its mark: in a traced step its class is that of a fake tensor."""
    return grad is not None and "is_cleared" in grad.__dict__


def is_cleared(grad: Tensor | None) -> bool:
    """Return whether a parameter's gradient was cleared since ZeRO moved it."""
    return grad is None or grad.__dict__.get("is_cleared", False)
