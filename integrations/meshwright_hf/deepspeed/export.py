"""One-device weights out of an engine: over tp, and over dp where ZeRO-3 splits them further."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

from meshwright.checkpoint.whole_tensors import full_state_dict as state_dict_of


def full_state_dict(engine: Any) -> dict[str, Tensor]:
    """The one-device state dict of an engine's model, on the CPU of rank 0; empty elsewhere.

    A collective call: every rank makes it. It is in the dtype that the model computes in.

    Args:
        engine: of :func:`meshwright_hf.deepspeed.initialize`.

    Example::

        weights = full_state_dict(engine)
        if dist.get_rank() == 0:
            torch.save(weights, "model.pt")
    """
    return state_dict_of(engine.module)


def save_pretrained(engine: Any, folder: str | os.PathLike[str], **options: Any) -> None:
    """Write one-device files that ``from_pretrained`` reads, tensor by tensor; every rank calls it.

    DeepSpeed's zero_to_fp32 makes such a file of a checkpoint too, but of tp=1 only.

    Args:
        engine: of :func:`meshwright_hf.deepspeed.initialize`.
        folder: where to; on rank 0's disk.
        options: of transformers' ``save_pretrained``, e.g. ``max_shard_size``.
    """
    engine.module.save_pretrained(folder, **options)
