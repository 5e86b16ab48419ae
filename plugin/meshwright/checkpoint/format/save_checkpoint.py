"""Save all that a run needs to go on, as one folder that exists whole or not at all."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from meshwright.checkpoint.files.place import Place, absolute
from meshwright.checkpoint.files.reading import Lineage
from meshwright.checkpoint.format.background import Background, SaveJob
from meshwright.checkpoint.format.object_states import Stateful
from meshwright.checkpoint.format.rank_state import RankState, Run
from meshwright.checkpoint.one_device.optimizer_manifest import encode
from meshwright.errors import CheckpointError
from meshwright.faults.every_rank import on_every_rank
from meshwright.faults.together import succeed_together
from meshwright.outside_files import LARGEST_COUNT
from meshwright.parallel.shards.stand_in import reading_shards
from meshwright.progress import Progress, is_first_rank


@on_every_rank
def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None,
    *,
    loader: Stateful | None = None,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    step: int | None = None,
    extra: object = None,
    keep: int | None = None,
    asynchronous: bool = False,
) -> Place:
    """Save all that a run needs to go on, as one folder that exists whole or not at all; every rank makes the call.

    The folder holds the weights, the optimizer's state, the random states of all ranks, the plan, and the states of
    the objects that are passed. Every element is written once, by one of the ranks that hold it, with a digest that
    ``load_checkpoint`` checks. A job that is killed during the call leaves what was in the folder before.

    Args:
        folder: the folder of this checkpoint, e.g. ``"runs/step-100"`` or ``"s3://bucket/run/step-100"``; a checkpoint
            in it is replaced.
        model: the model, distributed or not.
        optimizer: its optimizer; None for a model without one.
        loader: the loader that ``to_distributed`` returned, to save its position.
        scheduler: a learning rate scheduler, or any object with ``state_dict`` and ``load_state_dict``, whose state is
            numbers, texts and containers of them.
        scaler: a gradient scaler, likewise.
        step: a number for the program, e.g. of optimizer steps; ``load_checkpoint`` returns it.
        extra: anything that JSON can hold; ``load_checkpoint`` returns it.
        keep: the number of checkpoints of this run to keep in the folder's parent, at least 1; its oldest others are
            removed after this one is complete. None keeps all. Those of other runs stay (see docs/checkpoints.md).
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
    run = Run.of("save_checkpoint", folder, model, optimizer)
    background = Background.of(run.model)
    background.wait()
    target = absolute(folder)
    objects = {"loader": loader, "scheduler": scheduler, "scaler": scaler}
    groups = [] if optimizer is None else optimizer.param_groups
    if scheduler is None and is_first_rank() and any("initial_lr" in group for group in groups):  # by a scheduler
        warnings.warn(
            "the optimizer has a learning rate scheduler, but save_checkpoint was not given it, so a resumed run would "
            "begin the schedule anew; pass scheduler=... to save_checkpoint and load_checkpoint",
            stacklevel=2,
        )
    # The ranks agree in a thread on what each of them writes. Memory of other devices is too scarce to wait for that.
    plans_later = asynchronous and run.device.type == "cpu"

    def prepare() -> RankState:
        run.check()
        states = {"step": step, **_checked(objects, extra, step, keep)}
        with reading_shards():
            own = RankState.of(run, optimizer, states)
            return own.as_of_now() if plans_later else own

    own = run.runtime.compare_replicas(prepare)
    with reading_shards():
        memory = background.memory if asynchronous else None
        job = SaveJob(target, own, keep=keep, lineage=Lineage.of(run.model), memory=memory)
        if not plans_later:
            job.plan(None)
            succeed_together(job.check)
        if asynchronous:
            if own.optimizer is not None:
                background.hold_steps_of(own.optimizer.found.optimizer)
            background.start(job)
        else:
            with Progress(f"writing {target.name}") as progress:
                progress.start(job.num_bytes)
                job.run(None, progress.add)
    return target


def _checked(objects: Mapping[str, object], extra: object, step: int | None, keep: int | None) -> dict[str, object]:
    """The states of the objects, of which some may be None, as JSON."""
    if step is not None and (type(step) is not int or not 0 <= step <= LARGEST_COUNT):
        raise CheckpointError(f"step={step!r} must be a whole number from 0 to {LARGEST_COUNT}")
    if keep is not None and (type(keep) is not int or keep < 1):
        raise CheckpointError(f"keep={keep!r} must be a whole number of at least 1: the last good checkpoint is kept")
    states: dict[str, object] = {name: _state_of(value, name) for name, value in objects.items()}
    states |= {name: encode(states[name], name) for name in ("scheduler", "scaler")} | {"extra": extra}
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
    if value is None:
        return None
    if not callable(getattr(value, "state_dict", None)) or not callable(getattr(value, "load_state_dict", None)):
        advice = "; pass the loader that to_distributed returned" if name == "loader" else ""
        raise CheckpointError(f"{name}={type(value).__name__} has no state_dict and load_state_dict{advice}")
    return value.state_dict()
