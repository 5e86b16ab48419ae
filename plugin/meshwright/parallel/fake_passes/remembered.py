"""What passes without values have shown of a model, kept for later models that cannot show anything else.

A pass depends on the code of the model and on what its modules and configs hold. Both are compared in full: a model is
like another one if each module at each name has the same class, the same settings and weights of the same forms, and if
nobody has put other code into the classes and files that they use. What cannot be compared, such as a module of the
program, a hook or a function of its own, makes a model like no other, and its passes run.
"""

from __future__ import annotations

import enum
import functools
import os
import re
import sys
import sysconfig
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

from meshwright import facts as _own
from meshwright.facts import Facts, fact
from meshwright.roles import Decoder

T = TypeVar("T")
_LIBRARIES = {"torch", "transformers", "peft"}
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum, re.Pattern)
_EXACT = frozenset((bool, int, float, str, type(None), torch.dtype))
_CONTAINERS = frozenset((dict, OrderedDict, set, list, tuple))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MODULES = ("_parameters", "_buffers", "_modules")
# Where installed code is, and the names of code that Python has made itself.
_PLACES = (
    *{sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")},
    os.path.dirname(_own.__file__) + os.sep,
    "<",
)
_MOST = 64  # models, of which the last ones are kept

_kept: OrderedDict[Hashable, tuple[object, Any]] = OrderedDict()
_stock: OrderedDict[tuple[int, ...], tuple[object, bool]] = OrderedDict()


class _Unlike(Exception):
    """A model holds something that cannot be compared."""


def of_decoder(decoder: Decoder, what: str, find: Callable[[], T], *others: str) -> T:
    """Return what passes without values show of a decoder; see :func:`remembered`.

    Args:
        decoder: the decoder.
        what: what is asked.
        find: a function that runs the passes.
        others: the names of other modules that decide the answer.
    """
    names = decoder.facts.names
    parts = [*decoder.layers, decoder.embedding, *decoder.towers]
    ends = [None if x is None else names.get(x) for x in (decoder.final_norm, decoder.head)]
    return remembered(decoder.facts, (what, *(names.get(x) for x in parts), len(decoder.towers), *ends, others), find)


def remembered(facts: Facts, what: Hashable, find: Callable[[], T]) -> T:
    """Return what passes without values show of a model; they run unless they have run for one that is alike.

    Args:
        facts: what the model shows.
        what: what is asked, with all that decides it beside the model.
        find: a function that runs the passes. What it returns may hold modules of the model, and nothing else of it.
    """
    likeness = _likeness(facts)
    if likeness is None:
        return find()
    code, form = likeness
    autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
    key = what, tuple(map(id, code)), form, autocast, torch.get_default_dtype(), torch.get_default_device()
    if key in _kept:
        _kept.move_to_end(key)
        found: T = _with(_kept[key][1], lambda x: facts.modules[x.name] if isinstance(x, _Named) else x)
        return found
    result = find()
    try:
        named = _with(result, functools.partial(_named, facts))
    except _Unlike:
        return result
    _keep(_kept, key, (code, named))  # with the code, so that its ids stay its own
    return result


def forget() -> None:
    """Forget all that was seen."""
    _kept.clear()


def _keep(kept: OrderedDict[Any, Any], key: Hashable, value: object) -> None:
    kept[key] = value
    if len(kept) > _MOST:
        kept.popitem(last=False)


class _Named:
    """Stands in place of a module of some model."""

    def __init__(self, name: str):
        self.name = name


def _named(facts: Facts, x: Any) -> Any:
    if isinstance(x, nn.Module):
        if x not in facts.names:
            raise _Unlike
        return _Named(facts.names[x])
    if not isinstance(x, (*_PLAIN, type, TreeSpec)):
        raise _Unlike
    return x


def _with(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a value with others in the place of what it holds."""
    if isinstance(value, torch.Size):
        return value
    if type(value) is dict:
        return {_with(key, change): _with(x, change) for key, x in value.items()}
    if type(value) in (list, tuple, frozenset):
        return type(value)(_with(x, change) for x in value)
    if is_dataclass(value) and not isinstance(value, type) and type(value).__module__.startswith("meshwright."):
        return replace(value, **{field.name: _with(getattr(value, field.name), change) for field in fields(value)})
    return change(value)


@fact
def _likeness(facts: Facts) -> tuple[tuple[object, ...], Hashable] | None:
    """Return the code that a model runs and the form of all that it holds; None if they cannot be compared."""
    kinds = dict.fromkeys(type(module) for module in facts.names)
    if any(kind.__module__.partition(".")[0] not in _LIBRARIES for kind in kinds):
        return None
    if any(getattr(nn.modules.module, f"_global{name}") for name in _HOOKS):
        return None
    code = tuple(_code(kinds))
    try:
        form = _Form(facts).of_model()
    except _Unlike:
        return None
    ids = tuple(map(id, code))
    if ids not in _stock:
        _keep(_stock, ids, (code, not any(map(_is_of_program, code))))
    return (code, form) if _stock[ids][1] else None


def _code(kinds: Iterable[type]) -> Iterator[object]:
    """Yield all that the classes of a model and the files of their code hold."""
    bases = dict.fromkeys(base for kind in kinds for base in kind.__mro__)
    files = {base.__module__: None for base in bases}
    for base in (*bases, Tensor):
        yield base
        yield from vars(base).values()
    own = [sys.modules[name] for name in files if name in sys.modules and name != "builtins"]
    for file in list(own):
        for value in vars(file).values():
            name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            if isinstance(name, str) and name.partition(".")[0] == "transformers" and name in sys.modules:
                own.append(sys.modules[name])
    for file in dict.fromkeys((*own, torch.nn.functional)):
        yield file
        for name, value in vars(file).items():
            if not name.startswith("__"):  # such as the registry of warnings
                yield value
            if file.__name__.startswith("transformers.") and "Interface" in type(value).__name__:
                yield from (
                    x for x in map(value.get, value) if not getattr(x, "__module__", "").startswith("meshwright.")
                )


def _is_of_program(x: object) -> bool:
    """Return whether what a library's class or file holds is a function of the program, which may read what changes."""
    function = x.__func__ if isinstance(x, staticmethod | classmethod | MethodType) else x
    function = function.fget if isinstance(function, property) else function
    if isinstance(function, FunctionType):
        return not function.__code__.co_filename.startswith(_PLACES)
    return type(function).__module__.startswith("unittest.")


class _Form:
    """Describes what the modules of a model hold.

    Args:
        facts: what the model shows.
    """

    def __init__(self, facts: Facts):
        self._facts = facts
        self._places: dict[
            int, int
        ] = {}  # of what was described, by id, so that what is shared is told from what is equal
        self._described: list[object] = []  # so that no other object gets the id

    def of_model(self) -> Hashable:
        return tuple((name, self._of_module(name, module)) for name, module in self._facts.modules.items())

    def _of_module(self, name: str, module: nn.Module) -> Hashable:
        if self._facts.names[module] != name:
            return self._facts.names[module]
        held = vars(module)
        if any(held.get(name) for name in _HOOKS):
            raise _Unlike
        tensors = tuple(self._of_tensors(held["_parameters"])), tuple(self._of_tensors(held["_buffers"]))
        own = {name: x for name, x in held.items() if name not in _MODULES and name not in _HOOKS}
        return type(module), tensors, self.of(own)

    def _of_tensors(self, tensors: Mapping[str, Tensor | None]) -> Iterator[Hashable]:
        for name, x in tensors.items():
            yield name, None if x is None else self._of_tensor(x)

    def _of_tensor(self, x: Tensor) -> Hashable:
        if id(x) in self._places:
            return "again", self._places[id(x)]
        self._places[id(x)] = len(self._places)
        self._described.append(x)
        if type(x) not in (Tensor, nn.Parameter) or x.layout is not torch.strided:
            raise _Unlike
        return type(x), x.shape, x.stride(), x.dtype, x.device, x.requires_grad, self.of(vars(x))

    def of(self, x: Any) -> Any:
        """Return the form of what a module holds.

        Raises:
            _Unlike: if it cannot be compared.
        """
        kind = type(x)
        if kind in _EXACT or isinstance(x, _PLAIN):
            return kind, x
        if kind in _CONTAINERS and not x:
            return kind
        if isinstance(x, type):
            return x
        if isinstance(x, nn.Module):
            if x not in self._facts.names:
                raise _Unlike
            return "module", self._facts.names[x]
        if isinstance(x, Tensor):
            return self._of_tensor(x)
        if isinstance(x, MethodType):
            return "method", self.of(x.__func__), self.of(x.__self__)
        if isinstance(x, FunctionType | BuiltinFunctionType):
            if (x.__module__ or "torch").partition(".")[0] not in _LIBRARIES or getattr(x, "__closure__", None):
                raise _Unlike
            return x
        return self._of_object(x)

    def _of_object(self, x: Any) -> Hashable:
        """Return the form of a container, or of an object of a library such as a config."""
        if id(x) in self._places:
            return "again", self._places[id(x)]
        self._places[id(x)] = len(self._places)
        self._described.append(x)
        if isinstance(x, functools.partial):
            return "partial", self.of(x.func), self.of(x.args), self.of(x.keywords)
        if isinstance(x, set | frozenset):
            return type(x), frozenset(map(self.of, x))
        if isinstance(x, list | tuple):
            return type(x), tuple(map(self.of, x))
        if type(x) in (dict, OrderedDict):
            return type(x), tuple((self.of(key), self.of(value)) for key, value in x.items())
        if type(x).__module__.partition(".")[0] not in _LIBRARIES or not hasattr(x, "__dict__"):
            raise _Unlike
        if isinstance(x, dict) and x:
            raise _Unlike
        return type(x), self.of(vars(x))
