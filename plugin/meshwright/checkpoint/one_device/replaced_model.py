"""Replaces a model's files in a folder that may hold others, so that the weights change in one step.

Readers take ``model.safetensors`` before an index, and an index names its files. So new weights become valid by one
operation: renaming the single file or the index, or removing the single file beside a new index. Until then the files
of the old weights are not touched, and afterwards they are removed.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

from meshwright.checkpoint.files import disk
from meshwright.checkpoint.files.staged_folder import StagedFolder

_CARD = "README.md"  # a file that save_pretrained of a PEFT model updates


@dataclass(frozen=True)
class WeightNames:
    """The names of a model's weight files.

    Args:
        stem: the start of the names, such as "model".
        index: the name of the index of several files.
    """

    stem: str
    index: str

    @staticmethod
    def of(variant: str | None = None) -> WeightNames:
        """Return transformers' names of the weights of a variant."""
        middle = f".{variant}" if variant else ""
        return WeightNames(f"model{middle}", f"model.safetensors.index{middle}.json")

    @property
    def single(self) -> str:
        """The name of a single file with all weights."""
        return f"{self.stem}.safetensors"

    def is_shard(self, name: str) -> bool:
        """Return whether a name is one of several files."""
        return (
            re.fullmatch(rf"{re.escape(self.stem)}(-[0-9a-f]{{8}})?-\d{{5}}-of-\d{{5}}\.safetensors", name) is not None
        )


class ModelReplacement:
    """The hidden folder of one save inside the user's folder, on the rank that writes.

    ``path`` is the folder to write to.

    Args:
        target: the user's folder, which is created if it does not exist.
    """

    def __init__(self, target: Path):
        self.target = target
        self._staging = StagedFolder(target / "model", lambda _: True)
        self.path = self._staging.path
        if (target / _CARD).is_file():
            shutil.copyfile(target / _CARD, self.path / _CARD)

    def commit(self, names: WeightNames) -> None:
        """Give the files their places in the user's folder; remove the weights of an older save.

        Raises:
            OSError: if the disk fails; until the weights have changed, the old ones stay valid.
        """
        if (self.path / names.index).exists():
            self._rename_shards(names)
        files = sorted(path.relative_to(self.path).as_posix() for path in self.path.rglob("*") if path.is_file())
        for name in files:
            disk.sync_file(self.path / name)
        shards = [name for name in files if names.is_shard(name)]
        last = [name for name in (names.single, names.index) if name in files]
        others = sorted(set(files) - {*shards, *last}, key=lambda name: name.endswith(".safetensors"))
        try:
            for name in shards:
                self._move(name)
            disk.sync_folder(self.target)
            for name in others:
                if not _is_same(self.path / name, self.target / name):
                    self._move(name)
            for name in last:
                self._move(name)
        except OSError:
            for name in shards:
                with contextlib.suppress(OSError):
                    disk.remove(self.target / name)
            raise
        if names.index in last and (self.target / names.single).exists():
            disk.remove(self.target / names.single)
        disk.sync_folder(self.target)
        if last:
            self._remove_older(names, {*shards, *last})

    def close(self) -> None:
        """Remove the hidden folder, with what a failed save has left in it."""
        self._staging.close()

    def _move(self, name: str) -> None:
        if not (self.target / name).parent.is_dir():
            disk.make_folder((self.target / name).parent)
        disk.rename(self.path / name, self.target / name)

    def _rename_shards(self, names: WeightNames) -> None:
        """Give the new shards names that no file in the user's folder has, where they would replace one."""
        shards = [path.name for path in self.path.iterdir() if names.is_shard(path.name)]
        if not any((self.target / name).exists() for name in shards):
            return
        stem = f"{names.stem}-{uuid.uuid4().hex[:8]}"
        renamed = {name: stem + name.removeprefix(names.stem) for name in shards}
        for name, new in renamed.items():
            disk.rename(self.path / name, self.path / new)
        index = json.loads((self.path / names.index).read_text(encoding="utf-8"))
        index["weight_map"] = {tensor: renamed.get(file, file) for tensor, file in index["weight_map"].items()}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (self.path / names.index).write_text(text, encoding="utf-8")

    def _remove_older(self, names: WeightNames, new: set[str]) -> None:
        found = [path for path in self.target.iterdir() if path.name == names.index or names.is_shard(path.name)]
        for path in sorted(found, key=lambda path: path.name != names.index):
            if path.name not in new:
                disk.remove(path)


def _is_same(new: Path, old: Path) -> bool:
    return old.is_file() and old.stat().st_size == new.stat().st_size and old.read_bytes() == new.read_bytes()
