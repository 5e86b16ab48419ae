"""The random generators from which a pass draws, and digests of their states."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Generator, Tensor


def generators_of(device: torch.device) -> dict[str, Generator]:
    """Return torch's own generators of the CPU and of a device, by the device's kind."""
    found = {"cpu": torch.default_generator}
    if device.type == "cuda" and torch.cuda.default_generators:  # not while a step is traced without a GPU
        index = torch.cuda.current_device() if device.index is None else device.index
        found["cuda"] = torch.cuda.default_generators[index]
    return found


def generator_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Generator:
    """Return the generator from which an operation draws."""
    given: Generator | None = kwargs.get("generator")
    device = kwargs.get("out", args[0]).device
    return generators_of(device)[device.type] if given is None else given


def digest_of(generator: Generator) -> bytes:
    """Return a digest of a generator's state."""
    return digest_of_state(generator.get_state())


def digest_of_state(state: Tensor) -> bytes:
    """Return a digest of a state."""
    return hashlib.blake2b(state.numpy().data, digest_size=8).digest()
