"""Exports one-device weights from an engine: gathered over tp, and over dp under ZeRO-3."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

from meshwright.checkpoint.one_device.whole_tensors import full_state_dict as state_dict_of


def full_state_dict(engine: Any) -> dict[str, Tensor]:
    """Return the one-device state dict of an engine's model on the CPU of rank 0, and an empty dict on other ranks.

    Every rank makes the call. The weights have the dtype in which the model computes.

    Args:
        engine: an engine from :func:`meshwright_hf.deepspeed.initialize`.

    Example::

        weights = full_state_dict(engine)
        if dist.get_rank() == 0:
            torch.save(weights, "model.pt")
    """
    return state_dict_of(engine.module)


def save_pretrained(engine: Any, folder: str | os.PathLike[str], **options: object) -> None:
    """Write one-device files that ``from_pretrained`` reads, tensor by tensor; every rank makes the call.

    DeepSpeed's zero_to_fp32 also makes such a file from a checkpoint, but only for tp=1.

    Args:
        engine: an engine from :func:`meshwright_hf.deepspeed.initialize`.
        folder: the folder to write to, on rank 0's disk.
        options: the options of transformers' ``save_pretrained``, e.g. ``max_shard_size``.
    """
    engine.module.save_pretrained(folder, **options)
