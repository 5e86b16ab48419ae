"""Train through a DeepSpeed engine, for comparison with one process; every function runs on all ranks of a pool."""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import groups
from torch import Tensor
from torch.utils.data import DataLoader

import meshwright as mw
from meshwright_hf.deepspeed import full_state_dict, initialize
from support.models import build
from support.reference import ACCUMULATION, ROWS, dataset, make_optimizer

STEPS, HALF = 6, 3
TRAITS = {"attention_bias": True}  # with Qwen3's head norms: every kind of partial gradient there is
LR = 1e-3
Curve = tuple[list[float], list[float]]  # the loss of every micro-batch, the norm of every step


def own_world(function: Callable[..., Any]) -> Callable[..., Any]:
    """DeepSpeed keeps process groups in globals, and a pool gives every job new ones."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        finally:
            groups._release_process_group_references()

    return run


def config_for(stage: int, dp: int, *, zero: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A user's configuration. No parameter is small enough to stay whole under stage 3, as none of a real model is."""
    return {
        "train_micro_batch_size_per_gpu": ROWS // dp,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **(zero or {})},
        **changes,
    }


def make_engine(
    plan: dict[str, Any], config: dict[str, Any], *, family: str = "qwen3", seed: int = 0, **overrides: Any
) -> Any:
    """An engine with the optimizer of the reference, or the configuration's over the same groups."""
    model = build(family, seed=seed, **{**TRAITS, **overrides})
    optimizer = make_optimizer(model, lr=LR)
    given: dict[str, Any] = {"optimizer": optimizer}
    if "optimizer" in config:
        keep = ("params", "weight_decay")
        given = {"model_parameters": [{key: group[key] for key in keep} for group in optimizer.param_groups]}
    words = mw.ParallelPlan(**plan).label  # which initialize takes as every entry does
    return initialize(model=model, config=config, plan=words, **given)[0]


def batches_for(engine: Any, part: slice) -> Iterator[dict[str, Tensor]]:
    """This dp rank's rows of the reference's batches."""
    dp = engine.dp_world_size
    first = dist.get_rank() // (dist.get_world_size() // dp) * (ROWS // dp)
    for batch in list(DataLoader(dataset(STEPS * ACCUMULATION), batch_size=ROWS))[part]:
        yield {name: rows[first : first + ROWS // dp] for name, rows in batch.items()}


FIRST_HALF, SECOND_HALF = slice(HALF * ACCUMULATION), slice(HALF * ACCUMULATION, None)


def train(engine: Any, part: slice = slice(None)) -> Curve:
    losses, norms = [], []
    for batch in batches_for(engine, part):
        loss = engine(**batch).loss
        engine.backward(loss)
        ends_step = engine.is_gradient_accumulation_boundary()
        engine.step()
        losses.append(loss.item())
        if ends_step:
            norms.append(float(engine.get_global_grad_norm()))
    return losses, norms


@own_world
def run_plan(plan: dict[str, Any], config: dict[str, Any], **model: Any) -> tuple[Curve, dict[str, Tensor]]:
    engine = make_engine(plan, config, **model)
    return train(engine), full_state_dict(engine)


@own_world
def run_without_marks(plan: dict[str, Any], config: dict[str, Any]) -> Curve:
    """The classic mistake: DeepSpeed takes every parameter for a copy of rank 0's."""
    with mock.patch("meshwright_hf.deepspeed.engine.mark_parameters"):
        return train(make_engine(plan, config))


@own_world
def run_with_checkpoints(plan: dict[str, Any], other: dict[str, Any], stage: int, folder: str) -> dict[str, Any]:
    """Save half-way and go on; go on from there with a new engine; and by another plan, over a universal checkpoint."""
    config = config_for(stage, plan["dp"])
    engine = make_engine(plan, config)
    found: dict[str, Any] = {"first half": train(engine, FIRST_HALF)}
    engine.save_checkpoint(folder, tag="half")
    found["weights"] = full_state_dict(engine)
    found["second half"] = train(engine, SECOND_HALF)

    resumed = make_engine(plan, config, seed=1)
    resumed.load_checkpoint(folder, tag="half")
    found["resumed"] = train(resumed, SECOND_HALF)

    if dist.get_rank() == 0:
        convert(Path(folder, "half"), Path(folder, "universal"))
    dist.barrier()
    universal = {**config_for(stage, other.get("dp", 1)), "checkpoint": {"load_universal": True}}
    moved = make_engine(other, universal, seed=1)
    moved.load_checkpoint(folder, tag="universal")
    found["moved"] = train(moved, SECOND_HALF)
    moved.save_checkpoint(folder, tag="end")
    found["end weights"] = full_state_dict(moved)
    return found


def convert(source: Path, target: Path) -> None:
    """What ``python -m deepspeed.checkpoint.ds_to_universal`` runs."""
    options = argparse.Namespace(
        input_folder=str(source),
        output_folder=str(target),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=False,
    )
    with contextlib.redirect_stdout(None):
        ds_to_universal.main(options)


def merged(folder: Path, name: str, state: str = "fp32") -> Tensor:
    """A parameter (or its Adam state) of a universal checkpoint."""
    loaded = torch.load(folder / "universal" / "zero" / name / f"{state}.pt", weights_only=False)
    return loaded["param"] if isinstance(loaded, dict) else loaded


@own_world
def run_refusals(folder: str) -> list[str]:
    """What an engine's model refuses, since DeepSpeed does it or it would be wrong."""
    engine = make_engine({"dp": 2, "tp": 2}, config_for(3, 2))
    messages = []
    for call in (
        lambda: mw.clip_grad_norm_(engine.module, 1.0),
        lambda: mw.no_sync(engine.module),
        lambda: mw.full_gradients(engine.module),
        lambda: mw.load_weights(engine.module, folder),
        lambda: mw.save_checkpoint(folder, engine.module, engine.optimizer),
        lambda: mw.save_checkpoint(folder, engine, None),
        lambda: mw.load_checkpoint(folder, engine.module, None, missing_ok=True),
        # Under stage 3 DeepSpeed's groups are empty, and so would the state be.
        lambda: mw.save_optimizer(engine.module, engine.optimizer, folder),
        lambda: mw.load_optimizer(engine, engine.optimizer, folder),
        lambda: engine.save_16bit_model(folder),
        lambda: initialize(model=engine.module, config=config_for(3, 2), plan=mw.ParallelPlan(dp=2, tp=2)),
    ):
        try:
            call()
            messages.append("no error")
        except ValueError as error:
            messages.append(str(error))
    return messages


@own_world
def run_loaders(config: dict[str, Any], plan: dict[str, Any]) -> dict[str, Any]:
    """The two ways to give data: a loader of global batches, and a dataset of which DeepSpeed makes a loader."""
    rows = dataset(STEPS * ACCUMULATION)
    loader = DataLoader(rows, batch_size=ROWS)
    auto = {**config, "train_micro_batch_size_per_gpu": "auto"}
    found = {}
    for name, data in (("dataloader", {"dataloader": loader}), ("training_data", {"training_data": rows})):
        model = build("qwen3", **TRAITS)
        settings = auto if name == "dataloader" else config
        engine, _, given, _ = initialize(
            model=model, optimizer=make_optimizer(model, lr=LR), config=settings, plan=mw.ParallelPlan(**plan), **data
        )
        found[name] = [batch["input_ids"] for batch in given]
        if name == "dataloader":
            found["curve"] = train(engine)
    return found
