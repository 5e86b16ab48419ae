"""Probes of copies between the host's memory and the device's, or within the host's memory on CPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from meshwright.calibration.timing import Probe, Run

_SIZES = (2**16, 2**20, 2**24, 2**26)


def copy_probes(device: torch.device) -> Iterator[Probe]:
    """Yield the probes of copies."""
    for size in _SIZES:
        for kind in ("host to device", "device to host") if device.type == "cuda" else ("memory to memory",):
            yield Probe(kind=kind, make=partial(_copy, device, kind, size), sizes={"bytes": size})


def _copy(device: torch.device, kind: str, size: int) -> Run:
    is_cuda = device.type == "cuda"
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=is_cuda)
    other = torch.zeros(size, dtype=torch.uint8, device=device)
    source, target = (other, host) if kind == "device to host" else (host, other)
    return lambda: target.copy_(source, non_blocking=is_cuda)
