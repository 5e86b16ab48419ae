"""The memory that each rank holds, measured, beside the planner's estimate."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.faults.together import texts_of_all
from meshwright.optim.runtime import Runtime, device_of, runtime_of
from meshwright_plan.formatting import grid
from meshwright_plan.formatting import memory as memory_text
from meshwright_plan.memory.peak import Memory


@dataclass(frozen=True, kw_only=True)
class HeldMemory:
    """The memory of one rank in bytes, whose parts add up to the peak.

    Args:
        weights: the model's parameters and buffers, as this rank stores them.
        gradients: the gradients that exist now, and the buckets in which they are reduced.
        optimizer: the optimizer's state, with 32-bit copies of the weights.
        rest: the other bytes of the peak: activations, logits and temporary tensors, and on CPU the process itself.
        peak: on CUDA the largest memory that torch had allocated, on CPU the largest resident memory of the process.
    """

    weights: float
    gradients: float
    optimizer: float
    rest: float
    peak: float


@dataclass(frozen=True, kw_only=True)
class MemoryOfRanks:
    """The memory of every rank, measured and estimated.

    Args:
        measured: the memory of each rank, by rank.
        estimated: the planner's estimate for each rank; empty if no estimate was possible.

    Example::

        report = mw.memory_of(model, optimizer)
        print(report)
        print(max(held.peak for held in report.measured) / 2**20, "MiB")
    """

    measured: tuple[HeldMemory, ...]
    estimated: tuple[HeldMemory, ...] = ()

    def __str__(self) -> str:
        names = list(asdict(self.measured[0]))
        rows: list[tuple[str, ...]] = [("rank", "", *names)]
        for rank, held in enumerate(self.measured):
            rows.append((str(rank), "measured", *(memory_text(value) for value in asdict(held).values())))
            if self.estimated:
                rows.append(("", "estimated", *(memory_text(value) for value in asdict(self.estimated[rank]).values())))
        return grid(rows, left=2)


def memory_of_ranks(model: nn.Module, optimizer: Optimizer | None, estimated: Sequence[Memory] = ()) -> MemoryOfRanks:
    """Return what each rank holds now, and its peak so far; every rank makes the call.

    Args:
        model: a distributed model.
        optimizer: its optimizer.
        estimated: the planner's estimate for each rank.
    """
    runtime = runtime_of(model)
    own = asdict(held_memory(model, optimizer, runtime))
    texts = texts_of_all(json.dumps(own)) if dist.is_initialized() else [json.dumps(own)]
    return MemoryOfRanks(
        measured=tuple(HeldMemory(**json.loads(text)) for text in texts),
        estimated=tuple(as_held(memory) for memory in estimated),
    )


def as_held(memory: Memory) -> HeldMemory:
    """Return the planner's estimate, divided into the parts of ``HeldMemory``."""
    held = memory.weights + memory.gradients + memory.optimizer
    return HeldMemory(
        weights=memory.weights,
        gradients=memory.gradients,
        optimizer=memory.optimizer,
        rest=memory.total - held,
        peak=memory.total,
    )


def held_memory(model: nn.Module, optimizer: Optimizer | None, runtime: Runtime) -> HeldMemory:
    """Return what this rank holds now, and its peak so far; does not communicate."""
    seen: set[int] = set()
    own = [*model.parameters(), *model.buffers()]
    flats = [] if runtime.weights is None else [flat.master for flat in runtime.weights.flats]
    # The 32-bit copies of half-precision weights are state of the optimizer.
    half = next((p.dtype for p in own if p.is_floating_point()), torch.float32) in (torch.float16, torch.bfloat16)
    sharded = [] if runtime.gradients.zero is None else runtime.gradients.zero.sharded
    copies = [bucket.weights.master for bucket in sharded]
    if half:
        copies += [flat for flat in flats if flat.dtype is torch.float32]
        flats = [flat for flat in flats if flat.dtype is not torch.float32]
    weights = _bytes([*own, *flats], seen)
    shards = [piece.shard for bucket in sharded for piece in bucket.slices]
    gradients = _bytes((p.grad for p in [*own, *shards] if isinstance(p.grad, Tensor)), seen)
    states = [] if optimizer is None else [one for one in dict.values(optimizer.state) if isinstance(one, dict)]
    state = [x for one in states for x in one.values()]
    stepped = [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]
    device = device_of(model)
    on_device = (x for x in [*state, *stepped] if isinstance(x, Tensor) and x.device.type == device.type)
    kept = _bytes([*copies, *on_device], seen)  # with offload the host has the rest
    peak = peak_memory(device)
    rest = max(0.0, peak - weights - gradients - kept)
    return HeldMemory(weights=weights, gradients=gradients, optimizer=kept, rest=rest, peak=peak)


def _bytes(tensors: Iterable[Tensor], seen: set[int]) -> float:
    """Return the bytes of the tensors' storages that were not seen before."""
    total = 0
    with torch._C.DisableTorchFunctionSubclass():  # placeholders refuse to be read
        for tensor in tensors:
            if tensor.layout is not torch.strided or tensor.is_meta:
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                total += storage.nbytes()
    return float(total)


def peak_memory(device: torch.device) -> float:
    """Return this rank's largest memory so far in bytes: of its GPU, or of the process on CPU."""
    if device.type != "cpu":
        # Not of torch.accelerator, which raises where a device has tensors but no allocator, as fake CUDA tensors do.
        return float(torch.get_device_module(device).max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
