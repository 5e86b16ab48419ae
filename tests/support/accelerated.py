"""A script with an Accelerator, under a plan or, stock, in one process with global batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import meshwright as mw
from meshwright_hf.accelerate import prepare
from support.exact import Float64
from support.models import build, labels_for, tokens
from support.reference import make_optimizer

GLOBAL_ROWS, LENGTH, WINDOWS, ACCUMULATION, CLIP = 4, 12, 20, 2, 0.5


@dataclass
class Run:
    """What a run leaves for comparison.

    Args:
        losses: of every micro-batch.
        norms: before clipping, of every optimizer step.
        rates: the learning rate after it.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


@contextlib.contextmanager
def accelerator(**options: Any) -> Iterator[Accelerator]:
    """A fresh Accelerator on the CPU, whose global state is gone afterwards."""
    forget()
    try:
        yield Accelerator(cpu=True, **options)
    finally:
        forget()


def forget() -> None:
    """Accelerate's singletons outlive a job of the worker pool; its process group is the pool's."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def dataset(rows: int) -> list[dict[str, torch.Tensor]]:
    ids = tokens(rows, LENGTH)
    labels = labels_for(ids)
    return [{"input_ids": ids[i], "labels": labels[i]} for i in range(rows)]


def losses_of(accelerate: Accelerator, model: Any, optimizer: Any, loader: Any) -> list[float]:
    """Train on each batch of a loader, and return the losses."""
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerate.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def decay(batch: int) -> float:
    """By batches of the loader that a scheduler has counted: steep, so that a wrong count shows."""
    return 0.98**batch


@dataclass
class Script:
    """The script; the same lines with and without a plan.

    Args:
        plan: None: stock accelerate in one process, which reads global batches.
        dp: of the plan; a scheduler counts so many batches a step.
        options: of the model.
        off_by: is added to its weights.
    """

    accelerator: Accelerator
    plan: dict[str, Any] | None
    dtype: torch.dtype = torch.float64
    dp: int = 1
    windows: int = WINDOWS
    options: dict[str, Any] = field(default_factory=dict)
    off_by: float = 0.0

    def __post_init__(self) -> None:
        model = build("llama", **self.options).to(self.dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(self.off_by)
        optimizer = make_optimizer(model, lr=1e-3)
        scheduler = LambdaLR(optimizer, decay)
        rows = GLOBAL_ROWS // (self.plan or {}).get("dp", 1)
        generator = torch.Generator().manual_seed(5)
        data = dataset(GLOBAL_ROWS * ACCUMULATION * self.windows)
        loader = DataLoader(data, batch_size=rows, shuffle=True, generator=generator)
        objects = (model, optimizer, loader, scheduler)
        if self.plan is None:
            prepared = self.accelerator.prepare(*objects)
        else:
            config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**self.plan))
            prepared = prepare(self.accelerator, *objects, config=config)
        self.model, self.optimizer, self.loader, self.scheduler = prepared

    def train(self, *, save_after: int | None = None, directory: str | None = None) -> Run:
        run = Run()
        for batch in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                run.losses.append(loss.item())
                if self.accelerator.sync_gradients:
                    run.norms.append(self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP).item())
                self.optimizer.step()
                for _ in range(self.dp if self.plan is None else 1):
                    self.scheduler.step()
                self.optimizer.zero_grad()
            if self.accelerator.sync_gradients:
                run.rates.append(self.scheduler.get_last_lr()[0])
            if save_after == len(run.norms) and self.accelerator.sync_gradients:
                self.accelerator.save_state(directory)
        return run


def exact(dtype: torch.dtype) -> contextlib.AbstractContextManager[None]:
    return Float64() if dtype is torch.float64 else contextlib.nullcontext()


def run_script(plan: dict[str, Any] | None, dtype: torch.dtype, dp: int = 1, **train: Any) -> Run:
    """Train from the start."""
    with exact(dtype), accelerator(gradient_accumulation_steps=ACCUMULATION) as accelerate:
        return Script(accelerate, plan, dtype, dp).train(**train)


def resume_script(plan: dict[str, Any], dtype: torch.dtype, directory: str) -> Run:
    """Train on from a saved state, by a script whose own objects are at the start."""
    with exact(dtype), accelerator(gradient_accumulation_steps=ACCUMULATION) as accelerate:
        script = Script(accelerate, plan, dtype, off_by=1.0)  # whatever is not loaded shows
        accelerate.load_state(directory)
        return script.train()
