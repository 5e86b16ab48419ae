"""Waits for messages between two ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist


def wait_for_message(work: dist.Work | None, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Wait until a message has been sent or received, but no longer than its group's timeout.

    Gloo's waits for a single message have the timeout that the group was made with, unless they are given another. The
    waits for collectives have the group's current timeout, which ``timeout_s`` sets.

    Args:
        work: what ``isend`` or ``irecv`` returned.
        group: the process group; None for that of all ranks.
        device: the device of the message.

    Raises:
        RuntimeError: the message did not come, or was not taken, in time.
    """
    group = dist.group.WORLD if group is None else group
    assert work is not None and group is not None, "a rank outside of the group sends and gets no messages"
    options = group._get_backend(device).options if device.type == "cpu" else None
    if options is None:  # NCCL's waits have the group's timeout; a fake rank's group has no options
        work.wait()
    else:
        work.wait(options._timeout)
