"""Probes of the collectives that the runtime uses, by size and group, inside a node and across nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.calibration.timing import Probe, Run
from meshwright.mesh.axes import Axis
from meshwright.parallel.collectives import all_gather, all_reduce, reduce_scatter, start_all_reduce

_SIZES = tuple(2**power for power in (10, 13, 16, 18, 20, 22, 24, 26))  # 1 KiB to 64 MiB
_ALWAYS, _SLOW = 2**20, 2**28  # largest size in bytes that is always measured; bytes per second of a slow link
_BESIDE = 2**24  # bytes of the gradient bucket that is reduced during compute
_OPERATIONS: dict[str, Callable[[Tensor, Axis], Tensor]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
}


def axes(per_node: int) -> list[tuple[int, Axis]]:
    """Return (stride, axis) for every group size: neighbours in a node first, then one rank per node, then all ranks.

    For each stride and size, every rank is in one group, and all groups communicate at once, as in a mesh.

    Args:
        per_node: processes per node.
    """
    world = dist.get_world_size()
    nodes = world // per_node
    layouts = [(1, size) for size in range(2, per_node + 1) if per_node % size == 0]
    if nodes > 1:
        layouts += [(per_node, nodes), (1, world)]
    return [(stride, _axis(stride, size)) for stride, size in dict.fromkeys(layouts)]


def _axis(stride: int, size: int) -> Axis:
    blocks = range(0, dist.get_world_size(), stride * size)
    firsts = [first for block in blocks for first in range(block, block + stride)]
    return Axis.over([range(first, first + stride * size, stride) for first in firsts], "group")


def communication_probes(device: torch.device, per_node: int, *, longest: float, rate: float) -> Iterator[Probe]:
    """Yield the probes of collectives, whose "bytes" are the size of the whole buffer.

    Args:
        device: the device whose memory is sent.
        per_node: processes per node.
        longest: seconds that one run may take.
        rate: approximate floating-point operations per second of the device.
    """
    groups = axes(per_node)
    for stride, axis in groups:
        sizes = {"group": axis.size, "stride": stride, "per_node": per_node}
        for kind, operation in _OPERATIONS.items():
            for total in _SIZES:
                if total > max(_ALWAYS, _SLOW * longest):
                    break
                make = _collective(operation, axis, total, device, divided=kind == "all_gather")
                yield Probe(kind=kind, make=make, sizes={"bytes": total, **sizes})
    widest = groups[-1][1]
    for kind in ("transfer alone", "compute alone", "both"):
        yield Probe(kind=kind, make=_beside(kind, widest, device, rate * longest / 4), sizes={"bytes": _BESIDE})


def _collective(
    operation: Callable[[Tensor, Axis], Tensor], axis: Axis, total: int, device: torch.device, *, divided: bool
) -> Callable[[], Run]:
    def make() -> Run:
        rows = total // 4 // axis.size
        x = torch.zeros(rows if divided else rows * axis.size, device=device)
        return lambda: operation(x, axis)

    return make


def _beside(kind: str, axis: Axis, device: torch.device, flops: float) -> Callable[[], Run]:
    """Return a function that makes a bucket's reduction, a matmul, or both at the same time, as in backward."""

    def make() -> Run:
        bucket = torch.zeros(_BESIDE // 4, device=device)
        side = max(128, int((flops / 2) ** (1 / 3)))
        a, b = (torch.rand(side, side, device=device) for _ in range(2))

        def run() -> None:
            wait = start_all_reduce(bucket, axis) if kind != "compute alone" else None
            if kind != "transfer alone":
                a @ b
            if wait is not None:
                wait()

        return run

    return make
