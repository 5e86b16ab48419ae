"""TRL's trainers, stock on one process or by a plan on several: four steps, and what they log."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForSequenceClassification, Qwen3MoeConfig, Qwen3MoeForCausalLM

import meshwright as mw
from support.models import SIZES, build
from support.trainers import arguments, fresh_accelerate
from support.words import texts, tokenizer

TAKEN = ("per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "max_grad_norm", "max_steps")
TAKEN += ("logging_steps", "report_to", "disable_tqdm", "use_cpu", "dataloader_pin_memory", "save_strategy")


def columns(kind: str) -> dict[str, list[Any]]:
    lines = texts(72)
    prompts, chosen, rejected = lines[:24], lines[24:48], lines[48:]
    if kind == "sft":
        return {"text": lines[:24]}
    if kind == "dpo":
        return {"prompt": prompts, "chosen": chosen, "rejected": rejected}
    if kind == "reward":
        return {"chosen": chosen, "rejected": rejected}
    if kind == "kto":
        return {"prompt": prompts, "completion": chosen, "label": [index % 3 > 0 for index in range(24)]}
    return {"prompt": prompts}


def scorer() -> Any:
    torch.manual_seed(0)
    return LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=1)).train()


def routed(**experts: Any) -> Any:
    torch.manual_seed(0)
    sizes = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 4}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**sizes, **experts})).train()


def classes(kind: str) -> tuple[type, type]:
    import trl

    name = {"grpo": "GRPO", "rloo": "RLOO", "reward": "Reward"}.get(kind, kind.upper())
    return getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")


def make(
    kind: str,
    output_dir: Path,
    plan: dict[str, Any] | None,
    folder: Path | None = None,
    evaluated: int | None = None,
    experts: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A trainer of TRL, of a dataset in a folder or in memory, which evaluates some rows; options are its config's.

    With ``experts``, fields of a config, the model has experts.
    """
    from datasets import Dataset, load_from_disk

    import meshwright_hf.trl

    trainer_class, config_class = classes(kind)
    ready_made = getattr(meshwright_hf.trl, trainer_class.__name__)
    planned_class = type(f"Planned{trainer_class.__name__}", (ready_made,), {})
    defaults = arguments(output_dir, (plan or {}).get("dp", 1), max_steps=4)
    shared = {name: getattr(defaults, name) for name in TAKEN}
    args = config_class(output_dir=str(output_dir), bf16=False, **{**shared, **options})
    data = load_from_disk(str(folder)) if folder else Dataset.from_dict(columns(kind))
    given: dict[str, Any] = {"args": args, "train_dataset": data}
    given["processing_class"] = tokenizer()
    if evaluated is not None:
        given["eval_dataset"] = data.select(range(evaluated))
    if kind in ("dpo", "kto"):
        given["ref_model"] = build("llama", seed=1)
    if kind in ("grpo", "rloo"):
        given["reward_funcs"] = _reward
    model = scorer() if kind == "reward" else build("llama") if experts is None else routed(**experts)
    if kind in ("grpo", "rloo"):
        object.__setattr__(model, "generate", functools.partial(_completed, Counter()))
    if plan is None:
        return trainer_class(model, **given)
    return planned_class(model, **given, meshwright=mw.ParallelPlan(**plan) if plan else None)


def run(kind: str, output_dir: Path, plan: dict[str, Any] | None, **options: Any) -> list[dict[str, float]]:
    with fresh_accelerate():
        trainer = make(kind, output_dir, plan, **options)
        trainer.train()
        return [entry for entry in trainer.state.log_history if "loss" in entry]


def _completed(drawn: Counter[str], input_ids: Tensor, **_: Any) -> Tensor:
    """Five words after each prompt, other ones each second time: the same on any number of ranks."""
    rows = []
    for row in input_ids:
        prompt = str(row[row != 0].tolist())
        drawn[prompt] += 1
        seed = torch.Generator().manual_seed(2 * sum(map(ord, prompt)) + drawn[prompt] % 2)
        rows.append(torch.randint(3, 97, (5,), generator=seed))
    return torch.cat([input_ids, torch.stack(rows)], 1)


def _reward(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, text)) % 7) for text in completions]


def evaluate(kind: str, output_dir: Path, plan: dict[str, Any] | None, **options: Any) -> dict[str, float]:
    with fresh_accelerate():
        rows = 4 // (plan or {}).get("dp", 1)
        return make(kind, output_dir, plan, evaluated=7, per_device_eval_batch_size=rows, **options).evaluate()
