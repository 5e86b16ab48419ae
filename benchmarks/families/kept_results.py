"""Keeps the results of a long sweep in a file, so that a sweep that was interrupted goes on where it ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

Result = float | str  # a difference, or the reason for a refusal


class KeptResults:
    """The result of each program of a sweep, by the program's name; one JSON line each.

    Args:
        path: the file; None to keep results in memory only. Every rank must be able to read it.
    """

    def __init__(self, path: Path | None):
        self.path = path
        self.found: dict[str, Result] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                self.found |= json.loads(line)
        dist.barrier()  # no rank writes before every rank has read

    def of(self, program: str, run: Callable[[], Result]) -> Result:
        """Return the result of a program, which runs unless the file has its result; every rank must make the call.

        Only the first rank's result is right on every program, since only it compares.
        """
        if program not in self.found:
            self.found[program] = run()
            if self.path is not None and dist.get_rank() == 0:
                with self.path.open("a") as file:
                    print(json.dumps({program: self.found[program]}), file=file)
        return self.found[program]
