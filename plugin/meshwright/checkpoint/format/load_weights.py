"""Opens a checkpoint, whose manifest and indexes are checked, and loads its weights shard by shard; also those of
safetensors files.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.checkpoint.files.place import Place, absolute, place, read_same
from meshwright.checkpoint.files.reading import digest_in
from meshwright.checkpoint.files.storage import storage_of
from meshwright.checkpoint.format.checkpoint_folders import (
    NAME,
    Manifest,
    checkpoint_folders,
    find_checkpoint,
    is_checkpoint,
)
from meshwright.checkpoint.format.part_files import PartIndex
from meshwright.checkpoint.one_device.published_form import as_of_model
from meshwright.checkpoint.one_device.safetensors_file import Entry, storage
from meshwright.checkpoint.one_device.weight_files import WeightFiles, WeightSource
from meshwright.compiling import without_compilation
from meshwright.errors import CheckpointError
from meshwright.faults.every_rank import on_every_rank
from meshwright.faults.together import on_first_rank, succeed_together
from meshwright.layout.row_layout import StridedBlock, numel
from meshwright.layout.tensor_layout import TensorLayout, is_held, layout_if_any
from meshwright.mesh.axes import Mesh
from meshwright.optim.runtime import Runtime, find_runtime
from meshwright.outside_files import shown
from meshwright.parallel.shards.stand_in import reading_shards
from meshwright.progress import Progress


@dataclass(frozen=True, kw_only=True)
class OpenCheckpoint:
    """A checkpoint whose manifest and indexes are read and checked."""

    folder: Place
    manifest: Manifest
    parts: list[PartIndex]

    @staticmethod
    def read(folder: Place, name: str = NAME) -> OpenCheckpoint:
        """Read the manifest and all indexes of a checkpoint.

        Args:
            folder: its folder.
            name: the name of its manifest.

        Raises:
            CheckpointError: if one is missing or damaged, or an element is in none; the message names what is wrong.
        """
        manifest = Manifest.read(folder, name)
        parts = [PartIndex.read(folder, place, manifest.files) for place in range(manifest.ranks)]
        for part in parts:
            if unknown := sorted(part.pieces.keys() - manifest.tensors.keys()):
                raise CheckpointError(f"{part.path} has elements of {shown(unknown[0])}, which {name} does not list")
        for key, problem in uncovered(manifest, parts):
            raise CheckpointError(f"{folder} is damaged: {name} lists {key}, of which {problem}")
        return OpenCheckpoint(folder=folder, manifest=manifest, parts=parts)

    def random_of(self, mesh: Mesh) -> Any:
        """Return the random state for a rank: its own on the mesh of the save, and that of the first rank elsewhere.

        Args:
            mesh: the ranks that load, and this rank's place among them.
        """
        saved, present = ({axis: n for axis, n in sizes.items() if n > 1} for sizes in (self.manifest.mesh, mesh.sizes))
        is_same = (self.manifest.ranks, saved) == (mesh.size, present)
        return self.parts[mesh.index if is_same else 0].random

    def read_tensor(self, key: str, dtype: torch.dtype, layout: TensorLayout, on_read: Callable[[int], None]) -> Tensor:
        """Read what this rank has of a tensor, on the CPU; padding is zero. See :meth:`read_into`."""
        try:
            values = storage(layout, dtype)
        except RuntimeError as error:  # torch's name for too little memory
            raise CheckpointError(
                f"{self.folder}: {key} of the shape {list(layout.shape)} does not fit into memory"
            ) from error
        self.read_into(values, key, layout, on_read)
        return values

    def read_into(self, target: Tensor, key: str, layout: TensorLayout, on_read: Callable[[int], None]) -> None:
        """Read what this rank has of a tensor, and check it against the digests of the files.

        Args:
            target: memory for the elements, of any dtype; padding in it is left as it is.
            key: the key of the tensor.
            layout: which elements the rank has.
            on_read: function that is called with the number of bytes after each read.

        Raises:
            CheckpointError: if files are damaged, or some elements are in none of them.
        """
        wanted, found = layout.blocks(), 0
        for part in self.parts:
            for count, num_bytes in part.read_into(key, self.manifest.tensors[key][0], target.view(-1), wanted):
                found += count
                on_read(num_bytes)
        if found != numel(wanted):
            raise CheckpointError(
                f"{self.folder} has {found} of the {numel(wanted)} elements of {key} that this rank needs, so it is "
                "not whole; load another checkpoint"
            )


def uncovered(manifest: Manifest, parts: list[PartIndex]) -> Iterator[tuple[str, str]]:
    """Yield the tensors that have elements in no file, or in several, and what is wrong with each."""
    blocks: dict[str, list[StridedBlock]] = defaultdict(list)
    for part in parts:
        for key, piece in part.pieces.items():
            blocks[key] += piece.blocks
    for key, (_, shape) in manifest.tensors.items():
        if problem := miscovered(blocks[key], math.prod(shape)):
            yield key, problem


def miscovered(blocks: list[StridedBlock], total: int) -> str | None:
    """Return what is wrong with blocks that must have each of ``total`` elements once; None if nothing is.

    The elements are seen as rows of the length of the blocks' stride, in which each block is a few rectangles. The
    rectangles cover each element once if adding 1 at their first corners, and subtracting 1 behind them, leaves at each
    corner what the whole tensor leaves. So the work does not depend on how many elements a block has.
    """
    for b in blocks:
        if (last := b.whole + (b.count - 1) * b.whole_stride + b.length) > total:
            return f"the files have {last} elements or more, not {total}"
    widths = {b.whole_stride for b in blocks if b.count > 1} or {max(total, 1)}
    if len(widths) > 1:
        return f"the files have runs with the strides {sorted(widths)[:5]}, and not one stride"
    width = widths.pop()
    corners: dict[tuple[int, int], int] = defaultdict(int)
    for sign, block in [*((1, b) for b in blocks), (-1, StridedBlock(0, 0, total))]:
        for row, column, stop_row, stop_column in _rectangles(block, width):
            corners[row, column] += sign
            corners[row, stop_column] -= sign
            corners[stop_row, column] -= sign
            corners[stop_row, stop_column] += sign
    if not (wrong := [place for place, count in corners.items() if count]):
        return None
    row, column = min(wrong)
    where = "in no file" if corners[row, column] < 0 else "in more than one place"
    return f"element {row * width + column} is {where}"


def _rectangles(block: StridedBlock, width: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the first row and column of each rectangle of a block, and those behind it."""
    row, column = divmod(block.whole, width)
    stop = column + block.length
    if block.count > 1 or stop <= width:  # the same columns of each row, perhaps the first ones in the next row
        yield row, column, row + block.count, min(stop, width)
        if stop > width:
            yield row + 1, 0, row + 1 + block.count, stop - width
        return
    last, rest = divmod(stop, width)  # one run over several rows
    yield row, column, row + 1, width
    if last > 1:
        yield row + 1, 0, row + last, width
    if rest:
        yield row + last, 0, row + last + 1, rest


def open_together(folder: Place) -> OpenCheckpoint:
    """Open the same checkpoint on all ranks; every rank must make the call.

    Raises:
        CheckpointError: on every rank, if it is damaged, or hosts without a shared disk have different ones.
    """
    return read_same(folder, lambda: (OpenCheckpoint.read(folder), digest_in(folder / NAME)))


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
