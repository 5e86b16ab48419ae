"""Keeps the results of a long sweep in a file, so that a sweep that was interrupted goes on where it ended."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import torch
import torch.distributed as dist
import typer
from rich.progress import track

import meshwright as mw
from conformance.families.one_device import own_groups
from meshwright.mesh.process_group import start_process_group

Found = TypeVar("Found")  # what a program finds, as JSON can hold it
TIMEOUT = 600.0  # seconds that a rank waits for another, which may be late on a busy machine
ResultsFile = Annotated[
    Path | None, typer.Option(help="a file for the results; results that it already has are not computed again")
]


def start_sweep() -> bool:
    """Start the process group of a sweep on the CPU, without warnings; return whether this is the first rank."""
    warnings.filterwarnings("ignore")
    start_process_group(torch.device("cpu"), TIMEOUT)
    return dist.get_rank() == 0


class KeptResults(Generic[Found]):
    """The result of each program of a sweep, by the program's name: what it found, or why its plan is refused.

    Args:
        path: the file; None to keep results in memory only. Every rank must be able to read it.
    """

    def __init__(self, path: Path | None):
        self.path = path
        self.results: dict[str, Found | str] = read([path]) if path is not None and path.exists() else {}
        dist.barrier()  # no rank writes before every rank has read

    def run(self, programs: Mapping[str, Callable[[], Found]], title: str) -> None:
        """Run the programs without a result, and show the progress on a terminal; every rank must make the call."""
        is_shown = dist.get_rank() == 0 and sys.stderr.isatty()
        for program, run in track(programs.items(), title, disable=not is_shown):
            self.of(program, run)

    @property
    def compared(self) -> dict[str, Found]:
        """What each program found whose plan is not refused."""
        return {program: found for program, found in self.results.items() if not isinstance(found, str)}

    @property
    def refused(self) -> dict[str, str]:
        """Why the plans of the other programs are refused."""
        return {program: found for program, found in self.results.items() if isinstance(found, str)}

    def of(self, program: str, run: Callable[[], Found]) -> Found | str:
        """Return the result of a program, which runs unless the file has its result; every rank must make the call.

        Only the first rank's result is valid for every program, since only that rank compares.
        """
        if program not in self.results:
            try:
                with own_groups():
                    self.results[program] = run()
            except mw.PlanError as error:
                self.results[program] = str(error)
            if self.path is not None and dist.get_rank() == 0:
                with self.path.open("a") as file:
                    print(json.dumps({program: self.results[program]}), file=file)
        return self.results[program]


def read(paths: Iterable[Path]) -> dict[str, Any]:
    """Return the results that files of sweeps hold, one JSON object per line: program -> result."""
    found: dict[str, Any] = {}
    for path in paths:
        for line in path.read_text().splitlines():
            found |= json.loads(line)
    return found
