"""The Trainer, TRL's trainers and accelerate on a small Qwen3-VL and its processor: four steps, and what they log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import meshwright as mw
from examples.vision_language import COLOURS, PROMPT, SHAPES, Collator, draw, make_model, make_processor
from meshwright_hf.accelerate import prepare
from support import hybrid_models
from support.accelerated import accelerator
from support.preference import columns
from support.trainers import arguments, fresh_accelerate
from support.words import tokenizer

ROWS = 22  # the last batch of an epoch is not full
TAKEN = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "learning_rate")
TAKEN += ("max_grad_norm", "max_steps", "logging_steps", "report_to", "disable_tqdm", "use_cpu")
TAKEN += ("dataloader_pin_memory", "save_strategy", "eval_strategy", "eval_steps", "logging_nan_inf_filter")


def rows(kind: str) -> Any:
    """A dataset of TRL, with an image in each row."""
    from datasets import Dataset

    images, answers = zip(*map(draw, range(ROWS)), strict=True)
    columns: dict[str, list[Any]] = {"images": [[image] for image in images], "prompt": [PROMPT] * ROWS}
    if kind == "dpo":
        others = [f"{COLOURS[i % len(COLOURS)]} {SHAPES[i % 2]}<|im_end|>" for i in range(ROWS)]
        columns |= {"chosen": [f"{answer}<|im_end|>" for answer in answers], "rejected": others}
    else:
        columns["completion"] = [f"{answer}<|im_end|>" for answer in answers]
    return Dataset.from_dict(columns)


def hybrid(seed: int = 0) -> Any:
    """A tiny Qwen3.5 in 32 bits, with attention in every other layer."""
    model = hybrid_models.build("qwen3_5_text").float()
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.data += 0.01 * seed * torch.randn_like(parameter)
    return model


def make(kind: str, folder: Path, plan: dict[str, Any] | None, *, of_text: bool = False, **options: Any) -> Any:
    """A trainer: transformers' own ("trainer") or TRL's ("sft" or "dpo"), stock without a plan.

    With ``of_text``, TRL's trainer has a hybrid model and texts instead of images.
    """
    from datasets import Dataset
    from transformers import Trainer

    from meshwright_hf.trainer import MeshwrightTrainerMixin

    processor: Any = tokenizer() if of_text else make_processor()
    build: Any = hybrid if of_text else lambda seed=0: make_model(processor, seed)
    dp = (plan or {}).get("dp", 1)
    args: Any = arguments(folder, dp, **{"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, **options})
    given: dict[str, Any] = {"processing_class": processor}
    stock: Any = Trainer
    if kind == "trainer":
        given |= {"data_collator": Collator(processor), "train_dataset": range(ROWS), "eval_dataset": range(7)}
        args.label_names = ["labels"]
    else:
        import trl

        stock, config = getattr(trl, f"{kind.upper()}Trainer"), getattr(trl, f"{kind.upper()}Config")
        taken = {name: getattr(args, name) for name in TAKEN}
        args = config(output_dir=str(folder), bf16=False, max_length=None, **taken)
        data = Dataset.from_dict(columns(kind)) if of_text else rows(kind)
        given |= {"train_dataset": data, "eval_dataset": data.select(range(7))}
    if kind == "dpo":
        given["ref_model"] = build(seed=1)
    if plan is None:
        return stock(build(), args=args, **given)
    planned: Any = type(f"Planned{stock.__name__}", (MeshwrightTrainerMixin, stock), {})
    return planned(build(), args=args, **given, meshwright=mw.ParallelPlan(**plan))


def run(kind: str, folder: Path, plan: dict[str, Any] | None, **options: Any) -> list[dict[str, float]]:
    """Return what a trainer logs in four steps and two evaluations."""
    with fresh_accelerate():
        trainer = make(kind, folder, plan, **options)
        trainer.train()
        trainer.save_model()
        return [entry for entry in trainer.state.log_history if "loss" in entry or "eval_loss" in entry]


def run_accelerated(plan: dict[str, Any] | None) -> list[float]:
    """Return the losses and gradient norms of a loop of accelerate, over two epochs of two full batches and a rest."""
    processor = make_processor()
    model: Any = make_model(processor)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    size = 8 // (plan or {}).get("dp", 1)
    loader: Any = DataLoader(range(ROWS), batch_size=size, collate_fn=Collator(processor))
    found = []
    with accelerator() as accelerate:
        objects = (model, optimizer, loader)
        if plan is None:
            model, optimizer, loader = accelerate.prepare(*objects)
        else:
            config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan))
            model, optimizer, loader = prepare(accelerate, *objects, config=config)
        for _ in range(2):
            for batch in loader:
                loss = model(**batch).loss
                accelerate.backward(loss)
                found += [loss.item(), accelerate.clip_grad_norm_(model.parameters(), 0.5).item()]
                optimizer.step()
                optimizer.zero_grad()
    return found
