"""Lets plain tensors stand beside DTensors in torch's operations: a plain tensor is the same value on every rank.

torch refuses to mix the two, because it cannot know what a plain tensor is. Here every rank runs the same program, so::

    x @ w     x: plain, w: a DTensor      x is placed as Replicate on the mesh of w; the result is a DTensor
    x += w    x is written                w is gathered on every rank; the result is plain

The plain tensors of all ranks are compared first. Their gradients are plain and whole on every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright.containers import rebuilt

T = TypeVar("T")
Arguments = Sequence[Any]  # of an operation
Options = dict[str, Any]

_WRITTEN = ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__setitem__")
_PLAIN = (Tensor, nn.Parameter)
_ATTRIBUTES = ("__get__", "__set__", "__delete__")  # attributes of tensors, such as ``grad``


class PlainOperands:
    """What an operation does with a plain tensor beside a DTensor.

    Args:
        place: a function of a plain tensor, a mesh and the operation's name that returns the tensor as a DTensor on
            the mesh, whole on each of its ranks; autograd passes through it.
        gather: a function of a DTensor that returns its value as a plain tensor on every rank.
    """

    def __init__(self, *, place: Callable[[Tensor, DeviceMesh, str], DTensor], gather: Callable[[DTensor], Tensor]):
        self._place, self._gather = place, gather
        self._meshes: WeakSet[DeviceMesh] = WeakSet()

    def accept(self, device_mesh: DeviceMesh) -> None:
        """Let plain tensors stand beside DTensors on this mesh.

        DTensors on other meshes are not affected: an operation that mixes them with plain tensors raises torch's error.
        """
        self._meshes.add(device_mesh)
        if DTensor.__torch_function__ is torch._C._disabled_torch_function_impl:
            DTensor.__torch_function__ = classmethod(self._run)  # type: ignore[assignment]

    def _run(
        self, cls: type, func: Callable[..., object], types: object, args: Arguments = (), kwargs: Options | None = None
    ) -> object:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name.startswith("_foreach_") and len({getattr(x, "device_mesh", None) for x in _leaves(args[0])}) > 1:
            return _one_by_one(func, args, kwargs)
        if name not in _ATTRIBUTES:
            args, kwargs = self._matched(name, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def _matched(self, name: str, args: Arguments, kwargs: Options) -> tuple[Arguments, Options]:
        """Return the arguments of a torch function, either all plain or all DTensors."""
        written = kwargs.get("out")
        if args and (name in _WRITTEN or (name.endswith("_") and not name.endswith("__"))):
            written = args[0]
        leaves = list(_leaves([args, kwargs]))
        mesh = next((x.device_mesh for x in leaves if isinstance(x, DTensor)), None)
        if mesh is None or mesh not in self._meshes:
            return args, kwargs
        if any(type(x) in _PLAIN for x in _leaves(written)):
            return self._gathered(args), self._gathered(kwargs)
        if any(_is_placed(x) for x in leaves):
            place = functools.partial(self._placed, mesh, name)
            return _mapped(args, place), _mapped(kwargs, place)
        return args, kwargs

    def _gathered(self, arguments: T) -> T:
        gathered: T = _mapped(arguments, lambda x: self._gather(x) if isinstance(x, DTensor) else x)
        return gathered

    def _placed(self, mesh: DeviceMesh, name: str, x: object) -> object:
        return self._place(x, mesh, name) if _is_placed(x) else x


def _is_placed(x: object) -> TypeGuard[Tensor]:
    """Return whether a plain tensor is placed on the mesh of the DTensors beside it."""
    # torch itself replicates a scalar. This is right if no gradient flows back to the scalar.
    return isinstance(x, Tensor) and type(x) in _PLAIN and (x.ndim > 0 or (x.requires_grad and torch.is_grad_enabled()))


def _one_by_one(func: Callable[..., Any], args: Arguments, kwargs: Options) -> list[object] | None:
    """Call an operation over lists, such as those of optimizers, once for each index of its lists."""
    count = len(args[0])

    def at(index: int) -> list[object]:
        return [[x[index]] if isinstance(x, list | tuple) and len(x) == count else x for x in args]

    results = [func(*at(index), **kwargs) for index in range(count)]
    return None if results[0] is None else [x for result in results for x in result]


def _leaves(value: object) -> Iterator[object]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value


def _mapped(value: Any, change: Callable[[object], object]) -> Any:
    if isinstance(value, list | tuple):
        return rebuilt(value, [_mapped(item, change) for item in value])
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    return change(value)
