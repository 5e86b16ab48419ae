"""A checkpoint whose manifest and indexes are read and checked, so that its tensors can be read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from meshwright.checkpoint.manifest import NAME, Manifest
from meshwright.checkpoint.part_files import PartIndex, digest
from meshwright.checkpoint.regions import Block, numel
from meshwright.errors import CheckpointError
from meshwright.faults.together import exchange_together

_FEW = 100  # up to this many runs of elements, a Python loop is faster than a call of torch


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A checkpoint whose manifest and indexes are read and checked."""

    folder: Path
    manifest: Manifest
    parts: list[PartIndex]

    @staticmethod
    def read(folder: Path) -> Opened:
        """Read the manifest and all indexes of a checkpoint.

        Raises:
            CheckpointError: if one is missing or damaged, or an element is in none; the message names what is wrong.
        """
        manifest = Manifest.read(folder)
        parts = [PartIndex.read(folder, place, manifest.files) for place in range(manifest.sizes.ranks)]
        for part in parts:
            if unknown := sorted(part.pieces.keys() - manifest.tensors.keys()):
                raise CheckpointError(f"{part.path} has elements of {unknown[0]!r}, which {NAME} does not list")
        for key, problem in uncovered(manifest, parts):
            raise CheckpointError(f"{folder} is damaged: {NAME} lists {key}, of which {problem}")
        return Opened(folder=folder, manifest=manifest, parts=parts)


def uncovered(manifest: Manifest, parts: list[PartIndex]) -> Iterator[tuple[str, str]]:
    """Yield the tensors that have elements in no file, or in several, and what is wrong with each."""
    blocks: dict[str, list[Block]] = defaultdict(list)
    for part in parts:
        for key, piece in part.pieces.items():
            blocks[key] += piece.blocks
    for key, (_, shape) in manifest.tensors.items():
        if problem := miscovered(blocks[key], torch.Size(shape).numel()):
            yield key, problem


def miscovered(blocks: list[Block], total: int) -> str | None:
    """Return what is wrong with blocks that must have each of ``total`` elements once; None if nothing is."""
    for b in blocks:
        if (last := b.whole + (b.count - 1) * b.whole_stride + b.length) > total:
            return f"the files have {last} elements or more, not {total}"
    if (count := numel(blocks)) > 2 * total:  # else the runs below could fill the memory
        return f"the files have {count} elements, not {total}"
    if sum(b.count for b in blocks) > _FEW:
        return _miscovered_by_many(blocks, total)
    runs = sorted((b.whole + i * b.whole_stride, b.length) for b in blocks for i in range(b.count))
    end = 0
    for start, length in [*runs, (total, 0)]:
        if start != end:
            return _problem(end, start)
        end = start + length
    return None


def _miscovered_by_many(blocks: list[Block], total: int) -> str | None:
    ends = torch.tensor([0, total])
    starts, order = torch.cat([b.whole + torch.arange(b.count) * b.whole_stride for b in blocks]).sort()
    stops = starts + torch.cat([torch.full((b.count,), b.length) for b in blocks])[order]
    expected, found = torch.cat([ends[:1], stops]), torch.cat([starts, ends[1:]])
    if not (wrong := (expected != found).nonzero()).numel():
        return None
    return _problem(int(expected[wrong[0]]), int(found[wrong[0]]))


def _problem(expected: int, found: int) -> str:
    """Return what is wrong if the next run after the elements up to ``expected`` begins at ``found``."""
    return f"element {expected} is in no file" if expected < found else f"element {found} is in more than one place"


def open_together(folder: Path) -> Opened:
    """Open the same checkpoint on all ranks; every rank must make the call.

    Raises:
        CheckpointError: on every rank, if it is damaged, or hosts without a shared disk have different ones.
    """
    opened, digests = exchange_together(lambda: (Opened.read(folder), digest((folder / NAME).read_bytes())))
    _check_same(folder, digests)
    return opened


def check_same_everywhere(folder: Path) -> None:
    """Check that all ranks see the same checkpoint in a folder; every rank must make the call.

    Raises:
        CheckpointError: on every rank, if hosts without a shared disk have different files at one path.
    """
    _, digests = exchange_together(lambda: (None, digest((folder / NAME).read_bytes())))
    _check_same(folder, digests)


def _check_same(folder: Path, digests: list[str]) -> None:
    if others := [rank for rank, other in enumerate(digests) if other != digests[0]]:
        raise CheckpointError(
            f"rank(s) {', '.join(map(str, others))} see another checkpoint in {folder} than rank 0; copy one to every "
            "host"
        )
