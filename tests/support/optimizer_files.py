"""What a folder of ``save_optimizer`` holds, and the form of such a folder that earlier versions wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Size, Tensor

from meshwright.checkpoint.format.checkpoint_folders import OPTIMIZER_NAME
from meshwright.checkpoint.format.load_weights import OpenCheckpoint
from meshwright.layout.tensor_layout import TensorLayout


def contents(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the manifest of the optimizer, and the whole tensors by key."""
    opened = OpenCheckpoint.read(folder, OPTIMIZER_NAME)
    tensors = {
        key: opened.read_tensor(key, dtype, TensorLayout(shape=Size(shape)), lambda _: None)
        for key, (dtype, shape) in opened.manifest.tensors.items()
    }
    assert opened.manifest.optimizer is not None
    return opened.manifest.optimizer, tensors


def to_whole_tensors(folder: Path) -> None:
    """Turn a save into the form of earlier versions, which had whole tensors and a manifest without a digest."""
    manifest, tensors = contents(folder)
    for path in folder.iterdir():
        path.unlink()
    file = "optimizer-0123abcd.safetensors"
    save_file(tensors, folder / file)
    fields = {**manifest, "weight_map": dict.fromkeys(tensors, file), "format": "meshwright-optimizer-1"}
    (folder / OPTIMIZER_NAME).write_text(json.dumps(fields))
