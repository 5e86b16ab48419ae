"""Counts the collectives of a training step, and their bytes, where torch dispatches them."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.contenders import Contender
from meshwright.parallel import collectives

KINDS = {
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "all_gather_into_tensor_out": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "allreduce_": "all-reduce",
    "allreduce_coalesced_": "all-reduce",
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "alltoall_": "all-to-all",
    "alltoall_base_": "all-to-all",
    "all_to_all_single": "all-to-all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
}
NAMESPACES = ("c10d", "_c10d_functional")
PHASES = ("forward", "backward", "update")


@dataclass
class Traffic:
    """The collectives of one phase: the number of each kind, and the bytes of the whole (gathered) tensors."""

    counts: dict[str, float] = field(default_factory=dict)
    bytes: float = 0.0

    def add(self, kind: str, size: int) -> None:
        """Count one collective over ``size`` bytes."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self.bytes += size

    def per_layer(self, shallower: Traffic, layers: int) -> Traffic:
        """Return the traffic per layer of the ``layers`` that this model has more than a shallower one."""
        kinds = self.counts.keys() | shallower.counts.keys()
        counts = {kind: (self.counts.get(kind, 0) - shallower.counts.get(kind, 0)) / layers for kind in kinds}
        added = {kind: count for kind, count in counts.items() if count}
        return Traffic(counts=added, bytes=(self.bytes - shallower.bytes) / layers)

    def __str__(self) -> str:
        return " + ".join(f"{count:g} {kind}" for kind, count in sorted(self.counts.items())) or "none"


class CountCollectives(TorchDispatchMode):
    """Counts every collective issued while active, whichever library issues it."""

    def __init__(self) -> None:
        super().__init__()
        self.traffic = Traffic()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor breaks the call up, and its collectives are dispatched here
        result = func(*args, **(kwargs or {}))
        if getattr(func, "namespace", None) in NAMESPACES:
            kind = KINDS.get(func._opname)
            if kind is not None and _ranks(args) > 1:
                self.traffic.add(kind, max(_bytes(args), _bytes(result)))
        return result


def _ranks(args: tuple[Any, ...]) -> int:
    """Return the size of the process group in a collective's arguments; a group of one rank moves no data."""
    for leaf in tree_leaves(args):
        if isinstance(leaf, torch.ScriptObject) and leaf._type().name() == "ProcessGroup":
            return dist.ProcessGroup.unbox(leaf).size()
    return _resolve_process_group(args[-1]).size()  # a functional collective ends with its group's name


def _bytes(tree: Any) -> int:
    """Return the bytes of the largest tensor in a call's arguments or results: the whole tensor, not a rank's part."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return max((tensor.nbytes for tensor in tensors), default=0)


def traffic_of_step(contender: Contender) -> dict[str, Traffic]:
    """Return the collectives of one step by phase: ``forward``, ``backward``, ``update``."""
    collectives.GLOO_BROADCASTS_FROM = sys.maxsize  # count one all-gather, as NCCL has it, and not its broadcasts
    with CountCollectives() as forward:
        loss = contender.forward()
    with CountCollectives() as backward:
        contender.backward(loss)
    with CountCollectives() as update:
        contender.update()
    modes = (forward, backward, update)
    return {phase: mode.traffic for phase, mode in zip(PHASES, modes, strict=True)}


def traffic_per_layer(deep: Contender, shallow: Contender, layers: int) -> dict[str, Traffic]:
    """Return the collectives that each decoder layer adds to a step: the difference of two depths, per layer.

    The difference leaves out the cost of the embedding, the head and the loss. It works for any library, without
    knowledge of the library's code.
    """
    deep_traffic, shallow_traffic = traffic_of_step(deep), traffic_of_step(shallow)
    return {phase: deep_traffic[phase].per_layer(shallow_traffic[phase], layers) for phase in PHASES}
