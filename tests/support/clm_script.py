"""A script built as transformers' run_clm.py is; one name says whose Trainer it uses."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    is_torch_xla_available,
    set_seed,
)
from transformers.testing_utils import CaptureLogger
from transformers.utils.logging import get_logger


@dataclass
class ModelArguments:
    model_name_or_path: str = field(metadata={"help": "a folder with a model and its tokenizer"})


@dataclass
class DataTrainingArguments:
    train_file: str = field(metadata={"help": "a text file"})
    validation_file: str | None = None
    block_size: int = 16


def main(argv: list[str], trainer_class: type[Trainer] = Trainer) -> Trainer:
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))  # type: ignore[arg-type]
    model_args, data_args, training_args = parser.parse_args_into_dataclasses(argv)
    set_seed(training_args.seed)

    files = {"train": data_args.train_file, "validation": data_args.validation_file or data_args.train_file}
    raw = load_dataset("text", data_files=files, cache_dir=training_args.output_dir)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)

    def group_texts(examples: dict[str, Any]) -> dict[str, Any]:
        with CaptureLogger(get_logger("transformers.tokenization_utils_base")):
            ids = list(chain(*tokenizer(examples["text"])["input_ids"]))
        blocks = range(0, len(ids) // data_args.block_size * data_args.block_size, data_args.block_size)
        rows = [ids[start : start + data_args.block_size] for start in blocks]
        return {"input_ids": rows, "labels": [row.copy() for row in rows]}

    with training_args.main_process_first(desc="grouping texts together"):
        blocks = raw.map(group_texts, batched=True, remove_columns=["text"])

    def preprocess_logits_for_metrics(logits: Any, labels: Any) -> Any:
        return logits.argmax(dim=-1)

    def compute_metrics(predictions: Any) -> dict[str, float]:
        hits = predictions.predictions[:, :-1] == predictions.label_ids[:, 1:]
        return {"accuracy": float(hits.mean()), "blocks": len(hits)}

    trainer = trainer_class(
        model=model,
        args=training_args,
        train_dataset=blocks["train"] if training_args.do_train else None,
        eval_dataset=blocks["validation"] if training_args.do_eval else None,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=None if is_torch_xla_available() else compute_metrics,
        preprocess_logits_for_metrics=None if is_torch_xla_available() else preprocess_logits_for_metrics,
    )
    if training_args.do_train:
        result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        trainer.log_metrics("train", result.metrics)
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        trainer.save_metrics("eval", metrics)
    return trainer


if __name__ == "__main__":
    main(sys.argv[1:])
