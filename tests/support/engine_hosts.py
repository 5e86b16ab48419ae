"""DeepSpeed engines that accelerate and the Trainer make; every function runs on all ranks of a pool."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import meshwright as mw
from meshwright_hf.deepspeed import DeepSpeedTrainerMixin, deepspeed_mpu, full_state_dict, save_pretrained
from support.engines import LR, STEPS, TRAITS, config_for, own_world
from support.models import build
from support.reference import ACCUMULATION, ROWS, dataset, make_optimizer


@contextlib.contextmanager
def fresh_accelerate() -> Iterator[None]:
    """Take accelerate's singletons and environment variables away again, for the next job of the pool."""
    before = dict(os.environ)
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        unset_hf_deepspeed_config()
        os.environ.clear()
        os.environ.update(before)


@own_world
@fresh_accelerate()
def run_accelerate(plan: dict[str, Any], stage: int, folder: str) -> dict[str, Any]:
    """A script for accelerate with the batch of each process; the plan is the one thing added."""
    PartialState(cpu=True)
    config = {**config_for(stage, plan["dp"]), "train_micro_batch_size_per_gpu": "auto"}
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), gradient_accumulation_steps=ACCUMULATION
    )
    model = build("qwen3", **TRAITS)
    loader = DataLoader(dataset(STEPS * ACCUMULATION), batch_size=ROWS // plan["dp"])
    stock = deepspeed.initialize
    with deepspeed_mpu(mw.ParallelPlan(**plan)):
        model, optimizer, loader = accelerator.prepare(model, make_optimizer(model, lr=LR), loader)
    losses, norms = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if accelerator.sync_gradients:
                norms.append(float(model.get_global_grad_norm()))
    save_pretrained(model, folder)
    return {"curve": (losses, norms), "weights": full_state_dict(model), "is restored": deepspeed.initialize is stock}


class PlannedTrainer(DeepSpeedTrainerMixin, Trainer):
    """Batches in the order of the dataset, as the reference has them."""

    def _get_train_sampler(self, *_: Any) -> torch.utils.data.Sampler[int]:
        return torch.utils.data.SequentialSampler(self.train_dataset)


@own_world
@fresh_accelerate()
def run_trainer(plan: dict[str, Any], stage: int, folder: str, resume: str | None = None) -> dict[str, Any]:
    """A script for the Trainer with ``deepspeed=`` in its arguments."""
    model = build("qwen3", **TRAITS)
    config = config_for(stage, plan["dp"])
    config |= dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    config |= {"gradient_clipping": "auto", "train_batch_size": "auto"}
    args = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=ROWS // plan["dp"],
        per_device_eval_batch_size=ROWS // plan["dp"],
        gradient_accumulation_steps=ACCUMULATION,
        max_steps=STEPS,
        max_grad_norm=0.5,
        learning_rate=LR,
        weight_decay=0.1,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_steps=STEPS // 2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        deepspeed=config,
    )
    data = dataset(STEPS * ACCUMULATION)
    trainer = PlannedTrainer(model, args, train_dataset=data, eval_dataset=data[:8], plan=mw.ParallelPlan(**plan))
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return {
        "curve": ([entry["loss"] for entry in steps], [entry["grad_norm"] for entry in steps]),
        "evaluated": trainer.evaluate()["eval_loss"],
        "weights": full_state_dict(trainer.deepspeed),
    }


def run_like_trainer() -> tuple[list[float], list[float], float]:
    """What the Trainer does, in one process: a step's loss is one mean over all its tokens."""
    model = build("qwen3", **TRAITS)
    optimizer = make_optimizer(model, lr=LR)
    data = dataset(STEPS * ACCUMULATION)
    batches = list(DataLoader(data, batch_size=ROWS))
    losses, norms = [], []
    for step in range(STEPS):
        window = batches[step * ACCUMULATION : (step + 1) * ACCUMULATION]
        items = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in window)
        parts = [model(**batch, num_items_in_batch=items).loss for batch in window]
        for part in parts:
            part.backward()
        losses.append(sum(part.item() for part in parts))
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        evaluated = [model(**batch).loss.item() for batch in DataLoader(data[:8], batch_size=ROWS)]
    return losses, norms, sum(evaluated) / len(evaluated)
