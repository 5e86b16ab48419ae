"""Finds the runs in a folder, whichever program has logged them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import PlanError
from meshwright.monitor.foreign_logs import EVENTS, STATE, read_events, read_trainer_state
from meshwright.monitor.records import FILE, NoRecordsError, RunRecords, read_records


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """The log of one run.

    Args:
        name: a name that no other run of the page has.
        path: the folder or file that was read.
        records: its records.
    """

    name: str
    path: Path
    records: RunRecords


def find_runs(paths: Iterable[str | os.PathLike[str]]) -> list[LoggedRun]:
    """Return the runs in folders, the runs of each folder in the order of their names.

    A folder has one run if it has a log of Meshwright or a Trainer's state, itself or in a checkpoint of the Trainer;
    otherwise all runs of the folders in it, and otherwise TensorBoard's event files. Of several runs in a folder, those
    that have logged nothing yet are left out.

    Args:
        paths: folders, or files in them.

    Raises:
        PlanError: if a path has no run.
    """
    found: dict[Path, RunRecords] = {}
    for path in map(Path, paths):
        sources, empty = _sources(path), []
        for source, read in sources:
            try:
                found.setdefault(source.resolve(), read(source))
            except NoRecordsError as error:
                empty.append(error)
        if len(empty) == len(sources):
            raise PlanError(str(empty[0]))
    names = _names(list(found))
    return [LoggedRun(name=names[path], path=path, records=records) for path, records in found.items()]


_Source = tuple[Path, Callable[[Path], RunRecords]]


def _sources(path: Path) -> list[_Source]:
    if path.is_file():
        return [(path, read_trainer_state if path.name == STATE else read_records)]
    if (own := _source(path)) is not None:
        return [own]
    folders = sorted(child for child in path.iterdir() if child.is_dir()) if path.is_dir() else []
    if inside := [source for folder in folders if (source := _source(folder)) is not None]:
        return inside
    events = sorted({file.parent for file in path.rglob(EVENTS)}) if path.is_dir() else []
    return [(folder, read_events) for folder in events] or [(path, read_records)]  # whose error says what to do


def _source(folder: Path) -> _Source | None:
    """Return the log of a folder; None if it has none."""
    if (folder / FILE).is_file():
        return folder / FILE, read_records
    states = [folder / STATE, *_checkpoint_states(folder)]
    state = next((state for state in states if state.is_file()), None)
    return None if state is None else (state, read_trainer_state)


def _checkpoint_states(folder: Path) -> list[Path]:
    """Return the states in a Trainer's checkpoints, that of the largest step first."""
    found = [path for path in folder.glob(f"checkpoint-*/{STATE}") if path.parent.name.rpartition("-")[2].isdigit()]
    return sorted(found, key=lambda path: -int(path.parent.name.rpartition("-")[2]))


def _names(paths: Sequence[Path]) -> dict[Path, str]:
    """Return a short name for each path: its folder without what all of them share."""
    folders = [path if path.is_dir() else path.parent for path in paths]
    if len(folders) == 1:
        return {paths[0]: folders[0].name}
    shared = Path(os.path.commonpath(folders))
    names = [folder.relative_to(shared).as_posix() for folder in folders]
    if len(set(names)) < len(names):
        raise PlanError(f"two of the runs are in {shared}; name each folder once")
    return {path: name if name != "." else shared.name for path, name in zip(paths, names, strict=True)}
