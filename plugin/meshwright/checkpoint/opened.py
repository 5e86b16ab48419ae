"""A checkpoint whose manifest and indexes are read and checked, so that its tensors can be read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from meshwright.checkpoint.manifest import NAME, Manifest
from meshwright.checkpoint.part_files import PartIndex, digest
from meshwright.checkpoint.regions import numel
from meshwright.errors import CheckpointError
from meshwright.faults.together import succeed_together, texts_of_all


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
            CheckpointError: if one is missing or damaged, or they do not have every element; it names what is wrong.
        """
        manifest = Manifest.read(folder)
        parts = [PartIndex.read(folder, place, manifest.files) for place in range(manifest.dp * manifest.tp)]
        for part in parts:
            if unknown := sorted(part.pieces.keys() - manifest.tensors.keys()):
                raise CheckpointError(f"{part.path} has elements of {unknown[0]!r}, which {NAME} does not list")
        for key, (_, shape) in manifest.tensors.items():
            count = sum(numel(part.pieces[key].blocks) for part in parts if key in part.pieces)
            if count != torch.Size(shape).numel():
                raise CheckpointError(
                    f"{folder} is damaged: it has {count} of the {torch.Size(shape).numel()} elements of {key}"
                )
        return Opened(folder=folder, manifest=manifest, parts=parts)


def check_same_everywhere(folder: Path) -> None:
    """Check that all ranks see the same checkpoint in a folder; every rank must make the call.

    Raises:
        CheckpointError: on every rank, if hosts without a shared disk have different files at one path.
    """
    digests = texts_of_all(succeed_together(lambda: digest((folder / NAME).read_bytes())))
    if others := [rank for rank, other in enumerate(digests) if other != digests[0]]:
        raise CheckpointError(
            f"rank(s) {', '.join(map(str, others))} see another checkpoint in {folder} than rank 0; copy one to every "
            "host"
        )
