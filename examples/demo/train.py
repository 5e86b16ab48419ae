"""One process of the distributed run, started as torchrun starts it.

Except for ``to_distributed``, ``mw.clip_grad_norm_`` and ``mw.save_checkpoint``, this is a one-device training script.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from rich.console import Console
from safetensors.torch import save_file
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

import meshwright as mw
from examples.demo.progress import StepProgress
from examples.demo.recipe import batches, build, optimizer_bytes, tensor_bytes
from examples.demo.results import TrainResult
from examples.demo.settings import Settings


def train(settings: Settings) -> None:
    """Train, save the whole gradients of the first steps for the proof, a checkpoint and the result."""
    rank, device = int(os.environ["RANK"]), local_device(settings)
    plan = None if settings.plan is None else mw.ParallelPlan(**settings.plan)
    model, optimizer, scheduler, loader = build(settings, device)
    model, optimizer, loader = mw.to_distributed(model, optimizer, loader, config=mw.ToDistributedConfig(plan=plan))
    if rank == 0:
        Console().print(mw.plan_of(model).dims.rank_grid(), highlight=False)

    losses, seconds = [], []
    with StepProgress(settings.steps, is_shown=rank == 0) as progress:
        for step, batch in enumerate(batches(loader, settings.steps)):
            start = time.perf_counter()
            loss = model(**batch).loss
            loss.backward()
            if step < settings.proof_steps:
                save_gradients(model, settings.gradient_file(step))
            mw.clip_grad_norm_(model, settings.max_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

            losses.append(loss.item())
            seconds.append(time.perf_counter() - start)
            progress.update(
                loss=losses[-1],
                tokens_per_s=settings.tokens_per_step / seconds[-1],
                memory=every_rank(memory_in_use(device)),
            )

    mw.save_checkpoint(settings.checkpoint, model, optimizer, loader=loader, scheduler=scheduler, step=settings.steps)
    # The first steps also save gradients, so their times are left out.
    step_time = statistics.median(seconds[settings.proof_steps :] or seconds)
    result = TrainResult(
        plan=dataclasses.asdict(mw.plan_of(model)),
        losses=losses,
        tokens_per_s=settings.tokens_per_step / step_time,
        param_bytes_per_rank=max(every_rank(tensor_bytes(model.parameters()))),
        optimizer_bytes_per_rank=max(every_rank(optimizer_bytes(optimizer))),
    )
    if rank == 0:
        result.save(settings)


def local_device(settings: Settings) -> torch.device:
    """Return the CPU, or this process's own GPU."""
    if settings.device == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def save_gradients(model: torch.nn.Module, path: Path) -> None:
    """Write the one-device gradients from rank 0; every rank must make the call."""
    gradients = mw.full_gradients(model)
    if gradients:
        save_file(gradients, path)


def memory_in_use(device: torch.device) -> int:
    """Return the GPU allocator's peak bytes, or this process's resident bytes on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return psutil.Process().memory_info().rss


def every_rank(value: int) -> list[int]:
    """Return the values of all ranks, on every rank."""
    if not dist.is_initialized():
        return [value]
    values = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    values[dist.get_rank()] = value
    dist.all_reduce(values)
    return values.tolist()


def main() -> None:
    """Run ``-m examples.demo.train SETTINGS_FILE``."""
    try:
        train(Settings.load(sys.argv[1]))
    except mw.PlanError as error:
        # All ranks raise this error; the launcher reads it from one rank and shows it once.
        get_error_handler().record_exception(error)
        sys.exit(2)


if __name__ == "__main__":
    main()
