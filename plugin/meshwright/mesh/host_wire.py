"""Sends the tensors of GPUs through host memory, so that several ranks can share one GPU.

NCCL needs a GPU for each rank, and gloo has some collectives for CUDA tensors only. With ``MESHWRIGHT_SHARE_GPUS=1``
all process groups are gloo's. Each of their operations that is given CUDA tensors copies them to pinned host memory,
sends them from there, and copies back what came. This waits for the GPU at every operation: it shows that a plan's
numbers are right on a GPU, and never how fast it is.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PythonCallbackWork, Work
from torch.utils._pytree import tree_leaves, tree_map_only

from meshwright.errors import PlanError

SHARE_GPUS = "MESHWRIGHT_SHARE_GPUS"

# torch's operations of process groups. The first argument is what they write, except for what only sends.
OPERATIONS = (
    "allreduce_", "broadcast_", "reduce_", "allgather_", "_allgather_base_", "reduce_scatter_", "_reduce_scatter_base_",
    "alltoall_", "alltoall_base_", "gather_", "scatter_", "send", "recv_",
)  # fmt: skip
_SENDS = "send"
_RETURN_WORK_ALONE = frozenset({"send", "recv_", "reduce_", "gather_", "alltoall_base_"})


def shares_gpus() -> bool:
    """Return whether several ranks may use one GPU, which only the environment allows.

    Raises:
        PlanError: if the variable is neither 0 nor 1.
    """
    value = os.environ.get(SHARE_GPUS, "0")
    if value not in ("0", "1"):
        raise PlanError(f"{SHARE_GPUS}={value!r} in the environment must be 1, to let ranks share a GPU, or 0")
    return value == "1"


@functools.cache  # an operation that is replaced twice would send twice
def open_host_wire() -> torch.library.Library:
    """Send the CUDA tensors of this process through host memory from now on."""
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Overriding a previously registered kernel|.*operators may also be overr")
        for name in OPERATIONS:
            library.impl(name, through_host(name), "CUDA", allow_override=True)
    return library


def through_host(name: str) -> Callable[..., object]:
    """Return a function that does what one of torch's operations does, on copies of its tensors in host memory."""
    operation = getattr(torch.ops.c10d, name).default

    def run(*args: Any) -> object:
        copies: dict[int, Tensor] = {}

        def to_host(x: Tensor) -> Tensor:
            copies[id(x)] = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda).copy_(x)
            return copies[id(x)]

        with torch.no_grad(), waiting_for_the_gpu():
            sent = tree_map_only(Tensor, to_host, args)
        # Through torch.ops, which lets go of Python's lock meanwhile: a thread of gloo may need it to end a tensor.
        found = operation(*sent)
        work = Work.unbox(found if name in _RETURN_WORK_ALONE else found[-1])
        written = [] if name == _SENDS else [x for x in tree_leaves(args[0]) if isinstance(x, Tensor)]

        def finish(timeout: Any) -> bool:
            work.wait(timeout)
            with torch.no_grad(), waiting_for_the_gpu():
                while written:  # a second wait finds nothing left to copy
                    x = written.pop()
                    x.copy_(copies[id(x)])
            return True

        ends = PythonCallbackWork(finish).boxed()
        return ends if name in _RETURN_WORK_ALONE else (args[0], ends)

    return run


@contextlib.contextmanager
def waiting_for_the_gpu() -> Iterator[None]:
    """Allow the host to wait for the GPU, also while ``torch.cuda.set_sync_debug_mode`` forbids it elsewhere."""
    if not torch.cuda.is_initialized():
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
