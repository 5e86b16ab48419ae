"""Finds the runs in a folder, and reads their logs, whichever program has written these.

Other programs log a run in the Trainer's ``trainer_state.json``, or in TensorBoard's event files.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from meshwright.checkpoint.files.reading import first_of, json_object
from meshwright.errors import PlanError
from meshwright.monitor.records import FILE, NoRecordsError, RunRecords, finite_number, number, read_records
from meshwright.outside_files import parse_json, read_outside

STATE = "trainer_state.json"
EVENTS = "events.out.tfevents*"
_PROGRESS = "meshwright_progress.json"  # beside the state in a MeshwrightTrainer's checkpoint
# The name that a tracker has for a figure -> ours. accelerate's users name what they log as the Trainer does.
_NAMES = {
    "loss": "loss", "grad_norm": "norm", "learning_rate": "lr", "lr": "lr", "tokens_per_second": "tokens_per_second",
    "seconds_per_step": "seconds_per_step", "mfu": "mfu",
}  # fmt: skip
_PEAK, _FULLEST, _SLOWEST, _BEHIND = (
    "peak_memory_gib", "peak_memory_rank", "slowest_rank", "slowest_rank_behind_ms"
)  # fmt: skip
_NO_FIGURES = {"step", "epoch", "total_flos", "tokens_per_second_per_device"}
_LARGEST = 2**30  # bytes of a state: it has all lines of its log
_SETTINGS = ("num_train_epochs", "train_batch_size", "logging_steps", "eval_steps", "save_steps")


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


def read_trainer_state(path: Path) -> RunRecords:
    """Read the history in a Trainer's state.

    Raises:
        PlanError: if the file is not a Trainer's state, or (``NoRecordsError``) has no history.
    """
    try:
        state = parse_json(read_outside(path, most=_LARGEST), allowance=_LARGEST)
        history = [dict(entry) for entry in state["log_history"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanError(
            f"{path} is not the state of a Trainer ({error}); name a folder that the Trainer saved"
        ) from None
    found = RunRecords()
    config, progress = json_object(path.with_name("config.json")), json_object(path.with_name(_PROGRESS))
    found.add(
        "run",
        {
            "first_step": 0,
            "model": first_of(config, "architectures") or "a Trainer's run",
            "plan": progress.get("plan"),
            "max_steps": state.get("max_steps"),
            "settings": {name: state[name] for name in _SETTINGS if state.get(name)},
        },
    )
    for entry in history:
        if type(step := entry.get("step")) is int:
            _add(found, step, entry)
    _check(found, path)
    return found


def read_events(folder: Path) -> RunRecords:
    """Read the scalars in a folder of TensorBoard's event files, which the Trainer's and accelerate's trackers write.

    Raises:
        PlanError: if tensorboard is not installed, or (``NoRecordsError``) the files have no scalars.
    """
    if find_spec("tensorboard") is None:
        raise PlanError(
            f"{folder} has event files of TensorBoard, whose package reads them: pip install tensorboard. Or let the "
            "run write its own log, with ToDistributedConfig(logging_steps=10, logging_dir=...)"
        )
    module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    entries: dict[int, dict[str, Any]] = {}
    for tag in events.Tags()["scalars"]:
        split, _, name = tag.rpartition("/")
        name = f"eval_{name}" if split == "eval" else name if split == "train" else tag
        for event in events.Scalars(tag):
            entry = entries.setdefault(event.step, {})
            entry[name], entry["time"] = event.value, event.wall_time
    found = RunRecords()
    found.add("run", {"first_step": 0, "model": folder.name, "plan": None})
    for step in sorted(entries):
        _add(found, step, entries[step])
    _check(found, folder)
    return found


def _add(found: RunRecords, step: int, entry: Mapping[str, Any]) -> None:
    """Add what was logged at a step: the figures of training as a line, other numbers as values."""
    known = {name: x for name, x in entry.items() if name not in _NO_FIGURES}
    values: dict[str, Any] = {name: x for name, x in known.items() if isinstance(x, int | float | str)}
    time = values.pop("time", None)
    if "loss" in values:
        known = {ours: values.pop(theirs) for theirs, ours in _NAMES.items() if theirs in values}
        line: dict[str, Any] = {name: x for name, x in known.items() if number(x) is not None}
        fullest, peak = finite_number(values.pop(_FULLEST, 0)), finite_number(values.pop(_PEAK, None))
        if fullest is not None and peak is not None:
            line["peak"] = {str(int(fullest)): peak * 2**30}
        slowest, behind = finite_number(values.pop(_SLOWEST, None)), finite_number(values.pop(_BEHIND, 0.0))
        if slowest is not None and behind is not None:
            line |= {"slowest": int(slowest), "behind": behind / 1e3}
        found.add("step", {"step": step, "time": time, **line})
    if values:
        found.add("values", {"step": step, "values": values, "time": time})


def _check(found: RunRecords, path: Path) -> None:
    if not found.steps and not found.values:
        raise NoRecordsError(f"{path} has no figures yet: the run has not logged a step")
