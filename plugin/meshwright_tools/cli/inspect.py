"""``meshwright inspect``: shows what a checkpoint holds, and all that is wrong with it."""

from __future__ import annotations

import json as json_format
import sys
from pathlib import Path
from typing import Annotated

import typer

from meshwright_tools.cli.command import failures_of, say


def inspect(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Checkpoint, or folder of checkpoints; path or URL.")],
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Read all tensors and compare them with their digests.")
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Show what a checkpoint holds, and everything that is wrong with it.

    Prints the step, the date, the versions, the plan, the components and the files of a checkpoint that
    mw.save_checkpoint wrote, or of a checkpoint of the Trainer or of accelerate. For a folder of checkpoints, lists all
    of them and shows the newest whole one. Reads every byte and compares it with its digest, unless --no-check. Needs
    no GPU, no model and no launcher, and changes nothing.

    The exit code is 0 if nothing is wrong, 1 if the checkpoint is damaged or no checkpoint of the folder is whole, and
    2 if there is no checkpoint.

    For example:

    \b
      meshwright inspect runs/step-1000
      meshwright inspect runs --no-check
      meshwright inspect runs/step-1000 --json | jq .damages
    """
    with failures_of("inspect", json=json, codes={ValueError: 2, OSError: 2}):
        sys.exit(_inspect(folder, check, json))


def _inspect(named: str, check: bool, json: bool) -> int:
    # Imported here so that --help is fast.
    from meshwright.checkpoint.files.place import place
    from meshwright.checkpoint.format.checkpoint_folders import find_checkpoint, is_checkpoint, newest_checkpoint
    from meshwright.errors import CheckpointError
    from meshwright_tools.checkpoints.inspect_checkpoint import find_foreign, inspect_checkpoint
    from meshwright_tools.checkpoints.inspection_report import as_dict, as_text, listing, listing_lines

    folder = place(named)
    if isinstance(folder, Path) and folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; name the folder of a checkpoint")
    chosen, rows = folder, None
    if not is_checkpoint(folder):
        rows = listing(folder) or None
        if rows is None and isinstance(folder, Path) and (foreign := find_foreign(folder)):
            return _inspect_foreign(foreign, check, json)
        newest = newest_checkpoint(folder)
        if rows and newest is None:
            text = "\n".join([*listing_lines(rows), "", "DAMAGED: none of these checkpoints is whole."])
            say(json_format.dumps({"checkpoints": rows, "is_whole": False}, indent=2) if json else text)
            return 1
        chosen = find_checkpoint(folder)[0] if newest is None else newest[0]
    found = inspect_checkpoint(chosen, reads_tensors=check)
    say(json_format.dumps(as_dict(found, rows), indent=2) if json else as_text(found, rows))
    return 1 if found.damages else 0


def _inspect_foreign(folders: list[Path], check: bool, json: bool) -> int:
    """Show the newest whole checkpoint of the Trainer or of accelerate, or the newest one if none is whole."""
    from meshwright_tools.checkpoints.inspect_checkpoint import foreign_dict, foreign_text, inspect_foreign

    found = inspect_foreign(folders[-1], reads_tensors=check)
    for folder in reversed(folders[:-1]):
        if not found.damages:
            break
        older = inspect_foreign(folder, reads_tensors=check)
        found = found if older.damages else older
    others = folders if len(folders) > 1 else None
    say(json_format.dumps(foreign_dict(found, others), indent=2) if json else foreign_text(found, others))
    return 1 if found.damages else 0
