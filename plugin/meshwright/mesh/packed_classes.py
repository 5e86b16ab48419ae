"""The classes of which packed values may have instances: dataclasses, named tuples and mappings.

An instance is taken apart and put together without calling anything of its class, so what another process has sent runs
no code, whichever class it names.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any


def form_of(kind: type) -> str | None:
    """Return what an instance of a class is built from: "tuple", "dict" or "object"; None for unsupported classes."""
    if hasattr(kind, "__del__"):  # would run when the reader drops the value
        return None
    if issubclass(kind, tuple):
        return "tuple" if hasattr(kind, "_fields") else None
    if issubclass(kind, dict):
        # The factory of a defaultdict is neither an item nor an attribute.
        return "dict" if kind.__new__ is dict.__new__ and not issubclass(kind, collections.defaultdict) else None
    is_record = dataclasses.is_dataclass(kind) or issubclass(kind, collections.UserDict)
    return "object" if is_record and kind.__new__ is object.__new__ else None


def class_named(module: str, name: str) -> type:
    """Return a class by the name of its module, which must be loaded: importing a module would run its code.

    Raises:
        ValueError: the module is not loaded, or has no such class.
    """
    found: object = sys.modules.get(module)
    for part in name.split("."):
        # Not getattr, which in some modules imports others.
        found = vars(found).get(part) if isinstance(found, type | types.ModuleType) else None
    if not isinstance(found, type):
        raise ValueError(f"this program has loaded no class {module}.{name}")
    return found


def contents_of(value: Any) -> list[Any] | dict[Any, Any]:
    """Return the items of an instance, apart from its attributes."""
    kind = type(value)
    match form_of(kind):
        case "tuple":
            return list(tuple.__iter__(value))
        case "dict":
            return dict(_table_base(kind).items(value))
        case _:
            return []


def attributes_of(value: object) -> dict[str, Any]:
    """Return the attributes of an instance, by name."""
    found = dict(getattr(value, "__dict__", {}))
    for name, slot in _slots(type(value)).items():
        try:
            found[name] = slot.__get__(value)
        except AttributeError:  # a slot without a value
            continue
    return found


def built(kind: type, contents: Iterable[Any], attributes: Mapping[str, Any]) -> Any:
    """Return an instance with these items and attributes.

    Raises:
        ValueError: the class is not supported, or has no such attributes.
    """
    value: Any
    match form_of(kind):
        case "tuple":
            value = tuple.__new__(kind, contents)
        case "dict":
            base: Any = _table_base(kind)
            value = base.__new__(kind)
            for key, item in contents:
                base.__setitem__(value, key, item)
        case "object":
            value = object.__new__(kind)
        case _:
            raise ValueError(f"a packed value has the class {kind.__module__}.{kind.__qualname__}")
    slots = _slots(kind)
    # Do not use setattr: it would run the setter of a property, and would set __class__.
    own = getattr(value, "__dict__", None)
    for name, item in attributes.items():
        if name in slots:
            slots[name].__set__(value, item)
        elif type(own) is dict:
            own[name] = item
        else:
            raise ValueError(f"{kind.__qualname__} has no attribute {name!r}")
    return value


def _table_base(kind: type) -> type[dict[Any, Any]]:
    """Return the class whose methods, unlike those of a subclass, only read and write the items of a mapping."""
    return collections.OrderedDict if issubclass(kind, collections.OrderedDict) else dict


def _slots(kind: type) -> dict[str, types.MemberDescriptorType]:
    found = {name: slot for base in reversed(kind.__mro__) for name, slot in vars(base).items()}
    return {name: slot for name, slot in found.items() if isinstance(slot, types.MemberDescriptorType)}
