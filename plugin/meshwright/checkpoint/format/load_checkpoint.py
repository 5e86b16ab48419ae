"""Loads what ``save_checkpoint`` wrote, under any plan, and tells the user what the run was resumed from.

Each rank reads the elements that it needs, and checks them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.checkpoint.files.place import Place, absolute, place
from meshwright.checkpoint.files.reading import Lineage, Mark
from meshwright.checkpoint.format.background import Background
from meshwright.checkpoint.format.checkpoint_folders import NAME, find_checkpoint
from meshwright.checkpoint.format.load_weights import OpenCheckpoint, open_together, take_over_weights
from meshwright.checkpoint.format.object_states import (
    Stateful,
    check_random_state,
    check_states,
    load_states,
    set_random_state,
)
from meshwright.checkpoint.format.rank_state import Run
from meshwright.checkpoint.one_device.optimizer_manifest import OptimizerManifest, master_key, state_key
from meshwright.checkpoint.one_device.optimizer_state import ReadState, check_fits, read_state, set_state
from meshwright.checkpoint.one_device.rank_optimizer import RankTensor
from meshwright.checkpoint.one_device.safetensors_file import Form
from meshwright.checkpoint.one_device.weight_files import some
from meshwright.errors import CheckpointError, PlanError
from meshwright.faults.every_rank import on_every_rank
from meshwright.faults.together import on_first_rank, succeed_together
from meshwright.layout.row_layout import numel
from meshwright.layout.tensor_layout import TensorLayout
from meshwright.optim.owners import OptimizerParts, parts_of
from meshwright.optim.runtime import Runtime, Watch
from meshwright.parallel.dropout_streams import DropoutStreams
from meshwright.parallel.shards.stand_in import reading_shards
from meshwright.parallel.shards.state_of_parts import state_of
from meshwright.plan.config import ParallelPlan
from meshwright.printable import printable
from meshwright.progress import Progress, is_first_rank

_Given = dict[str, Stateful | None]
_COMPONENTS = ("optimizer", "loader", "scheduler", "scaler", "random")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was loaded.

    Args:
        folder: its folder; a :class:`str` that ``load_checkpoint`` takes if it was named by a URL.
        step: the step that was passed to ``save_checkpoint``; None if none was.
        extra: the ``extra`` that was passed to ``save_checkpoint``.
        plan: the fields of the plan under which it was saved; None for a model that was not distributed.
    """

    folder: Place
    step: int | None
    extra: Any
    plan: dict[str, Any] | None


@on_every_rank
def load_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None,
    *,
    loader: Stateful | None = None,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    ignore: Collection[str] = (),
    missing_ok: bool = False,
) -> Checkpoint | None:
    """Load a checkpoint into the objects of a run, under the plan that saved it or another; every rank makes the call.

    Each rank reads the parts of the files that it needs, and checks their digests. Under the plan that saved it, the
    run continues bitwise as if it had never stopped. Under another plan the random states of all ranks become those of
    the first rank. Rank 0 prints one line with the folder, the step and the plan that saved it.

    Args:
        folder: the folder of a checkpoint, or a folder of checkpoints, which stands for the newest whole one in it; a
            path or a URL.
        model: the model, distributed or not.
        optimizer: its optimizer; None if the checkpoint has none.
        loader: the loader that was passed to ``save_checkpoint``.
        scheduler: the scheduler that was passed to it.
        scaler: the ``GradScaler`` that was passed to it.
        ignore: components of the checkpoint that are not loaded: ``"optimizer"``, ``"loader"``, ``"scheduler"``,
            ``"scaler"`` or ``"random"``. Anything else that is missing on either side is an error.
        missing_ok: whether to return None, and change nothing, if there is no checkpoint in ``folder`` yet. If there
            are checkpoints but none is whole, an error is raised nevertheless.

    Returns:
        What was loaded, with ``step`` and ``extra``.

    Raises:
        CheckpointError: if there is no whole checkpoint, a file is damaged, or it does not fit the objects. Before the
            first tensor is read, the objects are unchanged. If reading fails part-way, some weights and some of the
            optimizer's state are overwritten.

    Example::

        model, optimizer, loader = mw.to_distributed(model, optimizer, loader)
        done = mw.load_checkpoint("runs", model, optimizer, loader=loader, missing_ok=True)
        first_step = 0 if done is None else done.step
    """
    run = Run.of("load_checkpoint", folder, model, optimizer)
    Background.of(run.model).wait()
    succeed_together(run.check)
    given: _Given = {"optimizer": optimizer, "loader": loader, "scheduler": scheduler, "scaler": scaler}
    path = on_first_rank(lambda: _find(absolute(folder), missing_ok))
    if path is None:
        return None
    opened = open_together(place(path))
    manifest = opened.manifest
    runtime = run.runtime
    random = opened.random_of(run.mesh)
    with Progress(f"reading {opened.folder.name}") as progress, reading_shards():
        saved = SavedTensors(opened, progress)

        def check() -> tuple[set[str], _Weights, _Optimizer | None]:
            used = _components(opened, given, ignore)
            tensors, ties, objects = run.model_tensors()
            names = _names(opened, tensors, ties)
            weights = [(names[key], tensor, objects[key]) for key, tensor in tensors.items()]
            if "random" in used:
                check_random_state(random, run.device, str(opened.folder))
            check_states(opened.folder / NAME, manifest, _chosen(given, used))
            if optimizer is None or "optimizer" not in used:
                return used, weights, None
            assert manifest.optimizer is not None
            found, described = parts_of(run.model, optimizer), OptimizerManifest(**manifest.optimizer)
            check_fits(opened.folder, described, saved, found)
            return used, weights, (found, described)

        def read() -> ReadState:
            _read_weights(runtime, weights, saved)
            take_over_weights(runtime)  # before the state is read, which overwrites masters in place
            if state is None:
                return {}
            saved.read_over(state[0])
            return read_state(*state, saved)

        used, weights, state = succeed_together(check)
        progress.start(sum(numel(x.layout.blocks()) * x.dtype.itemsize for _, x, _ in weights))
        loaded = succeed_together(read)
        if state is not None:
            set_state(*state, loaded)
    succeed_together(lambda: load_states(opened.folder / NAME, manifest, _chosen(given, used)))
    if (streams := runtime.features.find(DropoutStreams)) is not None and manifest.streams is not None:
        streams.load_state_dict(manifest.streams)
    if "random" in used:
        set_random_state(random, run.device)
    if (watch := runtime.features.find(Watch)) is not None and manifest.step is not None:
        watch.resumed(manifest.step)
    Lineage.of(run.model).go_on_from(Mark(number=manifest.number, run=manifest.run))
    show_loaded(opened.folder, step=manifest.step, plan=manifest.plan)
    return Checkpoint(folder=opened.folder, step=manifest.step, extra=manifest.extra, plan=manifest.plan)


def _chosen(given: _Given, used: set[str]) -> dict[str, Stateful]:
    return {name: value for name, value in given.items() if name in used and value is not None}


def _find(folder: Place, missing_ok: bool) -> str | None:
    found = find_checkpoint(folder, missing_ok=missing_ok)
    return found and str(found[0])


def _components(opened: OpenCheckpoint, given: _Given, ignore: Collection[str]) -> set[str]:
    """The components to load: those that the checkpoint has and the program passes."""
    if isinstance(ignore, str) or (unknown := [name for name in ignore if name not in _COMPONENTS]):
        named = ignore if isinstance(ignore, str) else ", ".join(unknown)
        raise CheckpointError(f"ignore={named!r} must be a list of {', '.join(map(repr, _COMPONENTS))}")
    has = {name for name in given if getattr(opened.manifest, name) is not None}
    passed = {name for name, value in given.items() if value is not None}
    if lost := sorted(has - passed - set(ignore)):
        raise CheckpointError(
            f"{opened.folder} holds the state of {', '.join(lost)}, which load_checkpoint was not given: the "
            f"resumed run would give other results. Pass {lost[0]}=..., or ignore=[{lost[0]!r}]"
        )
    if lost := sorted(passed - has - set(ignore)):
        raise CheckpointError(
            f"{opened.folder} was saved without the state of {', '.join(lost)}, so the resumed run would give other "
            f"results. Load a checkpoint that was saved with {lost[0]}=..., or pass ignore=[{lost[0]!r}]"
        )
    return (passed | {"random"}) - set(ignore)


def _names(opened: OpenCheckpoint, tensors: dict[str, RankTensor], ties: dict[str, str]) -> dict[str, str]:
    """The checkpoint's key of each of the model's tensors.

    Raises:
        CheckpointError: if tensors are missing on either side, or differ in shape or dtype; it names them.
    """
    saved = {key for key in opened.manifest.tensors if key.startswith("weights/")}
    aliases = {key: {key, *(tie for tie, first in ties.items() if first == key)} for key in tensors}
    names, problems = {}, []
    for key, tensor in tensors.items():
        shown = key.removeprefix("weights/")
        candidates = [opened.manifest.ties.get(alias, alias) for alias in sorted(aliases[key], key=lambda a: a != key)]
        name = next((candidate for candidate in candidates if candidate in saved), None)
        if name is None:
            problems.append(f"{shown} is not in the checkpoint")
            continue
        names[key] = name
        dtype, shape = opened.manifest.tensors[name]
        if shape != tensor.layout.shape:
            problems.append(f"{shown}: {list(shape)} in the checkpoint, {list(tensor.layout.shape)} in the model")
        elif dtype != tensor.dtype:
            problems.append(f"{shown}: {dtype} in the checkpoint, {tensor.dtype} in the model")
    used = set(names.values())
    problems += [f"{name.removeprefix('weights/')} is not in the model" for name in sorted(saved - used)]
    if problems:
        raise CheckpointError(
            f"{opened.folder} does not fit the model:\n  {some(problems)}\nBuild the model that was saved, in the same "
            "dtype; load_weights reads the weights alone, and converts them"
        )
    return names


# For each of the model's tensors: its key in the checkpoint, what this rank has of it, and the tensor itself.
_Weights = list[tuple[str, RankTensor, Tensor]]
_Optimizer = tuple[OptimizerParts, OptimizerManifest]


class SavedTensors:
    """Reads what this rank has of the tensors of a checkpoint."""

    def __init__(self, opened: OpenCheckpoint, progress: Progress):
        self._opened, self._progress = opened, progress
        self._present: dict[str, Tensor] = {}  # the optimizer's present tensors, by the checkpoint's keys

    def form(self, tensor: str) -> Form | None:
        return self._opened.manifest.tensors.get(tensor)

    def read_over(self, found: OptimizerParts) -> None:
        """From now on, read into the memory of an optimizer's state where it has the right form."""
        for name, part in found.parts.items():
            if part.master is not None:
                self._present[master_key(name)] = part.master.detach()
            if part.key is not None:
                state = state_of(found.optimizer, part.key)
                self._present |= {state_key(name, key): x for key, x in state.items() if isinstance(x, Tensor)}

    def read(self, tensor: str, dtype: torch.dtype, layout: TensorLayout) -> Tensor:
        """Read what this rank has of a tensor, on the CPU."""
        present = self._present.get(tensor)
        if present is None or not present.is_cpu or (present.dtype, present.shape) != (dtype, layout.local_shape):
            return self._opened.read_tensor(tensor, dtype, layout, self._progress.add)
        self.overwrite(present, tensor, layout)
        return present

    def overwrite(self, target: Tensor, tensor: str, layout: TensorLayout) -> None:
        """Read what this rank has of a tensor into ``target``; padding becomes zero."""
        if target.is_cpu and target.is_contiguous() and numel(layout.blocks()) == target.shape.numel():
            self._opened.read_into(target, tensor, layout, self._progress.add)
        else:
            target.copy_(self._opened.read_tensor(tensor, target.dtype, layout, self._progress.add))


def _read_weights(runtime: Runtime, weights: _Weights, saved: SavedTensors) -> None:
    for key, tensor, target in weights:
        if not tensor.layout.is_held:
            continue
        if runtime.weights is not None and isinstance(target, nn.Parameter):
            runtime.weights.set_part(target, saved.read(key, target.dtype, tensor.layout))
        else:
            saved.overwrite(target.data, key, tensor.layout)


def show_loaded(folder: str | os.PathLike[str], *, step: int | None, plan: Mapping[str, object] | None) -> None:
    """Print one line on rank 0 with a checkpoint that has been loaded.

    Args:
        folder: the checkpoint's folder.
        step: the step after which it was saved; None if it does not say.
        plan: the fields of the plan under which it was saved; None if it does not say.
    """
    if is_first_rank():
        print(printable(loaded_line(folder, step=step, plan=plan)), file=sys.stderr, flush=True)


def loaded_line(folder: str | os.PathLike[str], *, step: int | None, plan: Mapping[str, object] | None) -> str:
    """Return the line of ``show_loaded``.

    Example:
        >>> loaded_line("runs/step-20", step=20, plan={"dp": 2, "zero_stage": 1})
        'meshwright: loaded runs/step-20, step 20, saved under dp2 zero1'
    """
    path, here = place(folder), Path.cwd()
    if isinstance(path, Path) and path.is_relative_to(here):
        path = path.relative_to(here)
    label = None if plan is None else _label(plan)
    parts = [f"meshwright: loaded {path}", step is not None and f"step {step}", label and f"saved under {label}"]
    return ", ".join(part for part in parts if part)


def _label(plan: Mapping[str, Any]) -> str | None:
    """Return the words of a plan; None for fields of another version, which do not keep a checkpoint from loading."""
    try:
        return ParallelPlan(**plan).label
    except (PlanError, TypeError):
        return None
