"""Everything of a saved optimizer except the tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor

from meshwright.checkpoint.files.reading import read_json
from meshwright.checkpoint.one_device.safetensors_file import SHAPE
from meshwright.errors import CheckpointError
from meshwright.outside_files import (
    LARGEST,
    LARGEST_COUNT,
    Check,
    anything,
    boolean,
    integer,
    listed,
    maybe,
    number,
    record,
    require,
    row,
    table,
    text,
    that,
)
from meshwright.outside_files import NAME as KEY

_WHOLE = "meshwright-optimizer-1"  # the form of earlier versions, with whole tensors in files of rank 0


class ParameterGroup(TypedDict):
    """The parameter names and the encoded options of one group of an optimizer."""

    parameters: list[str]
    options: dict[str, object]


@dataclass(frozen=True, kw_only=True)
class OptimizerManifest:
    """A saved optimizer, whose parameters have their one-device names.

    Args:
        optimizer: the name of the optimizer's class.
        shapes: the one-device shape of each parameter.
        groups: the parameter names and the (encoded) options of each group.
        tensors: the keys of each parameter's state that is a tensor.
        values: each parameter's (encoded) state that is not a tensor.
        masters: the parameters whose float32 master weights were saved.
    """

    optimizer: str
    shapes: dict[str, list[int]]
    groups: list[ParameterGroup]
    tensors: dict[str, list[str]]
    values: dict[str, dict[str, object]]
    masters: list[str]

    @staticmethod
    def read_whole(path: Path) -> OptimizerManifest:
        """Read the manifest of a folder of whole tensors, as earlier versions wrote it.

        Raises:
            CheckpointError: if it is damaged.
        """
        fields = read_json(path)
        if not isinstance(fields, dict) or fields.pop("format", None) != _WHOLE:
            raise CheckpointError(f"{path} is damaged, or of no known format")
        require(fields, record({**_OPTIMIZER, "weight_map": table(KEY)}), path)
        del fields["weight_map"]  # where ``WeightFiles`` finds the tensors
        return OptimizerManifest(**fields)


def _encoded(value: object, field: str) -> None:
    """Check that :func:`decode` takes a value, and gives what can be a state or an option."""
    if not isinstance(value, dict):
        _PLAIN(value, field)
    elif "tensor" in value:
        _NUMBER_TENSOR(value, field)
        _FITS(value, field)
    else:
        _CONTAINER(value, field)
        _ONE(value, field)


def _fits(value: Any) -> bool:
    dtype = getattr(torch, value["dtype"], None)
    try:
        return isinstance(dtype, torch.dtype) and torch.tensor(value["tensor"], dtype=dtype).numel() == 1
    except (RuntimeError, TypeError, ValueError, OverflowError):  # a number that the dtype does not hold
        return False


_PLAIN = that("a number, a text or none", lambda value: value is None or isinstance(value, bool | int | float | str))
_SCALAR = that("a number or a truth value", lambda value: type(value) in (bool, int, float))
_NUMBER_TENSOR = record(
    {
        "tensor": _SCALAR,
        "dtype": text("[a-z0-9_]+", most=30),
        "shape": that("[], [1] or [1, 1]", lambda value: value in ([], [1], [1, 1])),
    }
)
_FITS = that("a number that its dtype holds", _fits)
_ONE = that("a table of one kind", lambda value: len(value) == 1)
_MANY = listed(_encoded)
_CONTAINER = record(
    {},
    {
        "tuple": _MANY,
        "list": _MANY,
        "dict": table(_encoded, names=KEY),
        "table": listed(row(integer(-LARGEST, LARGEST), _encoded)),
    },
)
ENCODED: Check = _encoded


def _ranged(check: Check) -> Check:
    """An encoded number, or several of them, within a range."""

    def check_value(value: object, field: str) -> None:
        _encoded(value, field)
        found = decode(value)
        for each in found if isinstance(found, list | tuple) else [found]:
            if each is not None and not isinstance(each, bool):
                check(each.item() if isinstance(each, Tensor) else each, field)

    return check_value


_RATE = _ranged(number(0, 1e9))
# Options of torch's optimizers and schedulers. Another option may be any finite number.
_OPTIONS: Mapping[str, Check] = {
    **dict.fromkeys(("lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "weight_decay", "eps", "momentum"), _RATE),
    **dict.fromkeys(("alpha", "rho"), _ranged(number(0, 1))),
    # With 1, Adam's correction of the bias divides by zero.
    "betas": _ranged(that("a number from 0 up to 1", lambda value: type(value) in (int, float) and 0 <= value < 1)),
    **dict.fromkeys(
        ("foreach", "fused", "capturable", "differentiable", "maximize", "amsgrad", "nesterov", "centered"),
        maybe(boolean),
    ),
}
_FINITE = _ranged(
    that("a finite number or a text", lambda value: isinstance(value, str | dict) or math.isfinite(value))
)
_STEP_RANGE = _ranged(number(0, LARGEST_COUNT))


def _step(value: object, field: str) -> None:
    _STEP_RANGE(value, field)
    that("a number", lambda value: isinstance(decode(value), Tensor) or type(value) in (int, float))(value, field)


def _options(value: Any, field: str) -> None:
    table(anything)(value, field)
    for name, option in value.items():
        _OPTIONS.get(name, _FINITE)(option, f"{field}[{name!r}]")


def _values(value: Any, field: str) -> None:
    table(anything)(value, field)
    for name, state in value.items():
        (_step if name == "step" else _encoded)(state, f"{field}[{name!r}]")


_NAMES = listed(KEY)
_OPTIMIZER: Mapping[str, Check] = {
    "optimizer": KEY,
    "shapes": table(SHAPE),
    "groups": listed(record({"parameters": _NAMES, "options": _options})),
    "tensors": table(_NAMES),
    "values": table(_values),
    "masters": _NAMES,
}
OPTIMIZER: Check = record(_OPTIMIZER)


def state_key(name: str, key: str) -> str:
    """A state tensor's name in the files."""
    return f"state/{name}/{key}"


def master_key(name: str) -> str:
    """A master weight's name in the files."""
    return f"master/{name}"


def encode(value: object, what: str) -> Any:
    """Encode a number, text, tuple, dict or the like as JSON.

    Raises:
        CheckpointError: if the value cannot be saved; it names ``what``.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return {"tensor": value.item(), "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, tuple | list):
        return {"tuple" if isinstance(value, tuple) else "list": [encode(x, what) for x in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: encode(x, f"{what}[{key!r}]") for key, x in value.items()}}
    if isinstance(value, dict) and all(type(key) is int for key in value):
        return {"table": [[key, encode(x, f"{what}[{key}]")] for key, x in value.items()]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(f"{what} is a {type(value).__name__}, which cannot be saved; numbers, texts and tensors can")


def decode(value: object) -> Any:
    """The inverse of :func:`encode`."""
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"])).view(value["shape"])
    ((kind, items),) = value.items()
    if kind == "dict":
        return {key: decode(x) for key, x in items.items()}
    if kind == "table":
        return {key: decode(x) for key, x in items}
    return {"tuple": tuple, "list": list}[kind](decode(x) for x in items)


def kind_of(value: object) -> str:
    """Return the kind of a decoded value; numbers and tensors of one number may stand for each other."""
    if isinstance(value, bool):
        return "truth value"
    if isinstance(value, int | float | Tensor):
        return "number"
    if isinstance(value, list | tuple):
        return "sequence"
    return "table" if isinstance(value, Mapping) else type(value).__name__
