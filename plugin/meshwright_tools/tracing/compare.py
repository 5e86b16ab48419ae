"""Compares a plan's estimated sizes and traffic with those of a traced step."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import PlanError
from meshwright.outside_files import read_json
from meshwright.parallel.fake_passes.example_images import example_images
from meshwright.plan.config import ToDistributedConfig
from meshwright.roles import find_decoder
from meshwright_plan.expected_traffic import step_traffic
from meshwright_plan.formatting import grid
from meshwright_plan.job.adapters import Lora
from meshwright_plan.job.candidate import Candidate, Job
from meshwright_plan.job.config_file import config_path
from meshwright_plan.job.shapes import ModelShape
from meshwright_plan.memory.footprint import footprint
from meshwright_plan.memory.peak import peak_memory, stage_memory
from meshwright_tools.tracing.trace import Trace, trace_step

MICRO_BATCHES = 2  # most micro-batches to trace, since all are alike


@contextlib.contextmanager
def _without_logs() -> Iterator[None]:
    """Drop warnings, as those of libraries that transformers imports if they are installed, such as torchao."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


@_without_logs()
def model_on_meta(path: str | Path, dtype: torch.dtype) -> Any:
    """Return the model of a config.json, without weights.

    Args:
        path: the config.json, or what else :func:`config_path` finds.
        dtype: the dtype of its parameters.

    Raises:
        PlanError: if transformers is not installed, there is no such file, or transformers cannot make a causal LM
            from the config.
    """
    try:
        # Imported by name, since the core must not depend on transformers.
        transformers = importlib.import_module("transformers")
    except ImportError:
        raise PlanError(
            "tracing a step runs the model's own code, so it needs transformers: pip install transformers"
        ) from None
    path = config_path(path)
    try:
        fields = read_json(path)
        kind = fields.get("model_type")
        if kind in transformers.CONFIG_MAPPING:
            # A file beside a config.json has no directory of its own.
            place = str(path.parent if path.name == "config.json" else path)
            config = transformers.AutoConfig.from_pretrained(place)
            sees_images = type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
            factory = transformers.AutoModelForImageTextToText if sees_images else transformers.AutoModelForCausalLM
            with torch.device("meta"):
                return factory.from_config(config, dtype=dtype).train()
    except Exception as error:  # of many kinds: each config of transformers checks its fields in its own way
        why = str(error.__cause__ or error).splitlines() or [type(error).__name__]
        raise PlanError(f"transformers cannot make a causal LM from {path}: {why[0]}") from error
    raise PlanError(
        f"{path} has model_type {kind!r}, which transformers {transformers.__version__} does not know, so it cannot "
        "make a causal LM from the file. Correct model_type, or install a transformers that has this model; the code "
        "of a model outside of transformers is not run"
    )


@_without_logs()
def adapted(model: nn.Module, lora: Lora) -> nn.Module:
    """Return a model of transformers with PEFT's adapters on all linear layers but the head.

    Raises:
        PlanError: if PEFT is not installed, or the model has towers, whose linear layers would be adapted too.
    """
    if has_towers(model):
        raise PlanError(
            "a step with adapters is traced for models without towers, since the planner's adapters are those of the "
            "decoder alone; leave out --trace or --lora"
        )
    try:
        peft = importlib.import_module("peft")
    except ImportError:
        raise PlanError("tracing a step with adapters needs PEFT: pip install peft") from None
    found: nn.Module = peft.get_peft_model(model, peft.LoraConfig(r=lora.rank, target_modules="all-linear"))
    return found


def has_towers(model: nn.Module) -> bool:
    """Return whether a model has towers, which rows of text do not run."""
    try:
        return bool(find_decoder(model).towers)
    except PlanError:
        return False


def trace_and_compare(model: nn.Module, shape: ModelShape, plan: Candidate, job: Job, stage: int | None = None) -> str:
    """Return a table of each size and each kind of collective, estimated and traced.

    Args:
        model: the model, on the meta device.
        shape: the shape of the same model.
        plan: a plan that this version runs.
        job: the training job.
        stage: the rank of the pipeline to trace; None for the one that needs the most memory.
    """
    if not plan.runs_today:
        raise PlanError(f"--trace runs the plan, but this version cannot run {plan.label}; leave out --allow-future")
    if plan.pp > 1:
        return _of_stage(model, shape, plan, job, stage)
    if stage is not None:
        raise PlanError(f"--stage {stage}: {plan.label} has no pipeline stages; leave --stage out")
    count = min(plan.gradient_accumulation_steps, MICRO_BATCHES)
    plan = dataclasses.replace(plan, gradient_accumulation_steps=count)
    rows_per_step, config = plan.micro_batch_size * count, ToDistributedConfig(gather_logits=job.logits == "gathered")
    run, batch = plan.plan, _images(model, shape, job, rows_per_step)
    trace = trace_step(model, run, rows=rows_per_step, length=job.seq_len, config=config, batch=batch)
    traced_job = _as_traced(job)
    held = footprint(shape, plan, traced_job)
    rows: list[tuple[str, ...]] = [("bytes of rank 0", "estimated", "traced", "ratio")]
    for name in ("parameters", "activations", "gradients", "optimizer", "peak"):
        if name != "activations" or count == 1:
            rows.append(_row(name, getattr(held, name), getattr(trace, name)))
    lines = [f"Traced {plan.label} on {plan.world_size} fake ranks, {count} of its micro-batches, {_where(plan)}:"]
    lines += ["", grid(rows), "", grid(_traffic_rows(shape, plan, trace, traced_job), left=3)]
    return "\n".join(lines)


def _images(model: nn.Module, shape: ModelShape, job: Job, rows: int) -> dict[str, Tensor] | None:
    """Return a batch with an image in each row; None for a model without towers.

    Raises:
        PlanError: if the rows should have another number of images.
    """
    if shape.towers is None or shape.towers.saved is None:
        return None
    if job.images != 1:
        raise PlanError(f"--trace has one image in each sequence; leave out --images-per-row {job.images:g}")
    return example_images(model).batch(rows, job.seq_len, next(model.parameters()).dtype)


def _of_stage(model: nn.Module, shape: ModelShape, plan: Candidate, job: Job, stage: int | None) -> str:
    """Return a table of each size of the first rank of a pipeline stage; traffic is not estimated by kind."""
    count = min(plan.gradient_accumulation_steps, 2 * plan.pp)  # no rank holds more micro-batches in a longer step
    plan = dataclasses.replace(plan, gradient_accumulation_steps=count)
    stage = peak_memory(shape, plan, job).stage if stage is None else stage
    if not 0 <= stage < plan.pp:
        raise PlanError(f"--stage {stage}: {plan.label} has the stages 0 to {plan.pp - 1}")
    rank, rows = stage * plan.data_ranks * plan.tp, plan.micro_batch_size * count
    run = plan.plan
    config = ToDistributedConfig(gather_logits=job.logits == "gathered")
    batch = _images(model, shape, job, rows)
    trace = trace_step(model, run, rows=rows, length=job.seq_len, rank=rank, config=config, batch=batch)
    held = stage_memory(shape, plan, _as_traced(job), stage)
    sizes = [
        (f"bytes of rank {rank}", "estimated", "traced", "ratio"),
        _row("parameters", held.weights, trace.parameters),
        _row("optimizer", held.optimizer, trace.optimizer),
        _row("peak", held.total - held.slack, trace.peak),
    ]
    return (
        f"Traced {plan.label} on {plan.world_size} fake ranks, stage {stage} of {plan.pp}, {count} of its "
        f"micro-batches, {_where(plan)}:\n\n{grid(sizes)}"
    )


def _as_traced(job: Job) -> Job:
    return dataclasses.replace(job, on_cpu=True, plain_attention=False)


def _where(plan: Candidate) -> str:
    host = (
        "" if plan.offload is None else "; it counts also what the host has, which is not in the estimate of a device"
    )
    return f"as on CPU with gloo{host}"


def _row(name: str, estimated: float, traced: float) -> tuple[str, ...]:
    return name, f"{estimated:,.0f}", f"{traced:,.0f}", f"{estimated / traced:.3f}" if traced else "-"


def _traffic_rows(shape: ModelShape, plan: Candidate, trace: Trace, job: Job) -> list[tuple[str, ...]]:
    estimated = step_traffic(shape, plan, job)
    rows: list[tuple[str, ...]] = [("axis", "collective", "", "estimated", "traced")]
    for axis in estimated["forward"]:
        phases = [(estimated[name][axis], trace.traffic[name][axis]) for name in estimated]
        kinds = sorted({kind for ours, theirs in phases for kind in (*ours.counts, *theirs.counts)})
        for kind in kinds:
            counts = [f"{sum(side.counts[kind] for side in sides):,}" for sides in zip(*phases, strict=True)]
            rows.append((axis, kind, "calls", *counts))
        rows.append(
            (axis, "all", "bytes", *(f"{sum(side.bytes for side in sides):,}" for sides in zip(*phases, strict=True)))
        )
    return rows
