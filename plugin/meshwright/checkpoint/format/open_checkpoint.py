"""A checkpoint whose manifest and indexes are read and checked, so that its tensors can be read."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.files.place import Place
from meshwright.checkpoint.files.reading import digest_in
from meshwright.checkpoint.files.same_everywhere import read_same
from meshwright.checkpoint.format.manifest import NAME, Manifest
from meshwright.checkpoint.format.part_files import PartIndex
from meshwright.checkpoint.one_device.safetensors_file import storage
from meshwright.errors import CheckpointError
from meshwright.layout.blocks import StridedBlock, numel
from meshwright.layout.tensor_layout import TensorLayout
from meshwright.mesh.axes import Mesh
from meshwright.schema import shown


@dataclass(frozen=True, kw_only=True)
class OpenCheckpoint:
    """A checkpoint whose manifest and indexes are read and checked."""

    folder: Place
    manifest: Manifest
    parts: list[PartIndex]

    @staticmethod
    def read(folder: Place) -> OpenCheckpoint:
        """Read the manifest and all indexes of a checkpoint.

        Raises:
            CheckpointError: if one is missing or damaged, or an element is in none; the message names what is wrong.
        """
        manifest = Manifest.read(folder)
        parts = [PartIndex.read(folder, place, manifest.files) for place in range(manifest.ranks)]
        for part in parts:
            if unknown := sorted(part.pieces.keys() - manifest.tensors.keys()):
                raise CheckpointError(f"{part.path} has elements of {shown(unknown[0])}, which {NAME} does not list")
        for key, problem in uncovered(manifest, parts):
            raise CheckpointError(f"{folder} is damaged: {NAME} lists {key}, of which {problem}")
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
