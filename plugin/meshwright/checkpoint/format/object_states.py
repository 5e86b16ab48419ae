"""The saved states of what is neither model nor optimizer: schedulers, scalers, loaders and random generators."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from meshwright.checkpoint.files.place import Place
from meshwright.checkpoint.format.checkpoint_folders import Manifest
from meshwright.checkpoint.one_device.optimizer_manifest import decode, kind_of
from meshwright.data.shuffling import GENERATOR, decoded, encoded
from meshwright.errors import CheckpointError
from meshwright.outside_files import (
    Check,
    anything,
    equal,
    integer,
    listed,
    maybe,
    number,
    record,
    require,
    row,
    shown,
    table,
    that,
)

Random = dict[str, Any]


def _are_words(value: object, count: int = 624) -> bool:
    return isinstance(value, list) and len(value) == count and all(type(n) is int and 0 <= n < 2**32 for n in value)


def _are_python_words(value: object) -> bool:
    return isinstance(value, list) and _are_words(value, 625) and value[-1] <= 624  # the last is the next word's place


def _is_cuda_state(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 16 or not all(type(n) is int and 0 <= n < 256 for n in value):
        return False
    return bool(value[8] % 4 == 0)  # a seed and an offset, which counts groups of four numbers


_NORMAL = number(-100, 100)  # a drawn number of the normal distribution, which is never larger than 40

# NumPy and torch read their words at the place that a state gives, without checking it.
_STATES = record(
    {
        "python": row(equal(3), that("625 words and a place", _are_python_words), maybe(_NORMAL)),
        "numpy": row(equal("MT19937"), that("624 words", _are_words), integer(0, 624), integer(0, 1), _NORMAL),
        "torch": GENERATOR,
    },
    {"cuda": that("16 bytes of a generator of CUDA", _is_cuda_state)},
)


def random_state(device: torch.device) -> Callable[[], Random]:
    """Return a function that encodes the present random states, so that a thread can do so later.

    Args:
        device: the device of the model; on CUDA its random state is saved too.
    """
    own = random.getstate(), np.random.get_state(legacy=True), torch.get_rng_state()
    of_cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def encode() -> Random:
        state = _encoded(*own)
        return state if of_cuda is None else {**state, "cuda": of_cuda.tolist()}

    return encode


def check_random_state(state: object, device: torch.device, where: str) -> None:
    """Check a state before anything is restored from it.

    Raises:
        CheckpointError: if a part is missing or damaged; it names the part and ``where``.
    """
    wanted = {"python", "numpy", "torch"} | ({"cuda"} if device.type == "cuda" else set())
    if not isinstance(state, dict) or not wanted <= state.keys() <= wanted | {"cuda"}:
        missing = sorted(wanted - state.keys()) if isinstance(state, dict) else sorted(wanted)
        raise CheckpointError(
            f"{where} has no random state of {', '.join(missing) or 'a known kind'}; it was saved on another kind of "
            "device, or is damaged. To go on with the present random state, pass ignore=['random']"
        )
    require(state, _STATES, f"{where}: its random state")


def check_states_of_others(state: Any, names: tuple[str, str, str], path: Path) -> None:
    """Check random states as the Trainer and accelerate save them, which restore them unchecked.

    Args:
        state: what was read.
        names: under which it has what ``random.getstate``, ``numpy.random.get_state`` and ``torch.get_rng_state``
            returned.
        path: the file, for messages.

    Raises:
        CheckpointError: if one of them is damaged; it names it and the file.
    """
    require(state, table(anything), path)
    try:
        encoded_state = _encoded(*map(state.get, names))
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{path} has a damaged random state: {error}") from error
    require(encoded_state, _STATES, f"{path}: its random state")


def _encoded(python: Sequence[Any], numpy: Any, cpu: torch.Tensor) -> Random:
    version, words, gauss = python
    kind, keys, position, has_gauss, cached = numpy
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": encoded(cpu),
    }


def set_random_state(state: Random, device: torch.device) -> None:
    """Restore random states that :func:`check_random_state` has checked."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(decoded(state["torch"]))
    if device.type == "cuda":
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8), device)


_RATES = listed(that("a number from 0 to 1e9", lambda value: _is_number(value) and 0 <= float(value) <= 1e9))
# Entries of the states of torch's schedulers and its gradient scaler. Others must be of the kind that the object has.
_RANGES: Mapping[str, Mapping[str, Check]] = {
    "scheduler": {"base_lrs": _RATES, "_last_lr": _RATES, "last_epoch": integer(-1), "_step_count": integer()},
    "scaler": {
        "scale": number(1e-38, 3e38),  # a float32, by which gradients are divided
        "growth_factor": number(1, 1e9),
        "backoff_factor": number(1e-9, 1),
        "growth_interval": integer(1),
        "_growth_tracker": integer(),
    },
}
# The options of torch's schedulers. Classes of other programs may use these names for something else.
_OF_TORCH: Mapping[str, Check] = {
    **dict.fromkeys(("max_lrs", "min_lrs"), _RATES),
    **dict.fromkeys(("gamma", "eta_min", "factor", "start_factor", "end_factor", "power"), number(0, 1e9)),
    **dict.fromkeys(("step_size", "T_max", "T_0", "T_i", "T_mult", "total_steps", "total_size"), number(1)),
    **dict.fromkeys(("num_bad_epochs", "cooldown_counter", "patience", "cooldown"), integer()),
}
_MAY_BE_INFINITE = ("best", "mode_worse")  # of ReduceLROnPlateau, before it has seen a metric


class Stateful(Protocol):
    """An object whose state a checkpoint holds: a loader, a scheduler or a scaler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> object: ...


def check_states(path: Place, manifest: Manifest, objects: Mapping[str, Stateful]) -> None:
    """Check the states in a manifest against the objects that they will be loaded into, which stay as they are.

    Args:
        path: the file of the manifest.
        manifest: the manifest.
        objects: the objects, by their names in the manifest.

    Raises:
        CheckpointError: if a state is of another kind of object, or an entry has a wrong type or range. The message
            names the file and the entry.
    """
    for name in _RANGES.keys() & objects.keys():
        saved = decode(getattr(manifest, name))
        check_state_of(name, saved, objects[name], f"{path}: its {name!r}")
    check = getattr(objects.get("loader"), "check_state_dict", None)
    if callable(check):
        try:
            check(manifest.loader)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: 'loader': {error}") from error


def check_state_of(name: str, saved: Any, into: Stateful, where: str) -> None:
    """Check the saved state of a scheduler or a scaler against the object that it will be loaded into.

    Args:
        name: ``"scheduler"`` or ``"scaler"``.
        saved: the state.
        into: the object.
        where: the file and the place in it, for messages.

    Raises:
        CheckpointError: if it is of another kind of object, or an entry has a wrong type or range. The message names
            the file and the entry.
    """
    require(saved, table(anything), where)
    own = into.state_dict()
    # torch's schedulers take every entry as an attribute: it would replace a method, or the optimizer.
    for key in sorted(saved.keys() - own.keys()):
        if name == "scheduler" and (key == "optimizer" or callable(getattr(into, key, None))):
            raise CheckpointError(
                f"{where} has {shown(key)}, which no {type(into).__name__} saves; load another checkpoint"
            )
    ranges = {**_RANGES[name], **(_OF_TORCH if type(into).__module__ == LRScheduler.__module__ else {})}
    inner = getattr(into, "_schedulers", None) if name == "scheduler" else None
    for key in sorted(saved.keys() & own.keys()):
        if isinstance(inner, list) and key == "_schedulers" and isinstance(saved[key], list | tuple):
            for index, (state, scheduler) in enumerate(zip(saved[key], inner, strict=False)):
                check_state_of(name, state, scheduler, f"{where}, {key!r}[{index}]")
        elif key in ranges and own[key] is not None:
            require(saved[key], ranges[key], f"{where}, {key!r}")
        else:
            _check_kind(saved[key], own[key], f"{where}, {key!r}", may_be_infinite=key in _MAY_BE_INFINITE)


def _check_kind(saved: Any, own: Any, where: str, *, may_be_infinite: bool = False) -> None:
    """Check that a value, and those in it, are of the same kinds as the object's, and that numbers are finite."""
    if saved is None or own is None:
        return
    if kind_of(saved) != kind_of(own):
        raise CheckpointError(
            f"{where} is {shown(saved)}, and a {kind_of(own)} in this program; load another checkpoint"
        )
    if type(saved) in (int, float) and not (may_be_infinite and math.isinf(saved)):
        require(saved, number(), where)
    pairs: Iterable[tuple[object, object]] = ()
    if isinstance(saved, Mapping):
        pairs = ((value, own[key]) for key, value in saved.items() if key in own)
    elif isinstance(saved, list | tuple):
        pairs = zip(saved, own, strict=False)
    for value, present in pairs:
        _check_kind(value, present, where)


def load_states(path: Place, manifest: Manifest, objects: Mapping[str, Stateful]) -> None:
    """Give objects the states that :func:`check_states` has checked.

    Raises:
        CheckpointError: if an object does not take its state.
    """
    for name in ("scheduler", "scaler", "loader"):
        if name in objects:
            saved = getattr(manifest, name)
            try:
                objects[name].load_state_dict(saved if name == "loader" else decode(saved))
            except Exception as error:  # of any program's own class
                raise CheckpointError(
                    f"{path}: the {type(objects[name]).__name__} does not take the state of '{name}': "
                    f"{type(error).__name__}: {error}. Load a checkpoint of the same program, or pass ignore=[{name!r}]"
                ) from error


def _is_number(value: object) -> bool:
    """Whether a value is a number, or a tensor with one, as torch's schedulers keep rates that are tensors."""
    return type(value) in (int, float) or (isinstance(value, Tensor) and value.numel() == 1)
