"""One save of all ranks: each copies and writes its files, then the first makes the checkpoint visible."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import asdict

from meshwright.checkpoint.files.full_disk import naming_the_disk
from meshwright.checkpoint.files.lineage import Lineage
from meshwright.checkpoint.files.place import Place
from meshwright.checkpoint.files.storage import Staging, storage_of
from meshwright.checkpoint.format.checkpoint_folders import commit, keep_newest, stage
from meshwright.checkpoint.format.manifest import Manifest
from meshwright.checkpoint.format.part_files import FileRecord, RankPart
from meshwright.checkpoint.format.rank_state import RankState
from meshwright.checkpoint.format.snapshot import HostMemory, Snapshot
from meshwright.faults.together import Exchange, attempt, exchange_together, on_first_rank, raise_if_any
from meshwright.parallel.shards.reads import reading_shards


class SaveJob:
    """One save.

    Args:
        target: the folder that the checkpoint gets.
        own: what this rank has of the run.
        keep: the number of this run's checkpoints to keep in the folder's parent; None for all.
        lineage: the run.
        memory: the memory to which the tensors are copied before they are written; None to write them as they are.
    """

    def __init__(self, target: Place, own: RankState, *, keep: int | None, lineage: Lineage, memory: HostMemory | None):
        self.target, self.keep, self._lineage = target, keep, lineage
        self._own: RankState | None = own
        self._memory = memory
        self._part: RankPart | Snapshot | None = None
        self._manifest: Callable[[], Manifest] | None = None
        self._error: Exception | None = None
        self.moves = 0  # how often this rank has written something, so that a save that hangs is known

    def move(self, _: int = 0) -> None:
        """Count a step of this rank's own work."""
        self.moves += 1

    @property
    def num_bytes(self) -> int:
        """The number of bytes of tensors that this rank writes."""
        assert self._part is not None
        return self._part.num_bytes

    def plan(self, meeting: Exchange | None) -> None:
        """Decide what each rank writes; every rank must make the call.

        On devices other than the CPU, the tensors are copied now. An error of one rank alone is raised by
        :meth:`check`.

        Args:
            meeting: how the ranks exchange what they have; None for collectives.
        """
        assert self._own is not None
        own, self._own = self._own, None  # so that the tensors of a snapshot are free once they are copied
        _, texts = exchange_together(lambda: (None, own.text()), meeting)

        def plan() -> None:
            part, manifest = own.planned(texts)
            self._part = part if self._memory is None else Snapshot(part, self._memory)
            self._manifest = manifest

        _, self._error = attempt(plan)

    def check(self) -> None:
        """Raise what went wrong on this rank in :meth:`plan`."""
        raise_if_any(self._error)

    def copy(self, meeting: Exchange | None) -> None:
        """Plan the save if that has not been done, and copy the tensors that a snapshot shares with the model.

        Every rank must make the call. An error of one rank alone is raised by :meth:`run`.
        """
        with reading_shards():
            if self._own is not None:
                self.plan(meeting)
            if isinstance(self._part, Snapshot):
                self._part.copy()

    def run(self, meeting: Exchange | None, on_write: Callable[[int], None]) -> None:
        """Write and commit the checkpoint; every rank must make the call.

        Args:
            meeting: how the ranks tell each other that their files are written; None for collectives.
            on_write: function that is called with the number of bytes after each write.
        """
        staging: Staging | None = None

        def start() -> str:
            nonlocal staging
            with naming_the_disk(self.target):
                staging = stage(self.target)
            return staging.name

        def write() -> str:
            self.check()
            assert self._part is not None
            part = self._part.copied() if isinstance(self._part, Snapshot) else self._part
            with naming_the_disk(self.target, part.num_bytes):
                path, tag = storage_of(self.target).staged(self.target, staged)
                return json.dumps({name: asdict(record) for name, record in part.write(path, on_write, tag).items()})

        def finish() -> None:
            assert staging is not None and self._manifest is not None
            with naming_the_disk(self.target):
                manifest = commit(staging, dataclasses.replace(self._manifest(), files=files), self._lineage)
            if self.keep is not None:
                keep_newest(self.target.parent, self.keep, manifest.run)

        try:
            staged = on_first_rank(start, meeting)
            _, texts = exchange_together(lambda: (None, write()), meeting)
            files = {name: FileRecord(**record) for text in texts for name, record in json.loads(text).items()}
            on_first_rank(finish, meeting)
        finally:
            if staging is not None:
                staging.close()
