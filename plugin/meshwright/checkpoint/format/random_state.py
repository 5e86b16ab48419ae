"""This process's random states as JSON: Python's, NumPy's, torch's and, on CUDA, the device's."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from meshwright.data.shuffling import GENERATOR, decoded, encoded
from meshwright.errors import CheckpointError
from meshwright.schema import anything, equal, integer, maybe, number, record, require, row, table, that

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
