"""Divides a model into the units of ZeRO stage 3, whose weights are gathered together.

A module's own code may read weights of a child without calling the child. DeBERTa's encoder norms its table of relative
positions, the towers of some models add a table of positions, and ProphetNet's decoder calls another method of its
table than forward. Under ZeRO stage 3 such a weight must have its values while the module runs, so it is in the units
of both.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Iterator
from types import FunctionType

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

_WEIGHTS = ("weight", "bias")
_KNOWN = {"dtype", "device", "shape", "size", "numel", "ndim", "data", "is_meta"}  # without a weight's values
_NO_FORWARD = ("__", "_init", "set_", "resize", "tie")


def units_of(model: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """Yield the module of each unit, in order, and whether the modules inside it belong to the unit.

    The units are the members of the outermost module lists, and all other modules with parameters of their own. If a
    member is a container that is not called, such as a list of its own, the units are those inside of it. Some
    modules do not call what is inside of them, so its parameters belong to their unit: containers of parameters, the
    output projection of torch's attention, and what a parametrization computes a weight from. A weight of a child that
    a module's own code reads is in the units of both.
    """
    seen: set[int] = set()
    for module, recurse in _walk(model):
        if id(module) not in seen:
            seen.add(id(module))
            yield module, recurse


def _walk(module: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    if isinstance(module, nn.ModuleList):
        for member in module:
            if _is_container(member):
                yield from _walk(member)
            else:
                yield member, True
        return
    reads_children = is_parametrized(module) or isinstance(module, nn.MultiheadAttention)
    if reads_children or any(map(_is_part_of_parent, module.children())):
        yield module, True
        return
    if next(module.parameters(recurse=False), None) is not None or read_weights(module):
        yield module, False
    for child in module.children():
        yield from _walk(child)


def _is_container(module: nn.Module) -> bool:
    """Return whether a module only holds others, and is not called itself, such as a list of the parts of a layer."""
    return type(module).forward is nn.Module.forward and "forward" not in vars(module)


def _is_part_of_parent(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList):
        return next(module.parameters(recurse=False), None) is not None
    return isinstance(module, nn.ParameterDict | nn.ParameterList)


def read_weights(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of children that a module reads in its own methods.

    It reads ``self.child.weight``, or calls a method of the child's own class, ``self.child.method()``.
    """
    found: list[nn.Parameter] = []
    for path, name in _reads(type(module)):
        try:
            owner = module.get_submodule(path)
        except AttributeError:
            continue
        own = owner._parameters.values() if _is_method(owner, name) else [owner._parameters.get(name)]
        found += [p for p in own if p is not None and (p.is_floating_point() or p.is_complex())]
    return list(dict.fromkeys(found))


def _is_method(owner: nn.Module, name: str) -> bool:
    """Return whether a name is that of a method that runs a part of a forward pass."""
    method = inspect.unwrap(getattr(type(owner), name, _is_method))
    is_stock = not isinstance(method, FunctionType) or method.__module__.startswith(("torch.", __name__))
    return not is_stock and not name.startswith(("forward", *_NO_FORWARD))


def _reads(kind: type[nn.Module]) -> tuple[tuple[str, str], ...]:
    """Return the paths of children, and the names of their weights, in the code of a class outside of torch."""
    kinds = [k for k in kind.__mro__ if issubclass(k, nn.Module) and not k.__module__.startswith("torch.")]
    methods = {name: value for k in reversed(kinds) for name, value in vars(k).items()}
    codes = [inspect.unwrap(x) for name, x in methods.items() if callable(x) and not name.startswith(_NO_FORWARD)]
    return tuple(dict.fromkeys(read for code in codes if isinstance(code, FunctionType) for read in _reads_of(code)))


@functools.cache
def _reads_of(function: FunctionType) -> tuple[tuple[str, str], ...]:
    return tuple(_read_paths(function))


def _read_paths(function: FunctionType) -> Iterator[tuple[str, str]]:
    path: list[str] | None = None  # the attributes of self that were just read
    for step in dis.get_instructions(function):
        is_attribute = step.opname in ("LOAD_ATTR", "LOAD_METHOD")
        if path is not None and len(path) > 1 and not (path[-1] in _WEIGHTS and is_attribute and step.argval in _KNOWN):
            yield ".".join(path[:-1]), path[-1]
        if is_attribute and path is not None:
            path.append(step.argval)
        else:
            path = [] if step.opname.startswith("LOAD_FAST") and step.argval == "self" else None
