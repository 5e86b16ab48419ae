"""Divides a model into the units of ZeRO stage 3, whose weights are gathered together."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from meshwright.optim.zero.read_weights import read_weights


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
