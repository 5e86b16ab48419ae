"""A fake process group of any size in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist


@contextlib.contextmanager
def fake_world(world_size: int, rank: int) -> Iterator[None]:
    """Open a fake process group inside the context; its collectives send nothing."""
    if dist.is_initialized():
        raise ValueError("this process is already in a process group; trace or check a plan in a process of its own")
    if world_size == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
