"""The Trainer's checkpoint folders: which are whole, which one to resume from, and which may be removed."""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Collection
from pathlib import Path

from meshwright.checkpoint.files.lineage import UNNAMED, UNNUMBERED, Mark
from meshwright.checkpoint.files.place import local_path
from meshwright.checkpoint.files.staged_folder import remove_visible_folder, restore_replaced
from meshwright.checkpoint.one_device.stock_optimizer import check_pickle
from meshwright.checkpoint.one_device.weight_files import WeightFiles
from meshwright.checkpoint.sealed.seal import NAME as SEAL
from meshwright.checkpoint.sealed.seal import Seal, in_order, number_in
from meshwright.checkpoint.sealed.sealed_folder import check_seal
from meshwright.errors import CheckpointError
from meshwright.faults.together import on_first_rank, succeed_together, texts_of_all
from meshwright_hf.launch.job import RESTARTED_VARIABLE, RESUME_VARIABLE
from meshwright_hf.trainer.state import (
    ADAPTERS,
    OPTIMIZER,
    PROGRESS,
    SCHEDULER,
    STATE,
    STOCK_OPTIMIZER,
    check_trainer_state,
    random_files,
)

logger = logging.getLogger(__name__)

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def checkpoint_to_resume(output_dir: str, wanted: bool | str | os.PathLike[str] | None) -> str | None:
    """Return the folder to resume from, which is whole; every rank must make the call.

    Args:
        output_dir: the Trainer's folder.
        wanted: the argument of ``train``: a folder, True for the newest whole checkpoint in ``output_dir``, or None for
            the folder of ``meshwright launch --resume``, if there is one.
            After a restart by ``meshwright launch`` it is the newest whole checkpoint that the launch has saved, if
            there is one, unless ``wanted`` is False.

    Raises:
        CheckpointError: if there is no whole checkpoint, or the folder is not one; it names what is wrong.
    """
    if wanted is not False and (launches := _restarted_launch()):
        folder, _ = _newest_whole(output_dir, launches)
        if folder is not None:
            on_first_rank(lambda: logger.warning("restarted by the launcher: the run goes on from %s", folder))
            return folder
    if wanted is None:
        wanted = os.environ.get(RESUME_VARIABLE)
    if wanted is None or wanted is False:
        return None
    if wanted is not True:
        path = local_path(wanted, "resume_from_checkpoint")
        on_first_rank(lambda: restore_replaced(path.parent))
        _check(path)
        return os.fspath(wanted)
    folder, skipped = _newest_whole(output_dir)
    if folder is not None:
        return folder
    found = "\n  ".join(["; these are not whole:", *skipped]) if skipped else ""
    raise CheckpointError(f"there is no whole checkpoint in {output_dir} to resume from{found}")


def _restarted_launch() -> set[str]:
    """Return the names of the launch on its machines, if it has restarted this job; a machine may have joined later."""
    return {*texts_of_all(os.environ.get(RESTARTED_VARIABLE, ""))} - {""}


def _newest_whole(output_dir: str, launches: Collection[str] = ()) -> tuple[str | None, list[str]]:
    """Return the newest whole checkpoint of a folder, of any or of these launches, and what was skipped."""
    skipped: list[str] = []
    for name in on_first_rank(lambda: _newest_first(Path(output_dir), launches)):
        folder = Path(output_dir, name)
        try:
            _check(folder)
        except CheckpointError as error:
            text = str(error)
            skipped.append(f"{folder}: {text}")
            on_first_rank(functools.partial(logger.warning, "%s is skipped: it is not whole: %s", folder, text))
            continue
        return os.path.join(output_dir, name), skipped
    return None, skipped


def is_sealed(folder: Path) -> bool:
    """Return whether a folder is a checkpoint of MeshwrightTrainer, not of the stock Trainer.

    Raises:
        CheckpointError: if MeshwrightTrainer wrote it, but its seal is missing.
    """
    if (folder / SEAL).exists():
        return True
    if ours := [name for name in (OPTIMIZER, PROGRESS) if (folder / name).exists()]:
        raise CheckpointError(
            f"{folder} has {ours[0]}, but no {SEAL}, so it is not whole, or an older version saved it; resume from "
            "another checkpoint"
        )
    return False


def rotate(newest: Path, limit: int | None, best: str | None, run: str) -> None:
    """Remove the oldest checkpoints of a run beyond ``limit``, those that are not whole first.

    Checkpoints of the stock Trainer, which belong to no run, count as this run's.

    Args:
        newest: the checkpoint that was just saved, which is never removed.
        limit: the number to keep; None for all.
        best: the best checkpoint, which is never removed either.
        run: the run.
    """
    if not limit or limit < 0:
        return
    run_dir = newest.parent
    marks = {run_dir / name: Mark.of(run_dir / name / SEAL) for name in _newest_first(run_dir)}
    ordered = sorted((path for path, mark in marks.items() if mark.run in (run, UNNAMED)), key=_age)
    protected = {os.path.abspath(path) for path in (newest, best) if path is not None}
    removable = [path for path in ordered if os.path.abspath(path) not in protected]
    for path in removable[: max(len(ordered) - max(limit, len(protected)), 0)]:
        logger.info("removing the older checkpoint %s because of save_total_limit", path)
        remove_visible_folder(path)


def _check(folder: Path) -> None:
    """Raise on every rank if a run cannot be resumed from a folder."""
    if succeed_together(lambda: _is_sealed_folder(folder)):
        check_seal(folder)
        required: tuple[str, ...] = (STATE, SCHEDULER, PROGRESS, f"{OPTIMIZER}/optimizer.json")
    else:
        required = (STATE, SCHEDULER, STOCK_OPTIMIZER)
    succeed_together(lambda: _check_parts(folder, required))
    if STOCK_OPTIMIZER in required:
        for name in (SCHEDULER, STOCK_OPTIMIZER, *random_files(folder)):
            check_pickle(folder / name)


def _is_sealed_folder(folder: Path) -> bool:
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint at {folder}")
    return is_sealed(folder)


def _check_parts(folder: Path, required: tuple[str, ...]) -> None:
    missing = [name for name in required if not (folder / name).is_file()]
    if not random_files(folder):
        missing.append("rng_state.pth")
    if missing:
        raise CheckpointError(
            f"{folder} has no {', '.join(missing)}, so the resumed run would give other results. It is not whole, or "
            "was saved with save_only_model=True or by another engine. Resume from another checkpoint; to start a new "
            f"run from these weights, call meshwright.load_weights(trainer.model, {str(folder)!r}) before train()"
        )
    check_trainer_state(folder / STATE)
    if not any((folder / name).is_file() for name in ADAPTERS):
        WeightFiles.open(folder)


def _newest_first(run_dir: Path, launches: Collection[str] = ()) -> list[str]:
    """Return the names of a folder's checkpoints, of any or of these launches, the one that was saved last first."""
    if not run_dir.is_dir():
        return []
    restore_replaced(run_dir)
    found = [path for path in run_dir.iterdir() if _CHECKPOINT.fullmatch(path.name) and path.is_dir()]
    if launches:
        found = [path for path in found if not _launches(path).isdisjoint(launches)]
    return [path.name for path in reversed(in_order(found))]


def _launches(folder: Path) -> set[str]:
    try:
        return {*Seal.read(folder).launches}
    except CheckpointError:
        return set()


def _age(folder: Path) -> tuple[bool, int, int]:
    """Return a key that sorts checkpoints: those that are not whole, then by the order in which they were saved."""
    if not (folder / SEAL).exists():  # of the stock Trainer
        return True, UNNUMBERED, number_in(folder)
    try:
        seal = Seal.read(folder)
    except CheckpointError:
        return False, UNNUMBERED, 0
    return not seal.problems(folder), seal.number, number_in(folder)
