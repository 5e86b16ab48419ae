"""The processes that were launched, and the group that they form."""

from __future__ import annotations

import atexit
import datetime
import os

import torch
import torch.distributed as dist


def world_size() -> int:
    """The number of processes: of the process group, else of the launcher's environment."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def device_for(model_device: torch.device) -> torch.device:
    """This process's device of the kind the model is on."""
    if model_device.type != "cuda":
        return model_device
    local_rank = int(os.environ.get("LOCAL_RANK", dist.get_rank() if dist.is_initialized() else 0))
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def start_process_group(device: torch.device, timeout_s: float) -> None:
    """Join the launcher's process group, unless the script has done so.

    The group is left at exit: gloo's threads abort the interpreter otherwise.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    if dist.is_initialized() or world_size() == 1:
        return
    if device.type == "cuda":
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, timeout=timeout)
    else:
        dist.init_process_group("gloo", timeout=timeout)
    atexit.register(leave_process_group)


def leave_process_group() -> None:
    """Leave the group, if there is one; at exit gloo's threads abort the interpreter otherwise."""
    if dist.is_initialized():
        dist.destroy_process_group()


def ensure_process_group(timeout_s: float = 120.0) -> None:
    """Join the launcher's process group, unless the script has done so; a process that is alone makes one of its own.

    DTensors need a group also where there is one process.
    """
    device = device_for(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    start_process_group(device, timeout_s)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        atexit.register(leave_process_group)
