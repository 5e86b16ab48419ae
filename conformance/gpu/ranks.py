"""Processes of a plan on this machine: over gloo, which lets them share a GPU, or over NCCL."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from harness import WorkerPool
from meshwright.mesh.host_wire import SHARE_GPUS, open_host_wire

_TIMEOUT = 400.0  # seconds for one function on all ranks; some compile large models

_joined = itertools.count()  # the groups with NCCL that this process has made


@dataclass
class RankPools:
    """The processes of a section, by backend and number; each lives until the section ends."""

    _pools: dict[tuple[str, int], WorkerPool] = field(default_factory=dict)

    def run(self, ranks: int, function: Callable[..., Any], *args: Any, backend: str = "gloo") -> list[Any]:
        """Return what a module-level function returns on each rank.

        Args:
            ranks: the number of ranks.
            function: the function.
            args: its arguments.
            backend: "gloo", or "nccl", for which each rank needs a GPU of its own.
        """
        key = (backend, ranks)
        if key not in self._pools:
            self._pools[key] = WorkerPool(ranks)
        enter = _over_nccl if backend == "nccl" else _over_gloo
        return self._pools[key].run(enter, function, args, timeout=_TIMEOUT)


@contextlib.contextmanager
def rank_pools() -> Iterator[RankPools]:
    """Yield pools of processes, which end with the context."""
    pools = RankPools()
    try:
        yield pools
    finally:
        for workers in pools._pools.values():
            workers.close()


def _over_gloo(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
        open_host_wire()
    return function(*args)


def _over_nccl(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    os.environ[SHARE_GPUS] = "0"  # these processes never share a GPU
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    dist.destroy_process_group()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        store=dist.PrefixStore(f"nccl{next(_joined)}", store),
        rank=rank,
        world_size=world,
        device_id=device,
    )
    return function(*args)
