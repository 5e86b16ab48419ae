"""Packs values into bytes without pickle, with the classes that they may have, so that reading them runs no code.

The bytes hold the memory of the tensors, arrays and long lists of numbers, then a JSON text that describes the value,
and the length of this text. ``_FORMS`` has the types that can be packed: the parts that a value is taken apart into,
and how the reader makes it of them again. The reader checks the types of the parts before it uses any.

Dataclasses, named tuples and mappings keep their class, which the reader looks up among the classes that its own
program has loaded. It calls nothing of the class, not even ``__init__``, so what another process has sent runs no code,
whichever class it names. ``torch.load(weights_only=True)`` is no substitute: it calls the classes that it allows, fills
no mapping of the program's own class, and takes several times as long for a batch.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import functools
import json
import math
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_DEPTH = 100  # containers within containers; json itself fails at some depth that depends on the program's stack
_JSON = json.JSONEncoder(separators=(",", ":"), check_circular=False)  # the depth is checked
_LONG = 16  # lists of more numbers than this travel as memory, not as text
_ADVICE = (
    "Meshwright does not send between processes, since only pickle could. Return tensors, arrays, numbers, text, and "
    "lists, tuples, dicts, dataclasses or named tuples of these from the dataset and the collate function"
)


class UnsupportedValue(ValueError):
    """A value has a type that cannot be packed."""


def pack(value: object, name: str = "value") -> Tensor:
    """Return a value as a uint8 tensor on the CPU, from which ``unpack`` makes an equal value.

    Numbers, text, bytes, None, lists, tuples, sets, dicts, tensors of any layout, NumPy arrays, PIL images, dates,
    dataclasses, named tuples and mappings can be packed, and all that consists of them. Tensors come back on the CPU,
    without gradients.

    Args:
        value: the value.
        name: its name in the message of an error.

    Raises:
        UnsupportedValue: the value has a part of another type, or a container holds itself. The message names the
            part.

    Example:
        >>> unpack(pack({"x": (1, 2.5), "y": torch.ones(2)}))
        {'x': (1, 2.5), 'y': tensor([1., 1.])}
    """
    writer = _Writer()
    text = _JSON.encode(writer.described(value, name, 0)).encode()
    return torch.cat([*writer.memory, _memory(text), torch.tensor([len(text)]).view(torch.uint8)])


def unpack(payload: Tensor) -> Any:
    """Return the value that ``pack`` packed; its tensors share no memory with the payload.

    Raises:
        ValueError: the payload is not what ``pack`` returns, or has a class that this program has not loaded.
    """
    length = int.from_bytes(bytes(payload[-8:].tolist()), "little")
    if not 0 < length <= len(payload) - 8:
        raise ValueError(f"a packed value of {len(payload)} bytes claims a description of {length} bytes")
    start = len(payload) - 8 - length
    try:
        return _read(json.loads(bytes(payload[start:-8].numpy())), payload[:start])
    except (LookupError, TypeError, AttributeError, RuntimeError, ArithmeticError, ImportError) as error:
        raise ValueError(f"not a packed value: {error!r}") from error


class _Writer:
    """Describes a value for JSON, and collects the memory that the description refers to."""

    def __init__(self) -> None:
        self.memory: list[Tensor] = []
        self._filled = 0

    def described(self, value: Any, name: str, depth: int) -> Any:
        kind = type(value)
        if value is None or kind in (bool, str, float) or (kind is int and -(2**63) <= value < 2**63):
            return value
        if depth > _DEPTH:
            raise UnsupportedValue(f"{_cut(name)} is more than {_DEPTH} containers deep, or holds itself")
        if (
            kind is Tensor
            and value.dtype is torch.uint8
            and value.ndim == 1
            and value.layout is torch.strided
            and not value.is_meta
        ):
            self.memory.append(value.detach().cpu())
            self._filled += len(value)
            return {"memory": [self._filled - len(value), len(value)]}
        form, parts = _apart(value, name)
        described = []
        for number, part in enumerate(parts):
            if type(part) not in (str, float, bool, type(None)):
                if kind is dict:
                    which = f"{name}[{parts[number - 1]!r}]" if number % 2 else f"a key of {name}"
                else:
                    which = f"{name}[{number}]" if not form or _FORMS[form].kinds is None else name
                part = self.described(part, which, depth + 1)
            described.append(part)
        return {form: described} if form else described


def _read(described: Any, memory: Tensor) -> Any:
    """Return the value of a description."""
    if type(described) is list:
        return [_read(part, memory) if type(part) in (dict, list) else part for part in described]
    if type(described) is not dict:
        return described
    ((form, parts),) = described.items()
    if type(parts) is not list:
        raise ValueError(f"a packed value has no list of the parts of a {_cut(str(form))}")
    if form == "memory":
        start, length = parts
        if not (type(start) is int and type(length) is int and 0 <= start <= start + length <= len(memory)):
            raise ValueError(f"a packed value refers to bytes {start} to {start + length} of {len(memory)}")
        return memory[start : start + length].clone()
    _, _, kinds, made = _FORMS[form]
    values = _read(parts, memory)
    # Using a part of another class would run code of that class.
    if kinds is not None and [type(part) for part, kind in zip(values, kinds, strict=True) if kind is not object] != [
        kind for kind in kinds if kind is not object
    ]:
        raise ValueError(f"a packed {form} has parts of the types {[type(part).__name__ for part in values]}")
    return made(*values)


def _apart(value: Any, name: str) -> tuple[str, Sequence[Any]]:
    """Return the form of a value, which is empty for a list, and its parts."""
    kind = type(value)
    if kind is list:
        return _list(value)
    if kind in (set, frozenset, dict):
        for key in value:
            _key(key, name)
    if kind in _FORM_OF:
        form = _FORM_OF[kind]
        return form, _FORMS[form].parts(value)
    if isinstance(value, Tensor):
        return _tensor(value, name)
    if isinstance(value, np.ndarray | np.generic):
        return _array(value, name)
    if kind is collections.defaultdict and value.default_factory in _FACTORIES.values():
        return "defaultdict", [value.default_factory.__name__, dict(value)]
    image = sys.modules.get("PIL.Image")
    if image is not None and isinstance(value, image.Image):
        palette = value.getpalette() if value.mode == "P" else None
        return "image", [value.mode, list(value.size), _memory(value.tobytes()), _memory(bytes(palette or []))]
    return "object", _object(value, name)


def _list(value: list[Any]) -> tuple[str, Sequence[Any]]:
    kinds = set(map(type, value)) if len(value) > _LONG else set()
    if kinds == {float}:
        return "floats", [torch.tensor(value, dtype=torch.float64).view(torch.uint8)]
    if kinds == {int} and min(value) >= -(2**63) and max(value) < 2**63:
        return "ints", [torch.tensor(value, dtype=torch.int64).view(torch.uint8)]
    return "", value


def _tensor(x: Tensor, name: str) -> tuple[str, Sequence[Any]]:
    # A parameter is a tensor with a flag; other classes may have behaviour that would be lost.
    if not (type(x) in (Tensor, torch.nn.Parameter) or x.is_nested) or x.is_quantized or x.is_meta:
        kind = "quantized" if x.is_quantized else "meta" if x.is_meta else type(x).__name__
        raise UnsupportedValue(f"{_cut(name)} is a tensor of the kind {kind}, which {_ADVICE}")
    x = x.detach().cpu().resolve_conj().resolve_neg()
    if x.is_nested:
        return "nested", [str(x.layout), list(x.unbind())]
    if x.layout in _COMPRESSED:
        indices = [getattr(x, part)() for part in _COMPRESSED[x.layout]]
        return "compressed", [str(x.layout), list(x.shape), *indices, x.values()]
    if x.layout is torch.sparse_coo:
        return "coo", [list(x.shape), x.is_coalesced(), x._indices(), x._values()]
    if x.layout is not torch.strided:
        raise UnsupportedValue(f"{_cut(name)} is a tensor of the layout {x.layout}, which {_ADVICE}")
    return "tensor", [str(x.dtype), list(x.shape), x.contiguous().reshape(-1).view(torch.uint8)]


def _array(value: Any, name: str) -> tuple[str, Sequence[Any]]:
    array = np.asarray(value)
    if isinstance(value, np.ma.MaskedArray) or array.dtype.kind not in "biufcSUMmO":
        raise UnsupportedValue(f"{_cut(name)} is a {type(value).__name__} of dtype {array.dtype}, which {_ADVICE}")
    if array.dtype.kind == "O":
        return "objects", [list(array.shape), array.reshape(-1).tolist()]
    return "array", [array.dtype.str, list(array.shape), isinstance(value, np.generic), _memory(array.tobytes())]


def _object(value: Any, name: str) -> Sequence[Any]:
    """Return the class of an instance by name, its items and its attributes."""
    kind: Any = type(value)
    base = _base(kind)
    if base is None:
        raise UnsupportedValue(f"{_cut(name)} is a {kind.__module__}.{kind.__qualname__}, which {_ADVICE}")
    known: Any = _class_named(kind.__module__, kind.__qualname__)
    if known is not kind:
        raise UnsupportedValue(
            f"{_cut(name)} is a {kind.__qualname__}, a class that other processes cannot find by its name; define it "
            f"at the top of the module {kind.__module__}"
        )
    attributes = dict(getattr(value, "__dict__", {}))
    for field, slot in _slots(kind).items():
        try:
            attributes[field] = slot.__get__(value)
        except AttributeError:  # a slot without a value
            continue
    items: Any = [] if base is object else list(tuple.__iter__(value)) if base is tuple else dict(base.items(value))
    return [kind.__module__, kind.__qualname__, items, attributes]


def _made_object(module: str, name: str, items: Any, attributes: dict[str, Any]) -> Any:
    """Return an instance with these items and attributes, without calling anything of its class."""
    kind: Any = _class_named(module, name)
    base: Any = None if kind is None else _base(kind)
    if kind is None or base is None or type(items) is not (list if base in (tuple, object) else dict):
        raise ValueError(f"a packed value has the class {module}.{name}, which is not loaded, or cannot be packed")
    value = tuple.__new__(kind, items) if base is tuple else base.__new__(kind)
    if type(items) is dict:
        for key, item in items.items():
            base.__setitem__(value, key, item)
    # Do not use setattr: it would run the setter of a property, and would set __class__.
    slots, own = _slots(kind), getattr(value, "__dict__", None)
    for field, item in attributes.items():
        if field in slots:
            slots[field].__set__(value, item)
        elif type(own) is dict and type(field) is str:
            own[field] = item
        else:
            raise ValueError(f"{kind.__qualname__} has no attribute {field!r}")
    return value


def _base(kind: type) -> Any:
    """Return the class whose methods, unlike those of a subclass, only make, read and fill; None if unsupported."""
    if hasattr(kind, "__del__"):  # would run when the reader drops the value
        return None
    if issubclass(kind, tuple):
        return tuple if hasattr(kind, "_fields") else None
    if issubclass(kind, dict):
        # The factory of a defaultdict is neither an item nor an attribute.
        if kind.__new__ is not dict.__new__ or issubclass(kind, collections.defaultdict):
            return None
        return collections.OrderedDict if issubclass(kind, collections.OrderedDict) else dict
    is_record = dataclasses.is_dataclass(kind) or issubclass(kind, collections.UserDict)
    return object if is_record and kind.__new__ is object.__new__ else None


def _class_named(module: str, name: str) -> type | None:
    """Return a class of a module that is loaded, since importing a module would run its code; None without one."""
    found: object = sys.modules.get(module)
    for part in name.split("."):
        # Not getattr, which in some modules imports others.
        found = vars(found).get(part) if isinstance(found, type | types.ModuleType) else None
    return found if isinstance(found, type) else None


@functools.lru_cache(maxsize=256)
def _slots(kind: Any) -> dict[str, types.MemberDescriptorType]:
    found = {name: slot for base in reversed(kind.__mro__) for name, slot in vars(base).items()}
    return {name: slot for name, slot in found.items() if isinstance(slot, types.MemberDescriptorType)}


def _key(value: Any, name: str = "a packed value") -> Any:
    if not _is_key(value):
        raise UnsupportedValue(f"a key of {_cut(name)} is a {type(value).__name__}; use text or numbers as keys")
    return value


def _is_key(value: Any) -> bool:
    """Return whether the hash of a value, and of all that it holds, is Python's or NumPy's own code."""
    if type(value) in (tuple, frozenset):
        return all(map(_is_key, value))
    return type(value).__module__ in ("builtins", "numpy", "datetime", "decimal", "torch")


def _memory(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)[: len(content)]


def _bytes(memory: Tensor) -> bytes:
    return memory.numpy().tobytes()


def _cut(name: str) -> str:
    return name if len(name) <= 200 else f"{name[:200]}..."


def _sizes(shape: Sequence[int]) -> list[int]:
    if not all(type(size) is int and size >= 0 for size in shape) or math.prod(shape) >= 2**62:
        raise ValueError(f"a packed value has the shape {shape}")
    return list(shape)


def _made_tensor(dtype: str, shape: list[int], memory: Tensor) -> Tensor:
    return (memory.view(_DTYPES[dtype]) if len(memory) else torch.empty(0, dtype=_DTYPES[dtype])).reshape(_sizes(shape))


def _made_nested(layout: str, rows: list[Any]) -> Tensor:
    if not all(type(row) is Tensor for row in rows):
        raise ValueError("a packed nested tensor has rows that are no tensors")
    return torch.nested.nested_tensor(rows, layout=_LAYOUTS[layout])


def _made_compressed(layout: str, shape: list[int], outer: Tensor, inner: Tensor, values: Tensor) -> Tensor:
    return torch.sparse_compressed_tensor(
        outer, inner, values, _sizes(shape), layout=_LAYOUTS[layout], check_invariants=True
    )


def _made_coo(shape: list[int], is_coalesced: bool, indices: Tensor, values: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(indices, values, _sizes(shape), is_coalesced=is_coalesced, check_invariants=True)


def _made_array(dtype: str, shape: list[int], is_scalar: bool, memory: Tensor) -> Any:
    found = np.dtype(dtype)
    if found.kind not in "biufcSUMm":
        raise ValueError(f"a packed array has the dtype {dtype}")
    array = np.frombuffer(_bytes(memory), dtype=found).reshape(_sizes(shape)).copy()
    return array[()] if is_scalar else array


def _made_objects(shape: list[int], items: list[Any]) -> Any:
    array = np.empty(len(items), dtype=object)
    for number, item in enumerate(items):
        array[number] = item
    return array.reshape(_sizes(shape))


def _made_image(mode: str, size: list[int], memory: Tensor, palette: Tensor) -> Any:
    from PIL import Image

    width, height = _sizes(size)
    # Pillow takes the memory of the whole image before it counts the bytes; no mode has less than a bit per pixel.
    if 8 * len(memory) < width * height:
        raise ValueError(f"an image of {width} x {height} pixels in {len(memory)} bytes")
    image = Image.frombytes(mode, (width, height), _bytes(memory))
    if len(palette):
        image.putpalette(_bytes(palette))
    return image


class _Form(NamedTuple):
    """How values of a type are taken apart and made again.

    Args:
        kind: the type; None if ``_apart`` tells the form by other means.
        parts: function that takes a value apart.
        kinds: the type of each part; None for any number of any values.
        made: function that makes the value of its parts.
    """

    kind: type | None
    parts: Callable[[Any], Sequence[Any]]
    kinds: tuple[type, ...] | None
    made: Callable[..., Any]


def _attributes(kind: type, part: type, *names: str) -> _Form:
    return _Form(kind, lambda value: [getattr(value, name) for name in names], (part,) * len(names), kind)


def _text(kind: type, written: Callable[[Any], str], made: Callable[[str], Any]) -> _Form:
    return _Form(kind, lambda value: [written(value)], (str,), made)


def _by_apart(made: Callable[..., Any], *kinds: type) -> _Form:
    return _Form(None, lambda value: [], kinds, made)


_COMPRESSED: Mapping[torch.layout, tuple[str, str]] = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}
_LAYOUTS = {str(layout): layout for layout in (torch.strided, torch.jagged, torch.sparse_coo, *_COMPRESSED)}
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_FACTORIES = {kind.__name__: kind for kind in (list, dict, set, int, float, str)}  # of a defaultdict
_FORMS: Mapping[str, _Form] = {
    "tuple": _Form(tuple, list, None, lambda *items: items),
    "set": _Form(set, list, None, lambda *items: set(map(_key, items))),
    "frozenset": _Form(frozenset, list, None, lambda *items: frozenset(map(_key, items))),
    "dict": _Form(
        dict,
        lambda value: [part for pair in value.items() for part in pair],
        None,
        lambda *parts: dict(zip(map(_key, parts[::2]), parts[1::2], strict=True)),
    ),
    "size": _Form(torch.Size, list, None, lambda *sizes: torch.Size(_sizes(sizes))),
    "int": _text(int, hex, lambda text: int(text, 16)),
    "datetime": _text(datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": _text(datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": _text(datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "decimal": _text(decimal.Decimal, str, decimal.Decimal),
    "dtype": _text(torch.dtype, str, _DTYPES.__getitem__),
    "device": _text(torch.device, str, torch.device),
    "complex": _attributes(complex, float, "real", "imag"),
    "range": _attributes(range, int, "start", "stop", "step"),
    "timedelta": _attributes(datetime.timedelta, int, "days", "seconds", "microseconds"),
    "bytes": _Form(bytes, lambda value: [_memory(value)], (Tensor,), _bytes),
    "bytearray": _Form(bytearray, lambda value: [_memory(value)], (Tensor,), lambda memory: bytearray(_bytes(memory))),
    "floats": _by_apart(lambda memory: memory.view(torch.float64).tolist(), Tensor),
    "ints": _by_apart(lambda memory: memory.view(torch.int64).tolist(), Tensor),
    "defaultdict": _by_apart(lambda factory, items: collections.defaultdict(_FACTORIES[factory], items), str, dict),
    "tensor": _by_apart(_made_tensor, str, list, Tensor),
    "nested": _by_apart(_made_nested, str, list),
    "compressed": _by_apart(_made_compressed, str, list, Tensor, Tensor, Tensor),
    "coo": _by_apart(_made_coo, list, bool, Tensor, Tensor),
    "array": _by_apart(_made_array, str, list, bool, Tensor),
    "objects": _by_apart(_made_objects, list, list),
    "image": _by_apart(_made_image, str, list, Tensor, Tensor),
    "object": _by_apart(_made_object, str, str, object, dict),
}
_FORM_OF = {form.kind: name for name, form in _FORMS.items() if form.kind is not None}
