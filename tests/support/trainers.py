"""The same training by the stock Trainer on one process, and by MeshwrightTrainer on several."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from transformers import Trainer, TrainingArguments

import meshwright as mw
from support.exact import Float64
from support.models import build

LENGTH = 12
GLOBAL_BATCH = 4


class Rows(Dataset):
    """Row ``i`` is always the same; each ignores another number of labels, so that a mean of means would be wrong."""

    def __init__(self, count: int, *, has_labels: bool = True):
        self.count, self.has_labels = count, has_labels

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.count:
            raise IndexError(index)  # for those who iterate
        ids = torch.randint(3, 97, (LENGTH,), generator=torch.Generator().manual_seed(index))
        if not self.has_labels:
            return {"input_ids": ids}
        labels = ids.clone()
        labels[: index % 5 * 2] = -100
        return {"input_ids": ids, "labels": labels}


class Stream(IterableDataset):
    """The same rows, which can only be gone through."""

    def __init__(self, count: int):
        self.rows = Rows(count)

    def __iter__(self) -> Any:
        return (self.rows[index] for index in range(len(self.rows)))


@dataclass
class Run:
    """What a Trainer leaves for comparison."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    epochs: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    predictions: np.ndarray | None = None
    label_ids: np.ndarray | None = None
    best: str | None = None
    tokens_seen: int = 0


def arguments(output_dir: Any, dp: int = 1, kind: type = TrainingArguments, **options: Any) -> Any:
    """Batches of GLOBAL_BATCH rows in all, accumulated twice."""
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": GLOBAL_BATCH // dp,
        "per_device_eval_batch_size": GLOBAL_BATCH // dp,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "logging_nan_inf_filter": False,
    }
    return kind(output_dir=str(output_dir), **{**defaults, **options})


@contextlib.contextmanager
def fresh_accelerate() -> Any:
    """accelerate keeps its state for the life of a process; a worker of a pool outlives its process groups."""
    _forget()
    try:
        yield
    finally:
        _forget()


def _forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()


def summarise(predictions: Any) -> dict[str, float]:
    """Metrics that a row too many, a row too few or another order would change."""
    logits, labels = predictions.predictions, predictions.label_ids
    place = np.arange(1, len(labels) + 1)[:, None]
    return {"rows": len(labels), "placed": float((labels * place).sum()), "logits": float(np.abs(logits).mean())}


def run_trainer(
    output_dir: Any,
    plan: dict[str, Any] | None = None,
    *,
    rows: int = 37,
    evaluated: int | None = None,
    predicted: int | None = None,
    resume: str | None = None,
    stream: bool = False,
    model: dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    exact: bool = False,
    **options: Any,
) -> Run:
    """Train; with a plan by MeshwrightTrainer on this rank, else by the stock Trainer; in float64 if ``exact``."""
    with fresh_accelerate(), Float64() if exact else contextlib.nullcontext():
        args = arguments(output_dir, (plan or {}).get("dp", 1), **options)
        data: dict[str, Any] = {"train_dataset": Stream(rows) if stream else Rows(rows)}
        if evaluated is not None:
            data |= {"eval_dataset": Rows(evaluated), "compute_metrics": summarise}
        if exact:
            data["model"] = build("llama", **(model or {})).double()
        trainer = make_trainer(args, plan, model, {**data, **(extra or {})}, config)
        trainer.train(resume_from_checkpoint=resume)
        run = Run(best=trainer.state.best_model_checkpoint, tokens_seen=trainer.state.num_input_tokens_seen)
        for entry in trainer.state.log_history:
            if "loss" in entry:
                run.losses.append(entry["loss"])
                run.norms.append(entry["grad_norm"])
                run.learning_rates.append(entry["learning_rate"])
                run.epochs.append(entry["epoch"])
            if "eval_loss" in entry:
                run.evaluations.append(entry["eval_loss"])
        if evaluated is not None:
            run.metrics = {k: v for k, v in trainer.evaluate().items() if k in _COMPARED}
        if predicted is not None:
            output = trainer.predict(Rows(predicted))
            run.predictions, run.label_ids = output.predictions, output.label_ids
            run.metrics["test_loss"] = output.metrics["test_loss"]
        return run


_COMPARED = ("eval_loss", "eval_rows", "eval_placed", "eval_logits")


def make_trainer(
    args: TrainingArguments,
    plan: dict[str, Any] | None,
    model: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
) -> Trainer:
    made = {"model": build("llama", **(model or {}))} if not {"model", "model_init"} & {*(data or {})} else {}
    if plan is None:
        return Trainer(**made, args=args, **(data or {}))
    from meshwright_hf.trainer import MeshwrightTrainer

    chosen = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan), **(config or {}))
    return MeshwrightTrainer(**made, args=args, meshwright=chosen, **(data or {}))
