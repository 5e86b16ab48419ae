"""The log of a run, one JSON object per line, which begins with where the run comes from. docs/monitoring.md describes
the records.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import logging
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from meshwright.errors import PlanError
from meshwright.outside_files import (
    Check,
    OddFileError,
    anything,
    holding,
    integer,
    listed,
    parse_json,
    problem_of,
    table,
    text,
    that,
)
from meshwright.outside_files import number as a_number
from meshwright.plan.config import ToDistributedConfig
from meshwright.printable import hidden_in, without_secrets

_PATIENCE = 5.0  # seconds for git, which may be slow on a network's file system
_PACKAGES = ("meshwright", "torch", "transformers", "accelerate", "trl", "peft", "deepspeed")
_SHOWN_ELSEWHERE = {"plan", "logging_dir", "max_steps"}


def provenance(config: ToDistributedConfig, optimizer: Optimizer | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the record of a start says about the program.

    Args:
        config: the options of the call; those that differ from their defaults are settings.
        optimizer: the optimizer, whose class and defaults are settings.
        settings: further settings of the caller, such as the Trainer's arguments.
    """
    defaults = ToDistributedConfig()
    options = {
        option.name: getattr(config, option.name)
        for option in dataclasses.fields(config)
        if option.name not in _SHOWN_ELSEWHERE and getattr(config, option.name) != getattr(defaults, option.name)
    }
    of_optimizer = {} if optimizer is None else {"optimizer": type(optimizer).__name__, **optimizer.defaults}
    found = {**options, **{name: x for name, x in of_optimizer.items() if x is not None}, **settings}
    return {
        "command": shlex.join(without_secrets(sys.argv)),
        "revision": git_revision(Path(sys.argv[0]).parent if sys.argv[0] else Path()),
        "versions": _versions(),
        "settings": {
            name: x if isinstance(x := hidden_in(name, each), bool | int | float | str) else str(x)
            for name, each in found.items()
        },
    }


def git_revision(folder: Path) -> str | None:
    """Return the commit of a folder's repository, with "-dirty" if files differ; None without git or a repository."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PATIENCE, env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _versions() -> dict[str, str]:
    """Return the versions of the packages that the program has imported."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in _PACKAGES:
        if name in sys.modules:
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:  # a folder on the path instead of an installed package
                continue
    return found


logger = logging.getLogger(__name__)

FILE = "meshwright.jsonl"
VERSION = 1
KINDS = ("run", "memory", "step", "estimate", "values", "fault")


class NoRecordsError(PlanError):
    """The log of a run has no record yet, which the report of several runs leaves out."""


class RunLog:
    """Appends records to a run's file.

    A program that goes on from a checkpoint appends to the same file. If a write fails, for example because the disk
    is full, a warning says so once and training goes on.

    Args:
        folder: the folder of the file, which is created.

    Attributes:
        has_earlier: whether the file held records of an earlier start.

    Raises:
        PlanError: if the folder or the file cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder) / FILE
        self._has_failed = False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab+") as file:
                self.has_earlier = file.tell() > 0
                if self.has_earlier:
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":  # the last write was cut off
                        file.write(b"\n")
        except OSError as error:
            raise PlanError(
                f"ToDistributedConfig.logging_dir={str(folder)!r} cannot be written ({error.strerror}); choose another "
                "folder, or leave logging_dir out to keep no log"
            ) from None

    def write(self, kind: str, record: Mapping[str, Any]) -> None:
        """Append one record."""
        assert kind in KINDS
        line = json.dumps({"kind": kind, **_finite(record)}, allow_nan=False) + "\n"
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            if not self._has_failed:
                logger.warning("the log %s misses records: %s", self.path, error)
            self._has_failed = True


def _finite(value: object) -> Any:
    """Return a value with the words "nan", "inf" and "-inf" for numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


@dataclass
class RunRecords:
    """The records of a run, without those that a resumed run has replaced.

    Args:
        runs: the records of kind "run", one for each start of the program.
        steps: the records of kind "step", in the order of their steps.
        memory, estimates, values, faults: the records of these kinds.
        torn: number of malformed lines, such as a last line that was cut off.
    """

    runs: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    memory: list[dict[str, Any]] = field(default_factory=list)
    estimates: list[dict[str, Any]] = field(default_factory=list)
    values: list[dict[str, Any]] = field(default_factory=list)
    faults: list[dict[str, Any]] = field(default_factory=list)
    torn: int = 0
    _starts: list[tuple[int, int, int]] = field(default_factory=list)  # first step; steps and values before the start

    def add(self, kind: object, record: Any) -> None:
        """Add a record; one that is malformed or of no known kind only counts as torn."""
        if not isinstance(kind, str) or kind not in KINDS or problem_of(record, _FORMS[kind]) is not None:
            self.torn += 1
            return
        if kind == "run":
            self._starts.append((record["first_step"], len(self.steps), len(self.values)))
        self._lists[kind].append(record)

    def drop_replaced(self) -> None:
        """Leave out the steps and values that a later start has replaced: those after its first step."""
        for place, records in ((1, self.steps), (2, self.values)):
            starts, least, kept = list(self._starts), math.inf, []
            for index in reversed(range(len(records))):
                while starts and starts[-1][place] > index:
                    least = min(least, starts.pop()[0])
                if records[index]["step"] <= least:
                    kept.append(records[index])
            records[:] = reversed(kept)

    @property
    def _lists(self) -> dict[str, list[dict[str, Any]]]:
        """The list of each kind."""
        lists = (self.runs, self.memory, self.steps, self.estimates, self.values, self.faults)
        return dict(zip(KINDS, lists, strict=True))


_LARGEST = 1e100  # of a figure; its square is a number too
_STEP = integer(0, 2**53)
_FIGURE = a_number(-_LARGEST, _LARGEST)
_WORDS = text(most=2**20)
_OF_RANKS = table(_FIGURE, names=text("[0-9]{1,9}"))


def _is_number(value: Any) -> bool:
    """Whether a value is a number of a log, which has nan and infinities as words."""
    return value in ("nan", "inf", "-inf") if isinstance(value, str) else type(value) is int or type(value) is float


def _is_plan(value: Any) -> bool:
    """Whether a value is a plan in words, or its fields."""
    fields = value.values() if isinstance(value, dict) else [value]
    return all(isinstance(each, str | int | float | None) for each in fields)


_NUMBER = that("a number", lambda value: _is_number(value) and (isinstance(value, str) or not abs(value) > _LARGEST))
_OF_EXPERTS = table(_NUMBER)
_ESTIMATE: dict[str, Check] = {
    "estimated_seconds": _NUMBER, "band": _NUMBER, "estimated_memory": listed(table(_FIGURE)), "time": _FIGURE,
}  # fmt: skip
_NEEDED = {"run": "first_step", "step": "step", "values": "step"}
_FIELDS: dict[str, dict[str, Check]] = {
    "run": {
        **_ESTIMATE, "first_step": _STEP, "max_steps": _STEP, "ranks": integer(1, 2**24), "mesh": table(integer()),
        "parameters": _FIGURE, "rows_per_rank": _FIGURE, "row_tokens": _FIGURE, "plan": that("a plan", _is_plan),
        "versions": table(_WORDS), "settings": table(anything, names=_WORDS),
        **dict.fromkeys(("model", "device", "why", "revision", "command"), _WORDS),
    },
    "memory": {"peak": _OF_RANKS},
    "step": {
        "step": _STEP, "slowest": integer(), "parts": table(_FIGURE), "expert_load": _OF_EXPERTS,
        **dict.fromkeys(("loss", "norm", "lr", "mfu", "rank_load"), _NUMBER),
        **dict.fromkeys(("tokens_per_second", "seconds_per_step", "tokens"), _FIGURE),
        **dict.fromkeys(("behind", "waited", "left", "time"), _FIGURE),
        **dict.fromkeys(("peak", "busy", "read"), _OF_RANKS),
    },
    "estimate": {
        **_ESTIMATE, "measured_seconds": _FIGURE, "measured_peak": _FIGURE, "hints": listed(_WORDS),
    },
    "values": {"step": _STEP, "values": table(anything, names=_WORDS), "time": _FIGURE},
    "fault": {"step": _STEP, "what": _WORDS, "time": _FIGURE},
}  # fmt: skip


def _form(kind: str) -> Check:
    """Return what a record of a kind holds; a field that it needs is one that it has."""
    fields = holding(_FIELDS[kind])
    needed = _NEEDED.get(kind)

    def check(value: Any, field: str) -> None:
        fields(value, field)
        if needed is not None:
            _STEP(value.get(needed), needed)

    return check


_FORMS = {kind: _form(kind) for kind in KINDS}


def number(value: object) -> float | None:
    """Return a number of the log; None if it is missing, and nan or inf for the strings that stand for them."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def finite_number(value: object) -> float | None:
    """Return a number of the log; None if it is missing, nan or infinite."""
    found = number(value)
    return found if found is not None and math.isfinite(found) else None


def read_records(run: str | os.PathLike[str]) -> RunRecords:
    """Read a run's log.

    If a run was resumed from step n, its records replace the earlier records of steps after n. Faults are kept.

    Args:
        run: the folder of the log, or its file.

    Raises:
        PlanError: if there is no log, or (``NoRecordsError``) it has no record.
    """
    path = Path(run)
    path = path / FILE if path.is_dir() else path
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        raise PlanError(
            f"{path}: there is no log; write one with to_distributed(..., config=ToDistributedConfig(logging_steps=10, "
            f"logging_dir={str(path.parent if path.suffix else path)!r})), MeshwrightTrainer(..., meshwright="
            "ToDistributedConfig(logging_dir=...)) or Accelerator(config=ToDistributedConfig(...)); the Trainer's own "
            "folder has a history from its first checkpoint on"
        ) from None
    found = RunRecords()
    for line in filter(bytes.strip, lines):
        try:
            record = parse_json(bytearray(line))
            found.add(record.get("kind") if isinstance(record, dict) else None, record)
        except OddFileError:
            found.torn += 1
    found.drop_replaced()
    if not found.runs and not found.steps:
        raise NoRecordsError(
            f"{path}: none of its {len(lines)} lines is a record of a run; give the folder that was passed as "
            "logging_dir, after the run's first step"
        )
    return found
