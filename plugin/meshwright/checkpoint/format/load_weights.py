"""Loads the weights alone, of safetensors files or of a checkpoint that ``save_checkpoint`` wrote, shard by shard."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshwright.checkpoint.files.place import absolute, place
from meshwright.checkpoint.files.reading import digest_in
from meshwright.checkpoint.files.same_everywhere import read_same
from meshwright.checkpoint.files.storage import storage_of
from meshwright.checkpoint.format.checkpoint_folders import checkpoint_folders, find_checkpoint, is_checkpoint
from meshwright.checkpoint.format.manifest import NAME
from meshwright.checkpoint.format.open_checkpoint import OpenCheckpoint
from meshwright.checkpoint.one_device.converted_files import as_of_model
from meshwright.checkpoint.one_device.safetensors_file import Entry
from meshwright.checkpoint.one_device.weight_files import WeightFiles, WeightSource
from meshwright.compiling import without_compilation
from meshwright.faults.every_rank import on_every_rank
from meshwright.faults.together import on_first_rank, succeed_together
from meshwright.layout.tensor_layout import TensorLayout, is_held, layout_if_any
from meshwright.optim.runtime import Runtime, find_runtime
from meshwright.parallel.shards.reads import reading_shards
from meshwright.progress import Progress

PREFIX = "weights/"


@on_every_rank
def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Read a checkpoint's weights into a model in place; every rank must make the call, and reads its shard only.

    The weights are converted to the model's dtype. ZeRO's float32 master weights of half-precision parameters are set
    from the converted weights; ``load_optimizer`` reads the saved master weights.

    Args:
        model: the model, distributed or not.
        path: a .safetensors file, a .safetensors.index.json, a directory with either, or a folder that
            ``save_checkpoint`` wrote. A folder of such checkpoints stands for the newest whole one in it.

    Raises:
        CheckpointError: if the checkpoint is damaged or belongs to another model; the model is then unchanged. If
            reading fails part-way, the tensors read so far have already been overwritten in the model.

    Example::

        model.save_pretrained("checkpoint")
        mw.load_weights(model, "checkpoint")
    """
    model = without_compilation(model, "load_weights(model, path)")
    runtime = find_runtime(model)
    if runtime is not None:
        runtime.check_own(
            "load_weights",
            "load one of the engine's checkpoints, or load the weights before the engine takes over the model",
        )
    weights = None if runtime is None else runtime.weights
    source = settled(path)
    assert source is not None
    files = succeed_together(lambda: open_weights(source, model))
    names = succeed_together(lambda: files.names_for(model))

    def read() -> None:
        with files.progress as progress, reading_shards():
            progress.start(sum(files.entries[name][1].num_bytes for name in set(names.values())))
            for tensor in dict.fromkeys((*model.parameters(), *model.buffers())):
                if id(tensor) in names and is_held(tensor):
                    value = files.read(names[id(tensor)], tensor.dtype, layout_if_any(tensor))
                    # Under ZeRO stage 3 the runtime keeps this rank's part; the tensor itself has no memory.
                    if weights is None or weights.keep(tensor, value) is value:
                        tensor.data.copy_(value)

    succeed_together(read)
    if runtime is not None:
        take_over_weights(runtime)


def take_over_weights(runtime: Runtime) -> None:
    """Make weights that were read into a model valid: drop gathered copies, and set ZeRO's master weights from them."""
    if runtime.weights is not None:
        runtime.weights.release()
    for bucket in runtime.gradients.zero.sharded if runtime.gradients.zero is not None else ():
        bucket.refresh()


def settled(source: WeightSource | None) -> WeightSource | None:
    """Replace a folder of checkpoints by the newest whole one in it; every rank must make the call.

    Rank 0 chooses, since another job may add a checkpoint in the meantime.

    Raises:
        CheckpointError: on every rank, if a checkpoint is not whole, or ranks see different ones at one path.
    """

    def find() -> str | None:
        if not isinstance(source, str | os.PathLike):
            return None
        path = absolute(source)
        has_weights = any(".safetensors" in name for name in storage_of(path).entries(path))
        is_ours = is_checkpoint(path) or (not has_weights and bool(checkpoint_folders(path)))
        return str(find_checkpoint(path)[0]) if is_ours else None

    path = on_first_rank(find)
    if path is None:
        return source
    read_same(place(path), lambda: (None, digest_in(place(path) / NAME)))
    return None if source is None else path  # to_distributed raises the error for a rank without weights


def open_weights(source: WeightSource, model: nn.Module) -> WeightFiles:
    """Open the weights of a checkpoint that ``save_checkpoint`` wrote, or of safetensors files.

    Args:
        source: the folder of a checkpoint, or what :meth:`WeightFiles.open` takes.
        model: the model under whose names the weights are returned.

    Raises:
        CheckpointError: if a file or tensor is missing or damaged; the message says which.
    """
    if isinstance(source, str | os.PathLike) and is_checkpoint(place(source)):
        return CheckpointWeights.of(OpenCheckpoint.read(place(source)))
    return as_of_model(WeightFiles.open(source), model)


@dataclass(frozen=True)
class CheckpointWeights(WeightFiles):
    """The weights of a checkpoint; a tied weight has all of its names.

    Args:
        opened: the checkpoint.
        keys: the checkpoint's key of each tensor, by name.
    """

    opened: OpenCheckpoint
    keys: dict[str, str]

    @staticmethod
    def of(opened: OpenCheckpoint) -> CheckpointWeights:
        """Return the weights of a checkpoint."""
        manifest = opened.manifest
        own = {key: key for key in manifest.tensors if key.startswith(PREFIX)}
        keys = {name.removeprefix(PREFIX): key for name, key in (own | manifest.ties).items()}
        entries = {name: (opened.folder, Entry(*manifest.tensors[key], start=0)) for name, key in keys.items()}
        return CheckpointWeights(opened.folder, entries, Progress(f"reading {opened.folder.name}"), opened, keys)

    def are_equal(self, one: str, other: str, dtype: torch.dtype) -> bool:
        return self.keys[one] == self.keys[other] or super().are_equal(one, other, dtype)

    def read(self, name: str, dtype: torch.dtype, layout: TensorLayout | None = None) -> Tensor:
        """Read only what this rank has of a tensor, to the CPU, and check its digests; all of it without a layout."""
        layout = layout or self.entries[name][1].layout
        return self.opened.read_tensor(self.keys[name], dtype, layout, self.progress.add)
