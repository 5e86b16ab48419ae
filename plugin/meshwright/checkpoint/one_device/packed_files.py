"""The statistics of packed weights in safetensors files, beside the weights, as bitsandbytes names them.

A weight of 4 bits, ``layer.weight``, has ``layer.weight.absmax``, ``layer.weight.quant_map``, the same of the absmax if
it is quantised too, and its shape and kinds as text. One of 8 bits has ``layer.SCB``, a number for each row.
"""

from __future__ import annotations

from typing import Any

import torch

from meshwright.checkpoint.one_device.safetensors_file import Entry
from meshwright.checkpoint.one_device.weight_files import WeightFiles
from meshwright.errors import CheckpointError
from meshwright.layout.packed_weights import PackedMatrix

_TEXTS = "quant_state.bitsandbytes__"


def read_statistics(files: WeightFiles, name: str, module: Any, packing: PackedMatrix, device: torch.device) -> Any:
    """Read the statistics of a whole weight, as the library keeps them: a tensor for 8 bits, an object for 4.

    Args:
        files: the checkpoint.
        name: the name of the weight in it.
        module: the module that has the weight.
        packing: how the weight is stored.
        device: the device on which the rank keeps them.

    Raises:
        CheckpointError: if the checkpoint has none, or they are those of another weight.
    """
    if packing.block == 1:
        scales = f"{name.removesuffix('weight')}SCB"
        _require(files, name, scales in files.entries, f"no {scales}")
        is_for_rows = files.entries[scales][1].shape == packing.shape[:1]
        _require(files, name, is_for_rows, f"no number for each row in {scales}")
        return files.read(scales, torch.float32).to(device)
    entries = _beside(files, name)
    _require(files, name, any(key.startswith(_TEXTS) for key in entries), f"no {name}.{_TEXTS}*")
    tensors = {key: files.read(f"{name}.{key}", entry.dtype) for key, entry in entries.items()}
    try:
        state = type(module.weight.quant_state).from_dict(tensors, device)
        blocks = -(-packing.shape.numel() // state.blocksize)
        fits = state.shape == packing.shape and state.absmax.numel() == blocks and isinstance(state.dtype, torch.dtype)
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{files.source}: the statistics of {name} cannot be read: {error!r}") from error
    _require(files, name, fits, f"the shape {list(packing.shape)} in the model, and {list(state.shape)} in its text")
    _require(files, name, state.blocksize == packing.block, f"blocks of {state.blocksize} values, not {packing.block}")
    return state


def _beside(files: WeightFiles, name: str) -> dict[str, Entry]:
    prefix = f"{name}."
    return {key.removeprefix(prefix): entry for key, (_, entry) in files.entries.items() if key.startswith(prefix)}


def _require(files: WeightFiles, name: str, fits: bool, what: str) -> None:
    if not fits:
        raise CheckpointError(f"{files.source}: {name} is packed in the model, but has {what}")
