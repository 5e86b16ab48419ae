"""Save all that a run needs to go on, as one folder that exists whole or not at all."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from meshwright.checkpoint.background import Background
from meshwright.checkpoint.folders import commit, keep_newest, stage
from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.model_config import model_config
from meshwright.checkpoint.optimizer_manifest import encode
from meshwright.checkpoint.optimizer_state import State, of_all, with_own_text
from meshwright.checkpoint.part_files import FileRecord, RankPart, Source
from meshwright.checkpoint.random_state import random_state
from meshwright.checkpoint.regions import Block
from meshwright.checkpoint.run_state import Mesh, RunTensor, mesh_of, model_tensors, optimizer_fields, optimizer_tensors
from meshwright.checkpoint.shares import Held, shares
from meshwright.checkpoint.snapshot import Snapshot
from meshwright.checkpoint.staging import Staging
from meshwright.compiling import without_compilation
from meshwright.errors import CheckpointError
from meshwright.faults.together import Meeting, exchange_together, on_first_rank, succeed_together
from meshwright.optim.runtime import Runtime, device_of
from meshwright.optim.state_parts import OptimizerParts
from meshwright.parallel.shard_reads import reading_shards
from meshwright.progress import Progress

_LIBRARIES = ("meshwright", "torch", "transformers", "accelerate", "numpy")


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None,
    *,
    loader: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    step: int | None = None,
    extra: Any = None,
    keep: int | None = None,
    asynchronous: bool = False,
) -> Path:
    """Save all that a run needs to go on, as one folder that exists whole or not at all; every rank makes the call.

    The folder holds the weights, the optimizer's state, the random states of all ranks, the plan, and the states of
    the objects that are passed. Every element is written once, by one of the ranks that hold it, with a digest that
    ``load_checkpoint`` checks. A job that is killed during the call leaves what was in the folder before.

    Args:
        folder: the folder of this checkpoint, e.g. ``"runs/step-100"``; a checkpoint in it is replaced.
        model: the model, distributed or not.
        optimizer: its optimizer; None for a model without one.
        loader: the loader that ``to_distributed`` returned, to save its position.
        scheduler: a learning rate scheduler, or any object with ``state_dict`` and ``load_state_dict``, whose state is
            numbers, texts and containers of them.
        scaler: a gradient scaler, likewise.
        step: a number for the program, e.g. of optimizer steps; ``load_checkpoint`` returns it.
        extra: anything that JSON can hold; ``load_checkpoint`` returns it.
        keep: the number of checkpoints to keep in the folder's parent, at least 1; the oldest others are removed after
            this one is complete. None keeps all.
        asynchronous: whether the call only takes a snapshot of what this rank writes, and a thread writes it while
            training goes on. The next save, the next load, ``wait_for_checkpoints`` and the end of the program wait for
            it, and raise its error on all ranks. Until it is complete, the newest checkpoint is the one before.

    Returns:
        The folder.

    Raises:
        CheckpointError: if something cannot be saved, the folder holds other files, or hosts do not share the disk.
        DivergenceError: if weights that several ranks hold differ.
        OSError: on every rank, if a rank cannot write.

    Example::

        for step, batch in enumerate(loader, start=1):
            ...
            if step % 100 == 0:
                mw.save_checkpoint(f"runs/step-{step}", model, optimizer, loader=loader, step=step, keep=2)
    """
    model = without_compilation(model)
    background = Background.of(model)
    background.wait()
    target = Path(os.path.abspath(folder))
    objects = Objects(loader=loader, scheduler=scheduler, scaler=scaler, extra=extra)

    def begin() -> tuple[tuple[Runtime, Mesh, dict[str, Any], OptimizerParts | None], str]:
        runtime, mesh = mesh_of(model)
        found, text = (None, "") if optimizer is None else with_own_text(model, optimizer)
        return (runtime, mesh, _checked(objects, step, keep), found), text

    # Training waits for each exchange between the ranks, so only a few are made.
    (runtime, mesh, states, found), texts = exchange_together(begin)
    runtime.compare_before_save()

    def prepare() -> Save:
        tensors, ties, _ = model_tensors(model, runtime)
        state: tuple[OptimizerParts, State] | None = None
        if found is not None:
            state = of_all(found, texts)
            tensors |= optimizer_tensors(*state, device_of(model))

        def manifest() -> Manifest:
            return Manifest(
                step=step,
                written=time.time_ns(),
                versions=dict(_versions()),
                plan=None if runtime.plan is None else asdict(runtime.plan),
                pp=mesh.sizes.pp,
                dp=mesh.sizes.dp,
                tp=mesh.sizes.tp,
                tensors={key: (tensor.held.dtype, tensor.held.shape) for key, tensor in tensors.items()},
                ties=ties,
                optimizer=None if state is None else optimizer_fields(*state),
                streams=None if runtime.streams is None else runtime.streams.state_dict(),
                model_config=model_config(model),
                files={},
                **states,
            )

        part = RankPart(place=mesh.index, sources=_sources(tensors, mesh), random=random_state(device_of(model)))
        return Save(
            target=target,
            part=Snapshot(part, background.memory) if asynchronous else part,
            manifest=manifest() if not dist.is_initialized() or dist.get_rank() == 0 else None,
            keep=keep,
        )

    with reading_shards():
        save = succeed_together(prepare)
        if asynchronous:
            if found is not None:
                background.hold_steps_of(found.optimizer)
            background.start(save)
        else:
            with Progress(f"writing {target.name}") as progress:
                progress.start(save.part.num_bytes)
                save.run(None, progress.add)
    return target


@dataclass(frozen=True, kw_only=True)
class Save:
    """One save: each rank writes its files, then the first rank makes the checkpoint visible.

    Args:
        target: the folder that the checkpoint gets.
        part: what this rank writes, or a snapshot of it.
        manifest: the manifest, without the records of the files; None on all ranks but the first.
        keep: the number of checkpoints to keep in the folder's parent; None for all.
    """

    target: Path
    part: RankPart | Snapshot
    manifest: Manifest | None
    keep: int | None

    def copy(self) -> None:
        """Copy the tensors that a snapshot shares with the model. Never raises."""
        if isinstance(self.part, Snapshot):
            self.part.copy()

    def run(self, meeting: Meeting | None, on_write: Callable[[int], None]) -> None:
        """Write and commit the checkpoint; every rank makes the call.

        Args:
            meeting: how the ranks tell each other that their files are written; None for collectives.
            on_write: function that is called with the number of bytes after each write.
        """
        staging: Staging | None = None

        def start() -> str:
            nonlocal staging
            staging = stage(self.target)
            return str(staging.path)

        def write(path: Path) -> str:
            part = self.part.copied() if isinstance(self.part, Snapshot) else self.part
            return json.dumps({name: asdict(record) for name, record in part.write(path, on_write).items()})

        def finish() -> None:
            assert staging is not None and self.manifest is not None
            commit(staging, dataclasses.replace(self.manifest, files=files))
            if self.keep is not None:
                keep_newest(self.target.parent, self.keep)

        try:
            path = Path(on_first_rank(start, meeting))
            _, texts = exchange_together(lambda: (None, write(path)), meeting)
            files = {name: FileRecord(**record) for text in texts for name, record in json.loads(text).items()}
            on_first_rank(finish, meeting)
        finally:
            if staging is not None:
                staging.close()


@dataclass(frozen=True, kw_only=True)
class Objects:
    """The objects of a program whose state goes into a checkpoint; None for those that it does not have."""

    loader: Any
    scheduler: Any
    scaler: Any
    extra: Any


def _checked(objects: Objects, step: int | None, keep: int | None) -> dict[str, Any]:
    """The states of the objects as JSON."""
    if step is not None and type(step) is not int:
        raise CheckpointError(f"step={step!r} must be a whole number")
    if keep is not None and (type(keep) is not int or keep < 1):
        raise CheckpointError(f"keep={keep!r} must be a whole number of at least 1: the last good checkpoint is kept")
    states: dict[str, Any] = {"extra": objects.extra}
    for name in ("scheduler", "scaler"):
        value = getattr(objects, name)
        states[name] = None if value is None else encode(_state_of(value, name), name)
    states["loader"] = None if objects.loader is None else _state_of(objects.loader, "loader")
    for name in ("extra", "loader"):
        try:
            copied = json.loads(json.dumps(states[name], allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"the state of {name} is not JSON: {error}") from error
        if copied != states[name]:
            raise CheckpointError(
                f"{name} would be read back differently from JSON: use text keys, and lists instead of tuples"
            )
        states[name] = copied  # a copy, since the program may change its own object during the save
    return states


def _state_of(value: Any, name: str) -> Any:
    if not callable(getattr(value, "state_dict", None)) or not callable(getattr(value, "load_state_dict", None)):
        advice = "; pass the loader that to_distributed returned" if name == "loader" else ""
        raise CheckpointError(f"{name}={type(value).__name__} has no state_dict and load_state_dict{advice}")
    return value.state_dict()


def _sources(tensors: dict[str, RunTensor], mesh: Mesh) -> dict[str, Source]:
    """What this rank writes."""
    own = _own_shares(tuple((key, tensor.held) for key, tensor in tensors.items()), mesh)
    return {
        key: Source(dtype=tensors[key].held.dtype, values=tensors[key].values, held=held, share=share)
        for key, (held, share) in own.items()
    }


# This is the same at each save of a run, and takes longer to compute than all else that training waits for.
@functools.lru_cache(maxsize=1)
def _own_shares(tensors: tuple[tuple[str, Held], ...], mesh: Mesh) -> dict[str, tuple[list[Block], list[Block]]]:
    """For each tensor that this rank writes a part of: the elements that it holds, and those that it writes."""
    held = dict(tensors)
    own = shares(held, mesh.sizes)[mesh.index]
    return {key: (held[key].part(mesh.place), share) for key, share in own.items()}


@functools.cache  # reading them takes longer than any other preparation of a save
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
