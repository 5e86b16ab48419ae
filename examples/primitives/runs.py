"""What every program here shares: a process group, and printing in order of rank."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


def launch(main: Callable[[], None]) -> None:
    """Run ``main`` as one rank of those that torchrun started."""
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
    """Raise unless two tensors agree to the rounding of sums in another order, by default in float64."""
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
    if dist.get_rank() == 0:
        print(f"{name}: equal to one process", flush=True)
