"""Helpers for the programs in this folder: a process group, and printing in order of rank."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


def launch(main: Callable[[], None]) -> None:
    """Run ``main`` in a process group of the processes that torchrun started."""
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()


def show(name: str, local: Tensor) -> None:
    """Print the shape of this rank's local tensor, and its values if they are few, in order of rank."""
    values = local.tolist() if local.numel() <= 12 else ""
    for rank in range(dist.get_world_size()):
        if rank == dist.get_rank():
            print(f"rank {rank}: {name} {tuple(local.shape)} {values}", flush=True)
        dist.barrier()


def compare(name: str, result: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    """Raise unless two tensors are equal up to the rounding of reordered sums; the default tolerance is for float64."""
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
    if dist.get_rank() == 0:
        print(f"{name}: equal to one process", flush=True)
