"""Packed values: what was packed comes back with its type, and what somebody else has written runs no code."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import json
import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from meshwright.faults.together import values_of_all
from meshwright.mesh.packed_values import UnsupportedValue, pack, unpack

CALLED: list[str] = []


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass(frozen=True)
class Record:
    x: Any

    def __post_init__(self) -> None:
        CALLED.append("__post_init__")


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: Any
    y: Any = None


class Table(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        CALLED.append("__setitem__")
        super().__setitem__(key, value)


class Batch(collections.UserDict[str, Any]):
    """As Hugging Face's BatchEncoding."""


@dataclasses.dataclass
class Cleaned:
    x: int = 0

    def __del__(self) -> None:
        CALLED.append("__del__")


class Custom:
    pass


def table() -> Table:
    made = Table({"a": 1})
    made.note = "kept"  # type: ignore[attr-defined]
    return made


VALUES: list[Any] = [
    *(None, True, 1, 2**70, -(2**63), 1.5, math.inf, "x\ud800é", b"", b"abc", bytearray(b"q"), 1 + 2j, range(3)),
    *([], [1] * 40, [1.0] * 40, [2**63] * 40, [True] * 40, (1, (2,)), {1, 2}, frozenset([3])),
    {1: 2, "a": {(1, 2): 3}, None: 4},
    collections.defaultdict(list, a=[1]),
    collections.OrderedDict(b=1, a=2),
    *(torch.Size([1, 2]), torch.float32, torch.device("cpu"), np.float32(1.5), np.int64(3), np.str_("ab")),
    datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.UTC),
    *(datetime.date(2026, 1, 2), datetime.time(1, 2), datetime.timedelta(1, 2, 3), decimal.Decimal("1.50")),
    *(Pair(1, [2]), Record(Slotted(2, "z")), Slotted(1), table(), Batch(a=1)),
]


@pytest.mark.parametrize("number", range(len(VALUES)))
def test_a_value_comes_back_as_it_was(number: int) -> None:
    value = VALUES[number]
    CALLED.clear()
    found = unpack(pack(value))
    assert type(found) is type(value) and found == value and not CALLED
    assert getattr(found, "note", None) == getattr(value, "note", None)


ARRAYS = [
    np.zeros((2, 3), dtype="f4"),
    np.array(["a", "bc"]),
    np.array([], dtype="i8"),
    np.zeros((0, 3)),
    np.array(["2020-01-01"], dtype="M8[ns]"),
    np.array([1, None, "x"], dtype=object),
    np.asfortranarray(np.arange(6).reshape(2, 3)),
    np.array(3),
    np.arange(4, dtype=">i4"),
]
DENSE = torch.tensor([[0, 1.0], [2, 0]])
TENSORS = [
    *(torch.tensor(1.5), torch.empty(0, 3), torch.arange(5)[::2], torch.randn(2, 3).bfloat16(), torch.tensor([True])),
    *(torch.randn(3).to(torch.float8_e4m3fn), torch.randn(2, dtype=torch.complex64).conj()),
    *(DENSE.to_sparse(), DENSE.to_sparse_csr(), DENSE.to_sparse_csc(), DENSE.to_sparse_bsr((1, 1))),
]


def test_arrays_and_tensors_come_back_bit_for_bit() -> None:
    for array in ARRAYS:
        found = unpack(pack(array))
        assert found.dtype == array.dtype and found.shape == array.shape and (found == array).all()
    for x in TENSORS:
        y = unpack(pack(x))
        assert (y.dtype, y.shape, y.layout) == (x.dtype, x.shape, x.layout)
        x, y = (t.to_dense() if t.layout is not torch.strided else t.resolve_conj().contiguous() for t in (x, y))
        assert torch.equal(x.view(torch.uint8) if x.ndim else x, y.view(torch.uint8) if y.ndim else y)
    for layout in (torch.strided, torch.jagged):
        nested = unpack(pack(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)))
        assert nested.layout is layout and [len(part) for part in nested.unbind()] == [2, 3]
    shared = torch.ones(2)
    payload = pack(shared)
    found = unpack(payload)
    payload.zero_()
    assert torch.equal(found, shared)


def holds_itself() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Custom(), r"value is a .*Custom.*Return tensors"),
        ({"a": [0, Custom()]}, r"value\['a'\]\[1\] is a "),
        (Cleaned(), "Cleaned"),
        (holds_itself(), "holds itself"),
        (lambda: 1, "function"),
        ({Pair(1, 2): 3}, "key"),
        (collections.defaultdict(lambda: 1), "defaultdict"),
        (torch.empty(2, device="meta"), "meta"),
        (dataclasses.make_dataclass("Local", ["x"])(1), "top of the module"),
    ],
)
def test_other_values_are_refused_by_name(value: Any, named: str) -> None:
    with pytest.raises(UnsupportedValue, match=named):
        pack(value)


def written(described: Any, memory: bytes = b"") -> Tensor:
    """Return a payload with any description."""
    text = described if isinstance(described, bytes) else json.dumps(described).encode()
    content = memory + text + len(text).to_bytes(8, "little")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def an_object(module: str, name: str, items: Any = (), **attributes: Any) -> Any:
    return {"object": [module, name, list(items), {"dict": [x for pair in attributes.items() for x in pair]}]}


def a_tensor(dtype: str, shape: list[int], *place: int) -> Any:
    return {"tensor": [dtype, shape, {"memory": list(place)}]}


RECORD = an_object(__name__, "Record", x=1)  # whose use in the place of a plain part could run code of its class
HOSTILE: dict[str, Tensor] = {
    "nothing": torch.zeros(8, dtype=torch.uint8),
    "a length beyond the payload": torch.full((16,), 255, dtype=torch.uint8),
    "not JSON": written(b"{"),
    "deep": written(b"[" * 100_000),
    "deep and closed": written(b'{"tuple":[' * 5000 + b"]}" * 5000),
    "an unknown form": written({"what": [1]}),
    "two forms": written({"tuple": [], "set": []}),
    "parts that are no list": written({"tuple": {"dict": []}}),
    "a function": written(an_object("os", "system", ["true"])),
    "a class of Python": written(an_object("subprocess", "Popen", args=["true"])),
    "a class with a finaliser": written(an_object(__name__, "Cleaned", x=1)),
    "a plain class": written(an_object(__name__, "Custom")),
    "a module that is not loaded": written(an_object("antigravity", "x")),
    "an attribute of a class": written(an_object(__name__, "Record.__post_init__")),
    "a slot that is none": written(an_object(__name__, "Slotted", other=1)),
    "an attribute without a name": written({"object": [__name__, "Record", [], {"dict": [1, 1]}]}),
    "a mapping with the items of a tuple": written(an_object(__name__, "Table", [1])),
    "a key with a hash of its own": written({"dict": [RECORD, 1]}),
    "a list as key": written({"dict": [[], 1]}),
    "a key without a value": written({"dict": [1]}),
    "bytes beyond the payload": written({"bytes": [{"memory": [0, 2**40]}]}),
    "bytes before the payload": written({"bytes": [{"memory": [-8, 8]}]}, bytes(8)),
    "bytes that are no memory": written({"bytes": [RECORD]}),
    "a number of another class": written({"complex": [RECORD, 1.0]}),
    "a shape beyond the bytes": written(a_tensor("torch.float32", [2**40], 0, 8), bytes(8)),
    "a negative shape": written(a_tensor("torch.float32", [-1], 0, 8), bytes(8)),
    "a shape of 10^30": written(a_tensor("torch.float32", [0, 10**30], 0, 0)),
    "a shape of another class": written({"tensor": ["torch.float32", [RECORD], {"memory": [0, 8]}]}, bytes(8)),
    "an unknown dtype": written(a_tensor("os", [1], 0, 8), bytes(8)),
    "a nested tensor of another class": written({"nested": ["torch.jagged", [RECORD]]}),
    "an array of objects": written({"array": ["O", [1], False, {"memory": [0, 8]}]}, bytes(8)),
    "sparse indices beyond the shape": written(
        {"coo": [[2], True, a_tensor("torch.int64", [1, 1], 0, 8), a_tensor("torch.float64", [1], 0, 8)]},
        b"\xff" * 7 + b"\x7f",
    ),
    "an image without bytes": written({"image": ["RGB", [2**15, 2**15], {"memory": [0, 0]}, {"memory": [0, 0]}]}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_foreign_payload_is_an_error(name: str) -> None:
    CALLED.clear()
    with pytest.raises(ValueError):
        unpack(HOSTILE[name])
    assert not CALLED


def test_the_class_of_an_instance_cannot_be_changed() -> None:
    found = unpack(written(an_object(__name__, "Record", __class__="x", x=1)))
    assert type(found) is Record and found.x == 1


def exchanged(last: Any) -> list[Any]:
    return values_of_all(last if torch.distributed.get_rank() == 1 else {"rank": 0})


def test_a_value_that_cannot_be_sent_is_an_error_on_every_rank(pool2: Any) -> None:
    assert pool2.run(exchanged, (1, "x")) == [[{"rank": 0}, (1, "x")]] * 2
    errors = pool2.run_expecting_error(exchanged, Custom())
    assert [kind for kind, _ in errors] == ["ValueError", "UnsupportedValue"]
    assert all("Custom" in message and "Return tensors" in message for _, message in errors)
