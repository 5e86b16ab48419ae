"""The order of the checkpoints in a folder, and which of them belong to one run.

No clock decides what is newest. Each save takes a number: one more than the largest among its neighbours, and than that
of the checkpoint that its run has loaded. A run is what one program saves of one model. A program that loads a
checkpoint goes on with its run, until another program has gone on with it: then the next save begins a run of its own.
Only checkpoints of the same run are removed by ``keep``.
"""

from __future__ import annotations

import re
import uuid
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from meshwright.checkpoint.files.place import Place
from meshwright.checkpoint.files.reading import read_start
from meshwright.compiling import without_compilation
from meshwright.errors import CheckpointError
from meshwright.schema import Check, integer, text

MAX_NUMBER = 2**40  # of a save; no folder has as many
# Of files that older versions wrote: they have no number, and one run for all of them.
UNNUMBERED, UNNAMED = 0, ""
LAST_TIME = 4_102_444_800 * 10**9  # the end of 2099, in nanoseconds since 1970

FIELDS: dict[str, Check] = {"number": integer(1, MAX_NUMBER), "run": text("[0-9a-f]{32}|")}

_START = 512  # bytes of a file that have the fields, since they are written first
_NUMBER = re.compile(rb'"number": ([0-9]{1,13}),')
_RUN = re.compile(rb'"run": "([0-9a-f]{32})?"')


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The number and the run of a checkpoint, read without checking the file's digest; (0, "") of an older version."""

    number: int = UNNUMBERED
    run: str = UNNAMED

    @staticmethod
    def of(path: Place) -> Mark:
        """Read the first bytes of a manifest or a seal, so that a large or hostile neighbour costs nothing."""
        start = read_start(path, _START)
        number, run = _NUMBER.search(start), _RUN.search(start)
        if number is None or run is None:
            return Mark()
        return Mark(number=int(number[1]), run=(run[1] or b"").decode())


class Lineage:
    """The run that a model's next checkpoint belongs to."""

    def __init__(self) -> None:
        self.run = uuid.uuid4().hex
        self.last = UNNUMBERED  # the largest number of this run that this program has taken or loaded

    @staticmethod
    def of(model: nn.Module) -> Lineage:
        """Return the lineage of a model, compiled or not."""
        return _OF_MODELS.setdefault(without_compilation(model), Lineage())

    def go_on_from(self, mark: Mark) -> None:
        """Go on with the run of a checkpoint that was loaded."""
        self.run, self.last = mark.run, mark.number

    def next(self, target: Place, neighbours: Iterable[Place]) -> Mark:
        """Return the mark of a new checkpoint; the folder must be locked.

        Args:
            target: its manifest or seal, which may exist, and which was passed to :func:`begin_save`.
            neighbours: the manifests or seals of the checkpoints in the folder.

        Raises:
            CheckpointError: if a neighbour has the largest number that there is, or another program has saved to the
                same folder since this one began to save to it.
        """
        present, seen = Mark.of(target), _SEEN.get(target, Mark())
        if present.number > seen.number and present.run not in (seen.run, self.run):
            folder = target.parent
            raise CheckpointError(
                f"another program has saved to {folder} since this one began to save there, and its checkpoint stays. "
                f"Give each program a folder of its own, such as {folder.with_name(folder.name + '-2')}"
            )
        marks = {path: Mark.of(path) for path in neighbours}
        for path, mark in marks.items():
            if mark.number >= MAX_NUMBER:
                raise CheckpointError(
                    f"{path} has the number {mark.number}, after which no checkpoint can come: it is damaged or "
                    "forged. Move its folder away, and save again"
                )
        if any(mark.run == self.run and mark.number > self.last for mark in marks.values()):
            self.run = uuid.uuid4().hex  # another program goes on with the run, or this one went back in it
        self.last = max(self.last, *(mark.number for mark in marks.values()), UNNUMBERED) + 1
        _SEEN[target] = Mark(number=self.last, run=self.run)
        return _SEEN[target]


def begin_save(target: Place) -> None:
    """Remember whose checkpoint a folder has when this program begins to save to it.

    Args:
        target: the manifest or seal, which need not exist.
    """
    _SEEN.setdefault(target, Mark.of(target))


# What this program has last seen in the folders that it saves to. It may replace that, and no other program's.
_SEEN: dict[Place, Mark] = {}

# By model, since a program may save several below one folder. Not an attribute: models are copied and pickled.
_OF_MODELS: weakref.WeakKeyDictionary[nn.Module, Lineage] = weakref.WeakKeyDictionary()
