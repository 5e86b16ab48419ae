"""Finds the weights of a module's children that the module's own code reads, without calling the child.

DeBERTa's encoder norms its table of relative positions, and the towers of some models add a table of positions. Under
ZeRO stage 3 such a weight must have its values while the module runs.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Iterator
from types import FunctionType

from torch import nn

_WEIGHTS = ("weight", "bias")
_KNOWN = {"dtype", "device", "shape", "size", "numel", "ndim", "data", "is_meta"}  # without a weight's values
_NO_FORWARD = ("__", "_init", "set_", "resize", "tie")


def read_weights(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of children that a module reads in its own methods, as ``self.child.weight``."""
    found = []
    for path, name in _reads(type(module)):
        try:
            owner = module.get_submodule(path)
        except AttributeError:
            continue
        parameter = owner._parameters.get(name)
        if parameter is not None and parameter.is_floating_point():
            found.append(parameter)
    return found


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
        if path is not None and len(path) > 1 and path[-1] in _WEIGHTS and not (is_attribute and step.argval in _KNOWN):
            yield ".".join(path[:-1]), path[-1]
        if is_attribute and path is not None:
            path.append(step.argval)
        else:
            path = [] if step.opname.startswith("LOAD_FAST") and step.argval == "self" else None
