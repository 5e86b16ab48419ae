"""The weights of a checkpoint that ``save_checkpoint`` wrote, read like those of safetensors files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshwright.checkpoint.folders import checkpoint_folders, find_checkpoint, is_checkpoint
from meshwright.checkpoint.opened import Opened, check_same_everywhere
from meshwright.checkpoint.part_files import read_elements
from meshwright.checkpoint.regions import Block, between, numel, shard
from meshwright.checkpoint.safetensors_file import Entry, ShardSlice
from meshwright.checkpoint.weight_files import WeightFiles, WeightSource
from meshwright.errors import CheckpointError
from meshwright.faults.together import on_first_rank
from meshwright.progress import Progress

PREFIX = "weights/"


def settled(source: WeightSource | None) -> WeightSource | None:
    """Replace a folder of checkpoints by the newest whole one in it; every rank must make the call.

    Rank 0 chooses, since another job may add a checkpoint in the meantime.

    Raises:
        CheckpointError: on every rank, if a checkpoint is not whole, or ranks see different ones at one path.
    """

    def find() -> str | None:
        if not isinstance(source, str | os.PathLike):
            return None
        path = Path(os.path.abspath(source))
        is_ours = is_checkpoint(path) or (
            path.is_dir() and not any(path.glob("*.safetensors*")) and bool(checkpoint_folders(path))
        )
        return str(find_checkpoint(path)[0]) if is_ours else None

    path = on_first_rank(find)
    if path is None:
        return source
    check_same_everywhere(Path(path))
    return None if source is None else path  # to_distributed raises the error for a rank without weights


def open_weights(source: WeightSource) -> WeightFiles:
    """Open the weights of a checkpoint that ``save_checkpoint`` wrote, or of safetensors files.

    Args:
        source: the folder of a checkpoint, or what :meth:`WeightFiles.open` takes.

    Raises:
        CheckpointError: if a file or tensor is missing or damaged; the message says which.
    """
    if isinstance(source, str | os.PathLike) and is_checkpoint(Path(source)):
        return CheckpointWeights.of(Opened.read(Path(source)))
    return WeightFiles.open(source)


@dataclass(frozen=True)
class CheckpointWeights(WeightFiles):
    """The weights of a checkpoint; a tied weight has all of its names.

    Args:
        opened: the checkpoint.
        keys: the checkpoint's key of each tensor, by name.
    """

    opened: Opened
    keys: dict[str, str]

    @staticmethod
    def of(opened: Opened) -> CheckpointWeights:
        """Return the weights of a checkpoint."""
        manifest = opened.manifest
        own = {key: key for key in manifest.tensors if key.startswith(PREFIX)}
        keys = {name.removeprefix(PREFIX): key for name, key in (own | manifest.ties).items()}
        entries = {name: (opened.folder, Entry(*manifest.tensors[key], start=0)) for name, key in keys.items()}
        return CheckpointWeights(opened.folder, entries, Progress(f"reading {opened.folder.name}"), opened, keys)

    def read(self, name: str, wanted: ShardSlice, dtype: torch.dtype) -> Tensor:
        """Read only this rank's shard of a tensor, or a part of it, to the CPU, and check its digests."""
        entry, rows, part = self.entries[name][1], wanted.rows, wanted.part
        shape = list(entry.shape)
        if not shape or rows.is_replicated:
            total = torch.Size(shape).numel()
            blocks = [Block(0, 0, total)] if total else []
        else:
            shape[rows.dim] = rows.local_size
            blocks = shard(entry.shape, rows, wanted.rank)
        if part is not None:
            shape, blocks = [part[1] - part[0]], between(blocks, *part)
        has_padding = numel(blocks) < torch.Size(shape).numel()
        try:
            values = torch.zeros(shape, dtype=dtype) if has_padding else torch.empty(shape, dtype=dtype)
        except RuntimeError as error:  # torch's name for too little memory
            raise CheckpointError(
                f"{self.opened.folder}: {name} of the shape {list(entry.shape)} does not fit into memory"
            ) from error
        read_elements(self.opened.parts, self.keys[name], entry.dtype, values.view(-1), blocks, self.progress.add)
        return values
