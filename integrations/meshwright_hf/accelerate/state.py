"""``save_state`` and ``load_state`` under a plan: their folders, and one-device files that any plan reads."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers.trainer_pt_utils import safe_globals

import meshwright as mw
from meshwright.checkpoint.files.local_disk import restore_replaced
from meshwright.checkpoint.files.place import local_path
from meshwright.checkpoint.files.reading import read_json
from meshwright.checkpoint.format.load_checkpoint import show_loaded
from meshwright.checkpoint.format.object_states import check_state_of, check_states_of_others
from meshwright.checkpoint.one_device.stock_optimizer import check_pickle, load_stock_optimizer, read_pickle
from meshwright.checkpoint.sealed import NAME as SEAL
from meshwright.checkpoint.sealed import SealedFolders, check_seal
from meshwright.errors import CheckpointError
from meshwright.faults.together import on_first_rank, succeed_together, texts_of_all
from meshwright.optim.owners import unwrapped
from meshwright.optim.runtime import Watch, find_runtime, runtime_of
from meshwright.outside_files import anything, integer, listed, maybe, record, require, table
from meshwright.parallel.dropout_streams import STREAMS, DropoutStreams
from meshwright.temporarily import temporarily
from meshwright_hf.accelerate.planned_loader import PlannedLoader, PlannedScheduler

logger = logging.getLogger(__name__)


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
    target = _automatic(accelerator).parent / f"checkpoint_{accelerator.save_iteration}"
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
    folders = _automatic(accelerator)
    if (newest := folders.newest_whole(check_seal)[0]) is not None:
        return newest
    raise CheckpointError(f"there is no whole checkpoint in {folders.parent}; pass the folder of a state to load_state")


def remove_oldest(accelerator: Accelerator, run: str) -> None:
    """Remove the oldest automatic checkpoints of a run beyond ``total_limit``, those that are not whole first."""
    project = accelerator.project_configuration
    if not project.automatic_checkpoint_naming or project.total_limit is None:
        return
    folders, limit = _automatic(accelerator), max(project.total_limit, 1)
    on_first_rank(lambda: folders.remove_oldest(limit, run, "total_limit"))


def _automatic(accelerator: Accelerator) -> SealedFolders:
    parent = local_path(accelerator.project_dir, "ProjectConfiguration.project_dir") / "checkpoints"
    return SealedFolders(parent=parent, name=re.compile(r"checkpoint_\d+"))


PROGRESS = "meshwright.json"


class PendingState(dict[str, Tensor]):
    """A placeholder for the weights of a planned model in accelerate's list of weights to save."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model


def without_planned_optimizers(accelerator: Accelerator) -> contextlib.AbstractContextManager[None]:
    """Hide planned optimizers from accelerate inside the context, since each rank has only a part of their state."""
    others = [optimizer for optimizer in accelerator._optimizers if find_runtime(optimizer.optimizer) is None]
    return temporarily(accelerator, _optimizers=others)


def take_weights(models: list[nn.Module], weights: list[dict[str, Tensor]], directory: str) -> None:
    """Write the weights of the planned models that earlier hooks left in the list, and remove them from the list."""
    for weight in [weight for weight in weights if isinstance(weight, PendingState)]:
        weights[:] = [other for other in weights if other is not weight]
        mw.save_weights(weight.model, _folder(models, weight.model, directory))


def give_weights(all_models: list[nn.Module], models: list[nn.Module], directory: str, *, is_stock: bool) -> None:
    """Read the weights of the planned models that earlier hooks left in the list, and remove them from the list."""
    for model in [model for model in models if find_runtime(model) is not None]:
        models[:] = [other for other in models if other is not model]
        number = next(i for i, other in enumerate(all_models) if other is model)
        stock = Path(directory, _numbered("model", number, "safetensors"))
        mw.load_weights(model, stock if is_stock else _folder(all_models, model, directory))


def is_stock_checkpoint(accelerator: Accelerator, folder: Path) -> bool:
    """Return whether accelerate's own class saved a folder, once it is known that it can be loaded; changes nothing.

    Raises:
        CheckpointError: if a part is missing, or the schedules of a stock checkpoint count other batches.
    """
    is_stock = not (folder / PROGRESS).exists() and not (folder / SEAL).exists()
    if not is_stock and not (folder / SEAL).exists():
        raise CheckpointError(
            f"{folder} has {PROGRESS}, but no {SEAL}, so it is not whole, or an older version saved it; load another "
            "checkpoint"
        )
    wanted = [_numbered("scheduler", number, "bin") for number in range(len(accelerator._schedulers))]
    if is_stock:
        wanted += [_numbered("optimizer", number, "bin") for number in range(len(accelerator._optimizers))]
        wanted += [_numbered("model", number, "safetensors") for number in range(len(accelerator._models))]
    if lost := [name for name in wanted if not (folder / name).is_file()]:
        what = "was saved by accelerate's own class, and " if is_stock else ""
        raise CheckpointError(
            f"{folder} {what}has no {', '.join(lost)}; save what this program prepares, in the same order. To read the "
            "weights alone, call meshwright.load_weights(model, path)"
        )
    for number, scheduler in enumerate(accelerator._schedulers):
        path = folder / _numbered("scheduler", number, "bin")
        with safe_globals():
            check_state_of("scheduler", read_pickle(path), getattr(scheduler, "scheduler", scheduler), str(path))
    if is_stock:
        planned, processes = planned_models(accelerator), len(list(folder.glob("random_states_*.pkl")))
        if len(planned) != len(accelerator._models):
            raise CheckpointError(
                f"{folder} was saved by accelerate's own class; to load it, give a plan to every model"
            )
        dp = runtime_of(planned[-1]).mesh.dp.size
        if accelerator._schedulers and processes != dp:
            raise CheckpointError(
                f"{folder} was saved by accelerate's own class on {processes} process(es), where schedules count a "
                f"batch of each process, but this plan has dp={dp}; load it under a plan with dp={processes}, save it "
                "there, and go on from that under any plan"
            )
    path = folder / f"random_states_{accelerator.process_index}.pkl"
    if path.is_file():  # accelerate restores them unchecked
        with safe_globals():
            found = read_pickle(path)
        check_states_of_others(found, ("random_state", "numpy_random_seed", "torch_manual_seed"), path)
    return is_stock


def load_stock_optimizers(accelerator: Accelerator, folder: Path) -> None:
    """Restore the states of the planned optimizers that accelerate's own class saved."""
    for model, optimizer in _pairs(accelerator):
        wrappers = [unwrapped(wrapper) for wrapper in accelerator._optimizers]
        if (count := sum(other is optimizer for other in wrappers)) > 1:
            raise CheckpointError(
                f"{folder} has the states of {count} optimizers of one model in files of accelerate's own, each with "
                "its own numbering of the parameters, which a plan cannot read; resume from a folder that "
                "accelerator.save_state wrote under a plan"
            )
        number = wrappers.index(optimizer)
        path = folder / _numbered("optimizer", number, "bin")
        check_pickle(path)
        load_stock_optimizer(model, optimizer, path)
    show_loaded(folder, step=None, plan=None)


def _numbered(name: str, number: int, ending: str) -> str:
    return f"{name}_{number}.{ending}" if number else f"{name}.{ending}"


def save_progress(accelerator: Accelerator, directory: str | os.PathLike[str]) -> None:
    """Write the optimizers' states, and the positions of the loaders and of the dropout streams."""
    for model, optimizer in _pairs(accelerator):
        mw.save_optimizer(model, optimizer, os.path.join(_folder(accelerator._models, model, directory), "optimizer"))
    watches = [runtime_of(model).features.find(Watch) for model in planned_models(accelerator)]
    progress = {
        "loaders": [loader.place() for loader in _loaders(accelerator)],
        "dropout": [_streams(model).state_dict() for model in planned_models(accelerator)],
        "step": accelerator.step,
        "rows": _rows_of_step(accelerator),
        "batches": [scheduler.batches for scheduler in _schedulers(accelerator)],
        "shown_steps": [None if watch is None else watch.step for watch in watches],
        "plan": None if (plan := runtime_of(planned_models(accelerator)[0]).plan) is None else asdict(plan),
    }

    def write() -> None:
        (Path(directory) / PROGRESS).write_text(json.dumps(progress) + "\n", encoding="utf-8")

    on_first_rank(write)


def load_progress(accelerator: Accelerator, directory: str | os.PathLike[str]) -> None:
    """Restore the state that ``save_progress`` wrote, on any number of ranks."""
    progress = succeed_together(lambda: _read(accelerator, directory))
    for model, optimizer in _pairs(accelerator):
        mw.load_optimizer(model, optimizer, os.path.join(_folder(accelerator._models, model, directory), "optimizer"))
    for loader, state in zip(_loaders(accelerator), progress["loaders"], strict=True):
        loader.load_state_dict(state)
    for model, state in zip(planned_models(accelerator), progress["dropout"], strict=True):
        _streams(model).load_state_dict(state)
    accelerator.step = progress["step"]  # accelerate saves it in one file per rank, but the number of ranks may differ
    for model, step in zip(planned_models(accelerator), progress.get("shown_steps", ()), strict=False):
        if (watch := runtime_of(model).features.find(Watch)) is not None and step is not None:
            watch.resumed(step)
    rows, saved_rows = _rows_of_step(accelerator), progress["rows"]
    for scheduler, batches in zip(_schedulers(accelerator), progress["batches"], strict=False):
        if rows is not None and saved_rows is not None:
            scheduler.count_in(rows, saved_rows, batches)
    show_loaded(directory, step=next(iter(progress.get("shown_steps", ())), None), plan=progress.get("plan"))


def planned_models(accelerator: Accelerator) -> list[nn.Module]:
    """Return those models of an Accelerator that a plan distributes."""
    return [model for model in accelerator._models if find_runtime(model) is not None]


def is_new_model(value: object) -> bool:
    """Return whether this is a model that no Accelerator has prepared."""
    return isinstance(value, nn.Module) and not getattr(value, "_is_accelerate_prepared", False)


def _read(accelerator: Accelerator, directory: str | os.PathLike[str]) -> dict[str, Any]:
    path = Path(directory) / PROGRESS
    progress = read_json(path)
    require(progress, _PROGRESS, path)
    for name, here in (("loaders", _loaders(accelerator)), ("dropout", planned_models(accelerator))):
        if len(progress[name]) != len(here):
            what = "loader(s)" if name == "loaders" else "model(s)"
            raise CheckpointError(
                f"{directory} has the state of {len(progress[name])} {what}, but this Accelerator has {len(here)}; "
                "prepare the same objects in the same order"
            )
    for loader, state in zip(_loaders(accelerator), progress["loaders"], strict=True):
        loader.inner.check_state_dict(state)
    return dict(progress)


_PROGRESS = record(
    {
        "loaders": listed(table(anything)),
        "dropout": listed(STREAMS),
        "step": integer(),
        "rows": maybe(integer(1)),
        "batches": listed(integer()),
    },
    {"shown_steps": listed(maybe(integer())), "plan": maybe(table(anything))},  # earlier versions wrote none
)


def _folder(models: list[nn.Module], model: nn.Module, directory: str | os.PathLike[str]) -> str:
    planned = [other for other in models if find_runtime(other) is not None]
    index = next(i for i, other in enumerate(planned) if other is model)
    return os.path.join(directory, f"meshwright_{index}")


def _pairs(accelerator: Accelerator) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
    """Return (model, optimizer) for each planned model that has an optimizer, or several as one."""
    models = {id(find_runtime(model)): model for model in planned_models(accelerator)}
    inner = dict.fromkeys(unwrapped(optimizer) for optimizer in accelerator._optimizers)
    return [(models[id(runtime)], optimizer) for optimizer in inner if (runtime := find_runtime(optimizer)) is not None]


def _streams(model: nn.Module) -> DropoutStreams:
    streams = runtime_of(model).features.find(DropoutStreams)
    assert streams is not None, "a planned model without dropout streams"
    return streams


def _schedulers(accelerator: Accelerator) -> list[PlannedScheduler]:
    return [scheduler for scheduler in accelerator._schedulers if isinstance(scheduler, PlannedScheduler)]


def _rows_of_step(accelerator: Accelerator) -> int | None:
    """Return the rows of an optimizer step with the loader that was prepared first; None if they are unknown."""
    rows = next((loader.total_batch_size for loader in _loaders(accelerator)), None)
    return None if rows is None else rows * accelerator.gradient_accumulation_steps


def _loaders(accelerator: Accelerator) -> list[PlannedLoader]:
    return [loader for loader in accelerator._dataloaders if isinstance(loader, PlannedLoader)]
