"""The timeouts of process groups, after which their backends give up.

A collective of gloo raises an error, to which the guard adds what the other ranks do. NCCL has a watchdog instead,
which ends the process from another thread and knows nothing of other ranks. So it waits until the guard has explained
the error.
"""

from __future__ import annotations

import datetime

import torch.distributed as dist

WATCHDOG_WAITS = 30.0  # seconds that NCCL's watchdog waits longer than the guard


def set_timeouts(timeout: float) -> None:
    """Set the timeout of every process group of this process; see ``set_timeout``."""
    for group in list(dist.distributed_c10d._world.pg_map):
        set_timeout(group, timeout)


def set_timeout(group: dist.ProcessGroup, timeout: float) -> None:
    """Set the timeout of a process group whose collectives raise, and let NCCL's watchdog wait for longer than that.

    The watchdog's time is never shortened, since the program may have chosen it for a group of its own.

    Args:
        group: the process group.
        timeout: the seconds.
    """
    for backend in {group._get_backend(device) for device in group._device_types if device.type in ("cpu", "cuda")}:
        if backend.name() != "nccl":
            backend._set_default_timeout(datetime.timedelta(seconds=timeout))
            continue
        watchdog = datetime.timedelta(seconds=timeout + WATCHDOG_WAITS)
        if backend.options._timeout < watchdog:
            backend._set_default_timeout(watchdog)
