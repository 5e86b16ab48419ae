"""Modes of a pass without values: what the host reads, and operations on meta tensors."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_META = torch.device("meta")
# The forms of results, by the operation and the forms of its arguments. All passes of a process share them, since
# nothing else decides them, and torch computes many by a chain of Python functions.
_FORMS: dict[Any, tuple[Any, ...]] = {}


class ReadAsZero(TorchDispatchMode):
    """Lets the host read a tensor as zero, such as rotary embeddings that look at the longest position.

    Attributes:
        truth: what a fact about values is read as.
    """

    def __init__(self) -> None:
        super().__init__()
        self.truth = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would wrap each call for a compiler that does not run here

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return self.truth if dtype is torch.bool else 0.0 if dtype.is_floating_point else 0
        if func is torch.ops.aten.split_with_sizes.default and not any(args[1]):  # numbers of tokens, read as zero
            args = (args[0], [args[0].shape[args[2] if len(args) > 2 else 0], *args[1][1:]], *args[2:])
        return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)


class MetaMode(ReadAsZero):
    """Runs every operation on meta tensors, in a quarter to a half of the time of torch's FakeTensorMode.

    A tensor with values takes part as one without, so nothing is written into it. Unlike fake tensors, the results say
    that they are on the meta device, autocast does not cast them, and some operations have no kernel for them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._without: dict[int, tuple[Tensor, Tensor]] = {}  # the tensors with values, which keep their numbers

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        takes_device, is_functional = _traits(func)
        args = tuple(map(self._meta, args))
        kwargs = {name: self._meta(x) for name, x in kwargs.items()} if kwargs else kwargs
        if takes_device:
            kwargs["device"] = _META
        if not is_functional:
            return func(*args, **kwargs)
        key = (func, torch.get_default_dtype(), *map(_form, args), *kwargs, *map(_form, kwargs.values()))
        if (forms := _FORMS.get(key)) is None:
            result = func(*args, **kwargs)
            if forms := _own_forms(result, (*args, *kwargs.values())):
                _FORMS[key] = forms
            return result
        made = [torch.empty_strided(shape, stride, dtype=dtype, device=_META) for shape, stride, dtype in forms]
        return made[0] if len(made) == 1 else tuple(made)

    def _meta(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            if x.is_meta:
                return x
            if id(x) not in self._without:
                self._without[id(x)] = x, torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=_META)
            return self._without[id(x)][1]
        return [self._meta(inner) for inner in x] if isinstance(x, list | tuple) else x


@functools.cache
def _traits(func: Any) -> tuple[bool, bool]:
    """Return whether an operation has an argument for the device, and whether its result is new memory."""
    schema = func._schema
    is_aliased = schema.is_mutable or any(returned.alias_info for returned in schema.returns)
    return any(argument.name == "device" for argument in schema.arguments), not is_aliased


def _form(x: Any) -> Any:
    """Return what an argument adds to the form of a result, with the type of a number: 1 and 1.0 are equal."""
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype
    return tuple(map(_form, x)) if isinstance(x, list) else (type(x), x)


def _own_forms(result: Any, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return the forms of the tensors that an operation returns; None if they are not all new tensors."""
    made = result if isinstance(result, tuple) else (result,)
    if not made or not all(isinstance(x, Tensor) for x in made) or (isinstance(result, tuple) and len(made) == 1):
        return None
    memory = {x.untyped_storage()._cdata for x in tree_leaves(given) if isinstance(x, Tensor)}
    return None if any(x.untyped_storage()._cdata in memory for x in made) else tuple(map(_form, made))
