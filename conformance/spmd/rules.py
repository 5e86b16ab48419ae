"""Rules for the type of an operation's result: operations that accept partial sums, contractions that make them.

Any other operation is treated as nonlinear, so a new torch operation can give a false finding, but is never
skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from conformance.spmd.types import Kind, Typed, TypeMismatch, join

TypeOf = Callable[[Any], Typed | None]


def names(text: str) -> frozenset[str]:
    """Split a text into a set of operation names."""
    return frozenset(text.split())


# Operations that read a tensor's metadata, not its values.
_METADATA = names(
    """
    __get__ __hash__ __len__ dim element_size get_device has_names is_complex is_contiguous is_floating_point
    is_same_size ndimension nelement numel register_hook size storage_offset stride untyped_storage
    """
)

# Operations that make a tensor of constants.
_CONSTANTS = names(
    """
    empty_like full_like new_empty new_full new_ones new_tensor new_zeros ones_like zeros_like
    """
)

# Operations that are linear in their only tensor, whatever the other arguments are.
_LINEAR = names(
    """
    __getitem__ alias as_subclass bfloat16 chunk clone contiguous cumsum detach double expand expand_as flatten flip
    float gather half index_select mean movedim narrow neg __neg__ pad permute repeat requires_grad_ reshape roll
    select split split_with_sizes squeeze sum swapaxes swapdims t take_along_dim tensor_split to transpose type
    type_as unbind unflatten unfold unsqueeze view view_as
    """
)
_REDUCTIONS = names(
    """
    amax amin argmax cross_entropy cumsum layer_norm log_softmax logsumexp max mean min norm prod rms_norm softmax
    std sum topk var vector_norm
    """
)
_SUMS = names("add add_ __add__ __radd__ __iadd__ sub sub_ __sub__ __rsub__ __isub__")
_JOINS = names("cat concat concatenate stack hstack vstack")
_PRODUCTS = names("mul mul_ __mul__ __rmul__ __imul__ multiply")
_QUOTIENTS = names("div div_ __truediv__ __itruediv__ true_divide")
_MATMULS = names("matmul __matmul__ mm bmm baddbmm addmm linear einsum")


def result_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], type_of: TypeOf) -> Kind | None:
    """Return the type of an operation's result; None if no input has a type or the result is constant.

    Args:
        name: the name of a torch function or a method of Tensor.
        args, kwargs: the arguments of the call.
        type_of: a function that returns a tensor's type, and None for constants and non-tensors.

    Raises:
        TypeMismatch: see ``types.join``.
    """
    tensors = _tensors((args, kwargs))
    inputs = [typed for x in tensors if (typed := type_of(x)) is not None]
    if not inputs or name in _CONSTANTS:
        return None
    if name == "linear":
        return _linear(args, kwargs, type_of)
    if name == "addmm":
        bias, x, weight = args[:3]
        return _contraction(type_of(x), type_of(weight), type_of(bias), contracted=0)
    if name in ("matmul", "__matmul__", "mm") and (weight := type_of(args[1])) is not None and weight.dim is not None:
        return _contraction(type_of(args[0]), weight, None, contracted=0)
    if name == "embedding" and (table := type_of(_argument(args, kwargs, 1, "weight"))) is not None:
        return Kind.PARTIAL if table.kind is Kind.VARYING and table.dim == 0 else join(inputs)
    partial = [x for x in inputs if x.kind is Kind.PARTIAL]
    if not partial:
        return join(inputs)
    if _keeps_partial(name, args, kwargs, type_of, num_tensors=len(tensors), num_partial=len(partial)):
        return Kind.PARTIAL
    if name in _SUMS or name in _JOINS:
        raise TypeMismatch(
            f"adds something that is not a partial sum to {partial[0].said}, so each rank of tp would add it",
            Kind.PARTIAL,
        )
    return join(inputs)


def reduces_width(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], type_of: TypeOf) -> Typed | None:
    """Return the activation whose sharded last dim an operation reduces on this rank alone; None if there is none."""
    x: Any = args[0] if args else None
    typed = type_of(x)
    is_elementwise = len(args) > 1 and isinstance(args[1], Tensor) and name in ("max", "min")
    if typed is None or not typed.is_wide or name not in _REDUCTIONS or is_elementwise:
        return None
    dims = kwargs.get("dim", args[1] if len(args) > 1 and name not in ("norm", "vector_norm", "layer_norm") else None)
    dims = dims if isinstance(dims, tuple | list) else [dims]
    return typed if any(not isinstance(dim, int) or dim in (-1, x.ndim - 1) for dim in dims) else None


def makes_width(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor, type_of: TypeOf) -> bool:
    """Return whether a sharded result is sharded over its last dim."""
    if name in ("linear", "addmm", "matmul", "__matmul__"):
        weight = type_of(args[2] if name == "addmm" else _argument(args, kwargs, 1, "weight"))
        contracted = 1 if name == "linear" else 0
        return weight is not None and weight.dim == 1 - contracted
    wide = [x for x in _tensors((args, kwargs)) if (typed := type_of(x)) is not None and typed.is_wide]
    if not wide:
        return False
    # A view that splits the width into heads has one more dim.
    is_split = name in ("chunk", "split", "tensor_split")
    return result.ndim == wide[0].ndim and (is_split or result.shape[-1:] == wide[0].shape[-1:])


def _keeps_partial(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], type_of: TypeOf, *, num_tensors: int, num_partial: int
) -> bool:
    """Return whether an operation is linear in its partial sums: results of addends add up to the result of the sum."""
    if name in _LINEAR or name in _METADATA:
        return True
    if name in _SUMS or name in _JOINS:
        return num_partial == num_tensors and not any(isinstance(x, int | float) and x for x in args)
    if name in _PRODUCTS:
        return num_partial == 1 and not _varies(args, type_of)
    if name in _QUOTIENTS:
        return num_partial == 1 and _kind(args[0], type_of) is Kind.PARTIAL and not _varies(args, type_of)
    if name in _MATMULS:
        return num_partial == 1 and not _varies(args, type_of)
    if name in ("masked_fill", "masked_fill_"):
        value = _argument(args, kwargs, 2, "value")
        return not isinstance(value, Tensor) and value == 0
    if name in ("dropout", "dropout_"):
        is_training = _argument(args, kwargs, 2, "training", True)
        return not is_training or _argument(args, kwargs, 1, "p", 0.5) == 0
    return False


def _linear(args: tuple[Any, ...], kwargs: dict[str, Any], type_of: TypeOf) -> Kind | None:
    x, weight = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "weight")
    bias = _argument(args, kwargs, 2, "bias")
    return _contraction(type_of(x), type_of(weight), type_of(bias), contracted=1)


def _contraction(x: Typed | None, weight: Typed | None, bias: Typed | None, *, contracted: int) -> Kind | None:
    """Return the type of a matrix product; ``contracted`` is the weight's dim that is summed over."""
    is_row = weight is not None and weight.kind is Kind.VARYING and weight.dim == contracted
    is_column = weight is not None and weight.kind is Kind.VARYING and weight.dim == 1 - contracted
    if x is not None and x.kind is Kind.PARTIAL:
        if weight is not None and (weight.kind is Kind.VARYING or _is_invariant(weight)):
            raise TypeMismatch(f"multiplies {x.said} by {weight.said} before the sum over tp", Kind.PARTIAL)
        result: Kind | None = Kind.PARTIAL
    elif is_row:
        assert weight is not None
        if x is None or x.kind is not Kind.VARYING:
            raise TypeMismatch(
                f"multiplies {weight.said}, sharded over the summed dim, by an input that is not sharded", Kind.PARTIAL
            )
        result = Kind.PARTIAL
    elif is_column and x is not None and x.kind is Kind.VARYING:
        assert weight is not None
        raise TypeMismatch(
            f"multiplies {weight.said}, sharded over its outputs, by {x.said}: each rank would see its own input only",
            Kind.VARYING,
        )
    else:
        result = join([y for y in (x, weight) if y is not None])
    if bias is None:
        return result
    if result is Kind.PARTIAL and bias.kind is not Kind.PARTIAL:
        raise TypeMismatch(
            f"adds {bias.said} to a partial sum, so each rank of tp would add it; add it after the sum", Kind.PARTIAL
        )
    if result is Kind.VARYING and _is_invariant(bias):
        return join([Typed(Kind.VARYING, has_gradient=True), bias])
    return result


def _varies(args: tuple[Any, ...], type_of: TypeOf) -> bool:
    """Return whether a factor of a partial sum differs between ranks, or would get a partial gradient."""
    others = [typed for x in _tensors(args) if (typed := type_of(x)) is not None and typed.kind is not Kind.PARTIAL]
    return any(x.kind is Kind.VARYING or _is_invariant(x) for x in others)


def _is_invariant(x: Typed) -> bool:
    return x.kind is Kind.INVARIANT and x.has_gradient


def _kind(x: Any, type_of: TypeOf) -> Kind | None:
    typed = type_of(x)
    return None if typed is None else typed.kind


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], index: int, name: str, default: Any = None) -> Any:
    return args[index] if len(args) > index else kwargs.get(name, default)


def _tensors(value: Any) -> Sequence[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [x for item in value for x in _tensors(item)]
    return []
