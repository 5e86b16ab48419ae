"""This process's random states as JSON: Python's, NumPy's, torch's and, on CUDA, the device's."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from meshwright.data.shuffling import decoded, encoded
from meshwright.errors import CheckpointError

Random = dict[str, Any]


def random_state(device: torch.device) -> Callable[[], Random]:
    """Return a function that encodes the present random states, so that a thread can do so later.

    Args:
        device: the device of the model; on CUDA its random state is saved too.
    """
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    of_torch = torch.get_rng_state()
    of_cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def encode() -> Random:
        state: Random = {
            "python": [version, list(words), gauss],
            "numpy": [kind, [int(word) for word in keys], int(position), int(has_gauss), float(cached)],
            "torch": encoded(of_torch),
        }
        return state if of_cuda is None else {**state, "cuda": of_cuda.tolist()}

    return encode


def check_random_state(state: Any, device: torch.device, where: str) -> None:
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
    try:
        random.Random().setstate(_python(state))
        np.random.RandomState().set_state(_numpy(state))
        torch.Generator().set_state(decoded(state["torch"]))
        if "cuda" in state:
            torch.tensor(state["cuda"], dtype=torch.uint8)
    except (ValueError, TypeError, KeyError, RuntimeError, OverflowError, AttributeError) as error:
        raise CheckpointError(f"{where} has a damaged random state: {error}") from error


def set_random_state(state: Random, device: torch.device) -> None:
    """Restore random states that :func:`check_random_state` has checked."""
    random.setstate(_python(state))
    np.random.set_state(_numpy(state))
    torch.set_rng_state(decoded(state["torch"]))
    if device.type == "cuda":
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8), device)


def _python(state: Random) -> tuple[Any, ...]:
    version, words, gauss = state["python"]
    return version, tuple(words), gauss


def _numpy(state: Random) -> tuple[Any, ...]:
    kind, keys, position, has_gauss, cached = state["numpy"]
    return kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached
