"""After a run that died: which checkpoint of it is the newest whole one, and the command that goes on from it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from meshwright.checkpoint.files.launchers_note import SAVED_VARIABLE, noted
from meshwright.checkpoint.format.checkpoint_folders import find_checkpoint, is_checkpoint
from meshwright.checkpoint.sealed.seal import Seal
from meshwright.errors import CheckpointError
from meshwright.hidden_values import without_secrets
from meshwright.printable import shell_word
from meshwright_hf.launch.job import Launch, note_of_processes

_OF_TRAINER = "trainer_state.json"


@contextlib.contextmanager
def saves_noted() -> Iterator[Callable[[Launch], list[str]]]:
    """Have the processes note what they save, while the context is open; they inherit this process's environment.

    Yields a function that returns what to say of the saves of a run that has died.
    """
    with note_of_processes(SAVED_VARIABLE) as path:
        yield lambda job: _last_words(job, noted(path))


def _last_words(job: Launch, saved: list[Path]) -> list[str]:
    newest = next(filter(_is_whole, saved), None)
    if newest is None:
        return []
    lines, resume = [f"the newest whole checkpoint of this run is {newest}"], []
    if (newest / _OF_TRAINER).exists():
        resume = ["--resume", str(newest)]
    elif is_checkpoint(newest) and not job.names(b"load_checkpoint"):
        lines.append(
            f"the script does not load it yet; write after to_distributed: meshwright.load_checkpoint("
            f"{str(newest.parent)!r}, model, optimizer, loader=loader, missing_ok=True)"
        )
    return [*lines, f"the command that goes on from it: {_command(job, resume)}"]


def _is_whole(folder: Path) -> bool:
    """Return whether a folder is a checkpoint to go on from, not of the model alone, and has all of its files."""
    try:
        if is_checkpoint(folder):
            return find_checkpoint(folder) is not None
        is_of_run = (folder / _OF_TRAINER).exists() or any(folder.glob("random_states_*"))
        return is_of_run and not Seal.read(folder).problems(folder)
    except (CheckpointError, OSError):
        return False


def _command(job: Launch, resume: list[str]) -> str:
    """Return the command of this launch, with the options ``resume`` in place of an earlier ``--resume``."""
    if "launch" in sys.argv:
        given = sys.argv[sys.argv.index("launch") + 1 :]
    else:
        plan = ["--plan", job.plan.label] if job.plan is not None else ["--num_processes", str(job.num_processes)]
        given = [*plan, *(["-m"] if job.module else []), job.script, *job.arguments]
    if resume and "--resume" in given[:-1] and given.index("--resume") < given.index(job.script):
        at = given.index("--resume")
        given = given[:at] + given[at + 2 :]
    return " ".join(map(shell_word, ["meshwright", "launch", *resume, *without_secrets(given)]))
