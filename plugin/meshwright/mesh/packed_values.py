"""Packs values into bytes without pickle, with the classes that they may have, so that reading them runs no code.

The bytes hold the memory of the tensors, arrays and long lists of numbers, then a JSON text that describes the value,
and the length of this text. Dataclasses, named tuples and mappings keep their class, which the reader looks up among
the classes that its own program has loaded. It calls nothing of the class, not even ``__init__``.

An instance is taken apart and put together without calling anything of its class, so what another process has sent runs
no code, whichever class it names.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import json
import math
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


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


ALIGNMENT = 8  # in bytes, so that every tensor can be a view of one buffer
MAX_DEPTH = 100  # containers within containers; json itself fails at some depth that depends on the program's stack
_LONG = 16  # lists of more numbers than this travel as memory, not as text

_COMPRESSED: Mapping[torch.layout, tuple[str, str]] = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}
_LAYOUTS = {str(layout): layout for layout in (torch.strided, torch.jagged, torch.sparse_coo, *_COMPRESSED)}
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
# Types that travel as one text: how to write and how to read it.
_TEXTS: Mapping[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "decimal": (decimal.Decimal, str, decimal.Decimal),
    "dtype": (torch.dtype, str, _DTYPES.__getitem__),
    "device": (torch.device, str, torch.device),
}
_FACTORIES = {kind.__name__: kind for kind in (list, dict, set, int, float, str)}  # of a defaultdict
# Types that are made again of their parts.
_PARTS = {
    complex: ("real", "imag"),
    range: ("start", "stop", "step"),
    datetime.timedelta: ("days", "seconds", "microseconds"),
}
_MADE_OF_PARTS = {kind.__name__: kind for kind in _PARTS}
_KIND_OF = {kind: name for name, (kind, _, _) in _TEXTS.items()}


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
    text = json.dumps(writer.encode(value, name, 0), separators=(",", ":")).encode()
    writer.add(torch.frombuffer(bytearray(text), dtype=torch.uint8), is_last=True)
    return torch.cat([*writer.parts, torch.tensor([len(text)]).view(torch.uint8)])


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
        return _Reader(payload[:start]).decode(json.loads(bytes(payload[start:-8].numpy())))
    except (LookupError, TypeError, AttributeError, RuntimeError, ArithmeticError, ImportError) as error:
        raise ValueError(f"not a packed value: {error!r}") from error


class _Writer:
    """Describes a value for JSON, and collects the memory that the description refers to."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []
        self._filled = 0

    def add(self, raw: Tensor, *, is_last: bool = False) -> list[int]:
        """Add bytes, and return their place."""
        place = [self._filled, len(raw)]
        padding = 0 if is_last else -len(raw) % ALIGNMENT
        self.parts += [raw, torch.zeros(padding, dtype=torch.uint8)] if padding else [raw]
        self._filled += len(raw) + padding
        return place

    def encode(self, value: Any, name: str, depth: int) -> Any:
        kind = type(value)
        if value is None or kind in (bool, str, float) or (kind is int and -(2**63) <= value < 2**63):
            return value
        if depth > MAX_DEPTH:
            raise UnsupportedValue(f"{_cut(name)} is more than {MAX_DEPTH} containers deep, or holds itself")
        if kind is int:
            return {"int": hex(value)}
        if kind is list:
            return self._list(value, name, depth)
        if kind is tuple:
            return {"tuple": self._items(value, name, depth)}
        if kind in (set, frozenset):
            return {kind.__name__: [self._key(item, name, depth) for item in value]}
        if kind is dict:
            return {"dict": self._pairs(value, name, depth)}
        if isinstance(value, Tensor):
            return self._tensor(value, name, depth)
        if kind in (bytes, bytearray):
            return {
                kind.__name__: self.add(torch.frombuffer(bytearray(value or b"\0"), dtype=torch.uint8)[: len(value)])
            }
        if isinstance(value, np.ndarray | np.generic):
            return self._array(value, name, depth)
        if kind in _KIND_OF:
            return {"text": [_KIND_OF[kind], _TEXTS[_KIND_OF[kind]][1](value)]}
        return self._other(value, name, depth)

    def _items(self, values: Iterable[object], name: str, depth: int) -> list[Any]:
        return [self.encode(item, f"{name}[{number}]", depth + 1) for number, item in enumerate(values)]

    def _pairs(self, values: Mapping[Any, Any], name: str, depth: int) -> list[Any]:
        return [
            [self._key(key, name, depth), self.encode(x, f"{name}[{key!r}]", depth + 1)] for key, x in values.items()
        ]

    def _key(self, key: object, name: str, depth: int) -> Any:
        if not _is_key(key):
            raise UnsupportedValue(f"a key of {_cut(name)} is a {type(key).__name__}; use text or numbers as keys")
        return self.encode(key, f"a key of {name}", depth + 1)

    def _list(self, value: list[Any], name: str, depth: int) -> Any:
        if len(value) > _LONG:
            kinds = set(map(type, value))
            if kinds == {float}:
                return {"floats": self.add(torch.tensor(value, dtype=torch.float64).view(torch.uint8))}
            if kinds == {int} and min(value) >= -(2**63) and max(value) < 2**63:
                return {"ints": self.add(torch.tensor(value, dtype=torch.int64).view(torch.uint8))}
        return self._items(value, name, depth)

    def _tensor(self, x: Tensor, name: str, depth: int) -> Any:
        # A parameter is a tensor with a flag; other classes may have behaviour that would be lost.
        if not (type(x) in (Tensor, torch.nn.Parameter) or x.is_nested) or x.is_quantized or x.is_meta:
            kind = "quantized" if x.is_quantized else "meta" if x.is_meta else type(x).__name__
            raise UnsupportedValue(f"{_cut(name)} is a tensor of the kind {kind}, which {_ADVICE}")
        x = x.detach().cpu().resolve_conj().resolve_neg()
        if x.is_nested:
            return {"nested": [str(x.layout), self._items(list(x.unbind()), name, depth)]}
        if x.layout in _COMPRESSED:
            parts = [getattr(x, part)() for part in (*_COMPRESSED[x.layout], "values")]
            return {"compressed": [str(x.layout), list(x.shape), self._items(parts, name, depth)]}
        if x.layout is torch.sparse_coo:
            parts = [x._indices(), x._values()]
            return {"coo": [list(x.shape), x.is_coalesced(), self._items(parts, name, depth)]}
        if x.layout is not torch.strided:
            raise UnsupportedValue(f"{_cut(name)} is a tensor of the layout {x.layout}, which {_ADVICE}")
        return {"tensor": [str(x.dtype), list(x.shape), self.add(x.contiguous().reshape(-1).view(torch.uint8))]}

    def _array(self, value: object, name: str, depth: int) -> Any:
        is_scalar = isinstance(value, np.generic)
        array = np.asarray(value)
        if isinstance(value, np.ma.MaskedArray) or array.dtype.kind not in "biufcSUMmO":
            raise UnsupportedValue(f"{_cut(name)} is a {type(value).__name__} of dtype {array.dtype}, which {_ADVICE}")
        if array.dtype.kind == "O":
            return {"objects": [list(array.shape), self._items(array.reshape(-1).tolist(), name, depth)]}
        raw = array.tobytes()
        place = self.add(torch.frombuffer(bytearray(raw or b"\0"), dtype=torch.uint8)[: len(raw)])
        return {"array": [array.dtype.str, list(array.shape), is_scalar, place]}

    def _other(self, value: Any, name: str, depth: int) -> Any:
        kind = type(value)
        if kind in _PARTS:
            return {kind.__name__: [getattr(value, part) for part in _PARTS[kind]]}
        if kind is torch.Size:
            return {"size": list(value)}
        if kind is collections.defaultdict and value.default_factory in _FACTORIES.values():
            return {"defaultdict": [value.default_factory.__name__, self._pairs(value, name, depth)]}
        if _is_image(value):
            place = self.encode(value.tobytes(), name, depth)
            return {"image": [value.mode, list(value.size), place, value.getpalette() if value.mode == "P" else None]}
        if form_of(kind) is None:
            raise UnsupportedValue(f"{_cut(name)} is a {kind.__module__}.{kind.__qualname__}, which {_ADVICE}")
        try:
            is_known = class_named(kind.__module__, kind.__qualname__) is kind
        except ValueError:
            is_known = False
        if not is_known:
            raise UnsupportedValue(
                f"{_cut(name)} is a {kind.__qualname__}, a class that other processes cannot find by its name; define "
                f"it at the top of the module {kind.__module__}"
            )
        contents = contents_of(value)
        is_table = isinstance(contents, dict)
        items = self._pairs(contents, name, depth) if isinstance(contents, dict) else self._items(contents, name, depth)
        attributes = {key: self.encode(x, f"{name}.{key}", depth + 1) for key, x in attributes_of(value).items()}
        return {"object": [kind.__module__, kind.__qualname__, is_table, items, attributes]}


class _Reader:
    """Rebuilds a value from its description."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory

    def decode(self, said: object) -> Any:
        if isinstance(said, list):
            return [self.decode(item) for item in said]
        if not isinstance(said, dict):
            return said
        ((kind, body),) = said.items()
        return _MADE_OF_PARTS[kind](*body) if kind in _MADE_OF_PARTS else getattr(self, f"_read_{kind}")(body)

    def _key(self, said: object) -> Any:
        key = self.decode(said)
        if not _is_key(key):
            raise ValueError(f"a packed value has a {type(key).__name__} as key")
        return key

    def _bytes(self, place: list[int]) -> Tensor:
        start, length = place
        if not (type(start) is int and type(length) is int and 0 <= start <= start + length <= len(self._memory)):
            raise ValueError(f"a packed value refers to bytes {start} to {start + length} of {len(self._memory)}")
        return self._memory[start : start + length].clone()

    def _read_int(self, body: str) -> int:
        return int(body, 16)

    def _read_tuple(self, body: list[Any]) -> tuple[Any, ...]:
        return tuple(map(self.decode, body))

    def _read_set(self, body: list[Any]) -> set[Any]:
        return set(map(self._key, body))

    def _read_frozenset(self, body: list[Any]) -> frozenset[Any]:
        return frozenset(map(self._key, body))

    def _read_dict(self, body: list[Any]) -> dict[Any, Any]:
        return {self._key(key): self.decode(item) for key, item in body}

    def _read_defaultdict(self, body: list[Any]) -> dict[Any, Any]:
        factory, pairs = body
        return collections.defaultdict(_FACTORIES[factory], self._read_dict(pairs))

    def _read_bytes(self, body: list[int]) -> bytes:
        return self._bytes(body).numpy().tobytes()

    def _read_bytearray(self, body: list[int]) -> bytearray:
        return bytearray(self._read_bytes(body))

    def _read_floats(self, body: list[int]) -> Any:
        return self._bytes(body).view(torch.float64).tolist()

    def _read_ints(self, body: list[int]) -> Any:
        return self._bytes(body).view(torch.int64).tolist()

    def _read_tensor(self, body: list[Any]) -> Tensor:
        dtype, shape, place = body
        raw = self._bytes(place)
        return (raw.view(_DTYPES[dtype]) if len(raw) else torch.empty(0, dtype=_DTYPES[dtype])).reshape(_sizes(shape))

    def _read_nested(self, body: list[Any]) -> Tensor:
        layout, parts = body
        return torch.nested.nested_tensor(self.decode(parts), layout=_LAYOUTS[layout])

    def _read_compressed(self, body: list[Any]) -> Tensor:
        layout, shape, parts = body
        outer, inner, values = self.decode(parts)
        return torch.sparse_compressed_tensor(
            outer, inner, values, _sizes(shape), layout=_LAYOUTS[layout], check_invariants=True
        )

    def _read_coo(self, body: list[Any]) -> Tensor:
        shape, is_coalesced, parts = body
        indices, values = self.decode(parts)
        return torch.sparse_coo_tensor(
            indices, values, _sizes(shape), is_coalesced=bool(is_coalesced), check_invariants=True
        )

    def _read_array(self, body: list[Any]) -> Any:
        dtype, shape, is_scalar, place = body
        found = np.dtype(dtype)
        if found.kind not in "biufcSUMm":
            raise ValueError(f"a packed array has the dtype {dtype}")
        array = np.frombuffer(self._bytes(place).numpy().tobytes(), dtype=found).reshape(_sizes(shape)).copy()
        return array[()] if is_scalar else array

    def _read_objects(self, body: list[Any]) -> Any:
        shape, items = body
        array = np.empty(len(items), dtype=object)
        for number, item in enumerate(items):
            array[number] = self.decode(item)
        return array.reshape(_sizes(shape))

    def _read_text(self, body: list[Any]) -> Any:
        kind, text = body
        return _TEXTS[kind][2](text)

    def _read_size(self, body: list[Any]) -> torch.Size:
        return torch.Size(body)

    def _read_image(self, body: list[Any]) -> Any:
        from PIL import Image

        mode, size, place, palette = body
        width, height = _sizes(size)
        pixels = self.decode(place)
        # Pillow takes the memory of the whole image before it counts the bytes; no mode has less than a bit per pixel.
        if 8 * len(pixels) < width * height:
            raise ValueError(f"an image of {width} x {height} pixels in {len(pixels)} bytes")
        image = Image.frombytes(mode, (width, height), pixels)
        if palette is not None:
            image.putpalette(palette)
        return image

    def _read_object(self, body: list[Any]) -> Any:
        module, name, is_table, items, attributes = body
        contents = [(self._key(key), self.decode(x)) for key, x in items] if is_table else self.decode(items)
        return built(class_named(module, name), contents, {key: self.decode(x) for key, x in attributes.items()})


_ADVICE = (
    "Meshwright does not send between processes, since only pickle could. Return tensors, arrays, numbers, text, and "
    "lists, tuples, dicts, dataclasses or named tuples of these from the dataset and the collate function"
)


def _cut(name: str) -> str:
    return name if len(name) <= 200 else f"{name[:200]}..."


def _is_key(value: Any) -> bool:
    """Return whether the hash of a value, and of all that it holds, is Python's or NumPy's own code."""
    if type(value) in (tuple, frozenset):
        return all(map(_is_key, value))
    return type(value).__module__ in ("builtins", "numpy", "datetime", "decimal", "torch")


def _is_image(value: object) -> bool:
    image = sys.modules.get("PIL.Image")
    return image is not None and isinstance(value, image.Image)


def _sizes(shape: list[int]) -> list[int]:
    if not all(type(size) is int and size >= 0 for size in shape) or math.prod(shape) >= 2**62:
        raise ValueError(f"a packed value has the shape {shape}")
    return list(shape)
