"""Tells what a program brought from the code of the libraries, by the code that runs and not by names.

Modules, the steps of optimizers and hooks are told alike.

The project's tests show that tp computes the libraries' own families as one device does. Nothing shows this of what
the program brought: a class or a function of its own, one that it put in place of a library's, or a combination that
no library makes. The rehearsal tries these.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import typing_extensions
from torch import nn

from meshwright.errors import PACKAGES
from meshwright.roles.linear_kernel import form_of

# What these put into a model is not the program's.
LIBRARIES = {
    *PACKAGES, "torch", "transformers", "peft", "trl", "accelerate", "deepspeed", "bitsandbytes", "torchao",
}  # fmt: skip
_roots: dict[str, str] = {}  # the folders of those that were imported
_PYTHON = os.path.dirname(os.__file__) + os.sep
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)

# The classes of torch that compute each channel by itself, or whose weights have a role of their own.
_LEAVES = frozenset(
    (
        nn.Linear, nn.Embedding, nn.Conv1d, nn.Dropout, nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU,
        nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.LogSigmoid, nn.Tanh, nn.Softplus, nn.Softsign,
        nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Threshold, nn.Tanhshrink, nn.Softshrink, nn.Hardshrink,
    )
)  # fmt: skip
_OF_EACH_CHANNEL = frozenset(kind.__name__.lower() for kind in _LEAVES)
_NORMS = (nn.LayerNorm, nn.RMSNorm)


class Brought:
    """Finds the modules that a program brought.

    The answers are kept as long as the object, since a program may replace a class's methods at any time.

    Example:
        >>> class Halved(nn.Linear):
        ...     def forward(self, x):
        ...         return super().forward(x) / 2
        >>> Brought().inside(nn.Sequential(nn.Linear(2, 2), Halved(2, 2)))
        ['1']
    """

    def __init__(self) -> None:
        for library in (LIBRARIES - _roots.keys()) & sys.modules.keys():
            if file := getattr(sys.modules[library], "__file__", None):
                _roots[library] = os.path.dirname(file) + os.sep
        self._prefixes = tuple(_roots.values())
        self._stock: dict[type, bool] = {}

    def inside(self, module: nn.Module) -> list[str]:
        """Return the names of the modules that the program brought, in a module; ``""`` is the module itself."""
        return [name for name, inner, owner in _with_owners(module) if not self._is_stock(inner, owner)]

    def with_own_code(self, module: nn.Module) -> list[str]:
        """Return the names of those of them that run code of the program; the others are a library's classes."""
        return [name for name, inner, _ in _with_owners(module) if not self._has_stock_code(inner)]

    def code_of(self, module: nn.Module) -> types.CodeType | None:
        """Return the program's code in a module's forward, or the library's if all is a library's."""
        found = list(codes_of(module.forward))
        return next((code for code in found if not self.is_of_library(code.co_filename)), next(iter(found), None))

    def source_of(self, module: nn.Module) -> str:
        """Return a module's class, and the line at which the program's code of its forward begins."""
        code = self.code_of(module)
        place = "" if code is None else f", {os.path.basename(code.co_filename)}:{code.co_firstlineno}"
        return f"{type(module).__name__}{place}"

    def is_own(self, function: Callable[..., Any], around: object = None) -> bool:
        """Return whether a callable runs code of the program, in itself or in a function that it holds.

        Args:
            function: the callable.
            around: a function that it may hold, whoever has written that.
        """
        held = set(codes_of(around))
        return any(not self.is_of_library(code.co_filename) for code in codes_of(function) if code not in held)

    def is_of_library(self, file: str) -> bool:
        """Return whether a file with code is a library's or Python's."""
        of_python = file.startswith((_PYTHON, "<frozen ")) and "-packages" not in file
        return of_python or file.startswith(self._prefixes) or file == typing_extensions.__file__  # of decorators

    def _is_stock(self, module: nn.Module, owner: nn.Module | None) -> bool:
        return self._has_stock_code(module) and self._fits(module, owner)

    def _has_stock_code(self, module: nn.Module) -> bool:
        return self.is_stock_class(type(module)) and self._has_stock_attributes(module)

    def is_stock_class(self, kind: type) -> bool:
        """Return whether all that a class and its bases do is code of the libraries, which calls only such code."""
        if kind not in self._stock:
            of_libraries = [base for base in kind.__mro__ if base not in (nn.Module, object)]
            functions = [x for base in of_libraries for x in vars(base).values() if callable(x) or _is_descriptor(x)]
            functions = [x for x in functions if not isinstance(x, type)]
            self._stock[kind] = not any(self.is_own(x) or self._calls_own(x) for x in functions)
        return self._stock[kind]

    def _calls_own(self, function: Any) -> bool:
        """Return whether a function calls one that the program has put into the module of a library."""
        seen: set[int] = set()
        queue = [function]
        while queue:
            for code, names in _codes_with_globals(queue.pop()):
                if names is None or id(code) in seen:
                    continue
                seen.add(id(code))
                for called in filter(None, map(names.get, code.co_names)):
                    if isinstance(called, types.FunctionType):
                        if self.is_own(called):
                            return True
                        if called.__globals__ is names:
                            queue.append(called)
                    elif _is_registry(called) and any(map(self.is_own, filter(callable, called.values()))):
                        return True
        return False

    def _has_stock_attributes(self, module: nn.Module) -> bool:
        """Return whether no function is kept in a module that its class did not put there, such as another forward."""
        own = (x for x in vars(module).values() if callable(x) and not isinstance(x, type | nn.Module))
        return not any(self.is_own(x) or _mixes_channels(x) for x in own)

    def _fits(self, module: nn.Module, owner: nn.Module | None) -> bool:
        """Return whether libraries put such a module into one of the owner's class."""
        kind = type(module)
        if owner is None or kind in _LEAVES or isinstance(module, _CONTAINERS) or form_of(module) is not None:
            return True
        if kind in _NORMS:
            return bool(module._parameters.get("weight") is not None)
        file = _file_of(kind)
        if file.startswith(_roots.get("transformers", "/")):
            return file in map(_file_of, type(owner).__mro__) or os.path.basename(file) == "activations.py"
        return not file.startswith(_roots["torch"]) or "parametrize" in file


def codes_of(function: Any) -> Iterator[types.CodeType]:
    """Yield the code of a callable, and of the functions that it wraps or holds."""
    return (code for code, _ in _codes_with_globals(function))


def _codes_with_globals(function: Any) -> Iterator[tuple[types.CodeType, dict[str, Any] | None]]:
    queue, seen = [function], set[int]()
    while queue:
        x = queue.pop(0)
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, functools.partial | functools.partialmethod):
            queue += [x.func, *filter(callable, x.args), *filter(callable, x.keywords.values())]
        elif isinstance(x, types.MethodType | staticmethod | classmethod):
            queue.append(x.__func__)
        elif isinstance(x, property):
            queue += [one for one in (x.fget, x.fset) if one is not None]
        elif isinstance(x, types.FunctionType):
            yield x.__code__, x.__globals__
            queue += [cell for cell in map(_held, x.__closure__ or ()) if isinstance(cell, _CALLABLES)]
        elif not isinstance(x, type | nn.Module) and (callable(x) or _is_descriptor(x)):
            queue += [
                *(one for name in ("__call__", "__get__") if (one := getattr(type(x), name, None)) is not None),
                *(one for one in getattr(x, "__dict__", {}).values() if isinstance(one, _CALLABLES)),
            ]


_CALLABLES = (types.FunctionType, types.MethodType, functools.partial)


def _mixes_channels(function: Any) -> bool:
    """Return whether a callable is a function of C, such as torch.softmax, that may read all channels."""
    while isinstance(function, functools.partial):
        function = function.func
    return isinstance(function, types.BuiltinFunctionType) and function.__name__ not in _OF_EACH_CHANNEL


def _held(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


def _is_descriptor(x: object) -> bool:
    return hasattr(type(x), "__get__")


def _is_registry(x: object) -> bool:
    """Return whether a global is a table of functions by name, such as that of attentions."""
    return isinstance(x, Mapping) and not isinstance(x, dict) and type(x).__name__ != "_LazyModule"


def kind_of(layer: nn.Module, index: int) -> object:
    """Return what two layers have in common that are tried as one: classes, code, sizes and options.

    Args:
        layer: the layer.
        index: its place, which layers know.
    """
    return tuple(one for name, module in layer.named_modules() for one in _traits(name, module, index))


def _traits(name: str, module: nn.Module, index: int) -> Iterator[object]:
    yield name, type(module), tuple(codes_of(module.forward))
    yield from ((n, p.shape) for n, p in module._parameters.items() if p is not None)
    numbered = ((n, x) for n, x in vars(module).items() if not (type(x) is int and x == index))
    yield from ((n, x) for n, x in numbered if isinstance(x, bool | int | float | str))


def _file_of(kind: type) -> str:
    module = sys.modules.get(kind.__module__)
    return getattr(module, "__file__", None) or ""


def _with_owners(module: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module | None]]:
    """Yield each module once, with its name and the module around it that is no container."""
    queue: list[tuple[str, nn.Module, nn.Module | None]] = [("", module, None)]
    seen: set[int] = set()
    while queue:
        name, inner, owner = queue.pop(0)
        if id(inner) in seen:
            continue
        seen.add(id(inner))
        yield name, inner, owner
        # An adapter's wrapper stands in the place of what is inside of it.
        around = owner if isinstance(inner, _CONTAINERS) or "base_layer" in inner._modules else inner
        queue += [(f"{name}.{n}".lstrip("."), m, around) for n, m in inner._modules.items() if m is not None]
