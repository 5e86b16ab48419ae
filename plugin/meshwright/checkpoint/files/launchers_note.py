"""Tells ``meshwright launch`` of each folder that a program has saved, so that it can name the newest one."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

# The path of a file to which a program appends the folders that it has saved, one line of JSON each.
SAVED_VARIABLE = "MESHWRIGHT_SAVED"


def note_saved(folder: Path) -> None:
    """Note a folder that is complete, if ``meshwright launch`` on this machine has started this program."""
    if path := os.environ.get(SAVED_VARIABLE):
        with contextlib.suppress(OSError), open(path, "a") as file:  # the launcher is gone, or on another machine
            file.write(json.dumps(str(folder)) + "\n")


def noted(path: Path) -> list[Path]:
    """Return the noted folders, the newest first."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return []
    return [Path(json.loads(line)) for line in reversed(lines)]
