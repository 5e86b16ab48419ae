"""The folders of ``save_state``: where they are, which are whole, and which may be removed."""

from __future__ import annotations

import functools
import logging
import os
import re
from pathlib import Path

from accelerate import Accelerator

from meshwright.checkpoint.files.lineage import UNNAMED, Mark
from meshwright.checkpoint.files.place import local_path
from meshwright.checkpoint.files.staged_folder import remove_visible_folder, restore_replaced
from meshwright.checkpoint.sealed.seal import NAME as SEAL
from meshwright.checkpoint.sealed.seal import Seal, in_order
from meshwright.checkpoint.sealed.sealed_folder import check_seal
from meshwright.errors import CheckpointError
from meshwright.faults.together import on_first_rank, succeed_together, texts_of_all

logger = logging.getLogger(__name__)

_NAMED = re.compile(r"checkpoint_(\d+)")


def folder_to_save(accelerator: Accelerator, output_dir: str | os.PathLike[str] | None) -> Path:
    """Return the folder that a save gets: the next automatic name, or the one that the program passes.

    Raises:
        ValueError: if there is no name, or the automatic one is taken.
        CheckpointError: if every node is to save for itself.
    """
    is_by_node = accelerator.project_configuration.save_on_each_node
    if is_by_node and texts_of_all(str(accelerator.local_process_index)).count("0") > 1:
        raise CheckpointError(
            "ProjectConfiguration.save_on_each_node=True is not available on several nodes: a checkpoint is one "
            "folder, which all ranks write together. Leave save_on_each_node out, and save to a folder that all nodes "
            "share"
        )
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        if output_dir is None:
            raise ValueError("save_state needs output_dir=, since automatic checkpoint naming is disabled")
        return local_path(os.path.expanduser(output_dir), "save_state")
    target = _automatic(accelerator) / f"checkpoint_{accelerator.save_iteration}"
    if on_first_rank(target.exists):
        raise ValueError(
            f"{target} exists; set accelerator.project_configuration.iteration to the number after the last checkpoint"
        )
    return target


def folder_to_load(accelerator: Accelerator, input_dir: str | os.PathLike[str] | None) -> Path:
    """Return the folder to load: the one that the program passes, or the newest. A sealed folder is checked.

    Raises:
        CheckpointError: if the folder is not whole, or no automatic checkpoint is; it names what is wrong.
    """
    if input_dir is not None:
        folder = local_path(os.path.expanduser(input_dir), "load_state")
        on_first_rank(lambda: restore_replaced(folder.parent))
        if not on_first_rank(folder.is_dir):
            raise CheckpointError(f"there is no checkpoint at {folder}")
        if succeed_together(lambda: (folder / SEAL).exists()):
            check_seal(folder)
        return folder
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        raise ValueError("load_state needs input_dir=, since automatic checkpoint naming is disabled")
    parent = _automatic(accelerator)
    for name in on_first_rank(lambda: _newest_first(parent)):
        try:
            check_seal(parent / name)
        except CheckpointError as error:
            on_first_rank(functools.partial(logger.warning, "%s is skipped: %s", parent / name, str(error)))
            continue
        return parent / name
    raise CheckpointError(f"there is no whole checkpoint in {parent}; pass the folder of a state to load_state")


def remove_oldest(accelerator: Accelerator, run: str) -> None:
    """Remove the oldest automatic checkpoints of a run beyond ``total_limit``, those that are not whole first."""
    project = accelerator.project_configuration
    if not project.automatic_checkpoint_naming or project.total_limit is None:
        return
    parent, limit = _automatic(accelerator), max(project.total_limit, 1)

    def remove() -> None:
        # Those of accelerate's own class belong to no run.
        own = [name for name in _newest_first(parent) if Mark.of(parent / name / SEAL).run in (run, UNNAMED)]
        own.reverse()
        newest_last = sorted(own, key=lambda name: _is_whole(parent / name))
        for name in newest_last[:-limit]:
            logger.info("removing the older checkpoint %s because of total_limit", parent / name)
            remove_visible_folder(parent / name)

    on_first_rank(remove)


def _automatic(accelerator: Accelerator) -> Path:
    return local_path(accelerator.project_dir, "ProjectConfiguration.project_dir") / "checkpoints"


def _newest_first(parent: Path) -> list[str]:
    if not parent.is_dir():
        return []
    restore_replaced(parent)
    found = in_order(path for path in parent.iterdir() if _NAMED.fullmatch(path.name) and path.is_dir())
    return [path.name for path in reversed(found)]


def _is_whole(folder: Path) -> bool:
    try:
        return not Seal.read(folder).problems(folder)
    except CheckpointError:
        return not (folder / SEAL).exists()  # accelerate's own has no seal
