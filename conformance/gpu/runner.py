"""Runs each section in a process of its own, which may crash or hang without ending the others."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from conformance.gpu.catalogue import section_named
from conformance.gpu.section import Check, line_of

GRACE = 90.0  # seconds that a section may take longer than its time: imports, its last check, and the end of its ranks
_LAST = 1500  # characters of the output of a section that crashed


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a section ended.

    Args:
        name: the section.
        state: "passed", "failed" (a goal is not reached), "not run" (something is missing), "crashed" or "hung".
        line: what it found, in one line.
        seconds: how long it took.
        checks: what was measured.
        is_cut: whether checks were left out, since the time was over.
        output: the end of what a section printed that crashed or hung.
    """

    name: str
    state: str
    line: str
    seconds: float
    checks: Sequence[Check] = ()
    is_cut: bool = False
    output: str = ""

    @property
    def is_wrong(self) -> bool:
        return self.state not in ("passed", "not run")

    def as_dict(self) -> dict[str, Any]:
        """Return the outcome in JSON's types."""
        return {**asdict(self), "checks": [check.as_dict() for check in self.checks]}


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Runs sections one after the other.

    Args:
        device: "cpu" or "cuda".
        minutes: the time for all sections together.
        plants: whether each section plants a fault.
        log: the file to which the sections write as they run.
    """

    device: str
    minutes: float
    plants: bool
    log: Path

    def outcomes(self, names: Sequence[str]) -> Iterator[Outcome]:
        """Yield how each section ended. Time that a section does not use is shared by those after it."""
        end = time.monotonic() + 60 * self.minutes
        sections = [section_named(name) for name in names]
        for number, section in enumerate(sections):
            share = section.share / sum(other.share for other in sections[number:])
            left = max(0.0, end - time.monotonic())
            yield self._outcome(section.name, share * left)

    def _outcome(self, name: str, seconds: float) -> Outcome:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix=f"gpu-{name}-") as folder, self.log.open("a+b") as log:
            result = Path(folder, "result.jsonl")
            Path(folder, "work").mkdir()
            place = {"device": self.device, "seconds": seconds, "folder": f"{folder}/work", "plants": self.plants}
            command = [sys.executable, "-m", "conformance.gpu.section_process", name, json.dumps(place), str(result)]
            log.write(f"==== {name}\n".encode())
            log.flush()
            start = log.tell()
            # At once, so that a run that is cut off leaves what it has.
            code = run_command(command, log.fileno(), seconds + GRACE, self.device)
            log.seek(start)
            said = log.read().decode(errors="replace")
            log.write(f"==== {name}: exit code {code}\n\n".encode())
            found = read_result(result)
        return found.outcome(name, code, time.monotonic() - began, said)


@dataclass
class Found:
    """What a section has written."""

    checks: list[Check] = field(default_factory=list)
    missing: str | None = None
    is_cut: bool = False
    is_done: bool = False

    def outcome(self, name: str, code: int | None, seconds: float, said: str) -> Outcome:
        """Return how the section ended, from its exit code (None if it was killed after its time) and output."""
        checks = tuple(self.checks)
        state = "passed" if all(check.holds for check in checks) else "failed"
        found = Outcome(name=name, state=state, line="", seconds=round(seconds, 1), checks=checks, is_cut=self.is_cut)
        if self.missing is not None:
            return replace(found, state="not run", line=self.missing)
        if not self.is_done or code != 0:
            lines = said.strip().splitlines()
            end = "did not end in time" if code is None else f"ended with exit code {code}"
            line = f"{end} after {len(checks)} checks: {lines[-1] if lines else 'it printed nothing'}"
            return replace(found, state="hung" if code is None else "crashed", line=line, output=said[-_LAST:])
        cut = "; the others were left out, since the time was over" if self.is_cut else ""
        return replace(found, line=line_of(checks) + cut)


def read_result(result: Path) -> Found:
    """Return what a section has written to a file; nothing if it has not come so far."""
    found = Found()
    for line in result.read_text().splitlines() if result.exists() else ():
        try:
            said = json.loads(line)
        except ValueError:  # the section was killed while it wrote its last line
            break
        if (check := said.pop("check", None)) is not None:
            check.pop("holds")
            found.checks.append(Check(**check))
        for name, value in said.items():
            setattr(found, name, value)
    return found


def run_command(command: list[str], output: int, seconds: float, device: str) -> int | None:
    """Run a command in a session of its own; return its exit code, or None if it was killed after the time."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PYTHONUNBUFFERED": "1",
        # Several ranks share a GPU if there are fewer GPUs than ranks; the processes of a CPU run see no GPU.
        **({"MESHWRIGHT_SHARE_GPUS": "1"} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}),
    }
    process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # The processes that it started and that are still there; pools of ranks end by themselves.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
