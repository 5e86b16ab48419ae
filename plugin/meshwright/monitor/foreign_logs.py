"""Reads what other programs log of a run: the Trainer's ``trainer_state.json``, and TensorBoard's event files."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from meshwright.checkpoint.files.reading import first_of, json_object
from meshwright.errors import PlanError
from meshwright.monitor.records import NoRecordsError, RunRecords, finite_number, number
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
