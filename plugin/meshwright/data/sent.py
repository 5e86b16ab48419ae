"""What a loader's worker sends: bytes, since each tensor in its queue would use a file descriptor."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from meshwright.mesh.packed_values import UnsupportedValue, pack, unpack


def sent(value: object) -> Any:
    """Return a value as bytes; one of a class that cannot be packed is left to the DataLoader, which pickles it."""
    try:
        return pack(value).numpy().tobytes()
    except UnsupportedValue:
        return value


def received(value: object) -> Any:
    """Return the value that a worker has sent."""
    return unpack(torch.from_numpy(np.frombuffer(bytearray(value), np.uint8))) if isinstance(value, bytes) else value
