"""Fine-tune a chat model on conversations with TRL's SFTTrainer, under any plan, and go on where a run stopped.

    meshwright launch --tp 2 --sequence-parallel -m examples.sft.train
    meshwright launch --dp 2 --zero-stage 2 -m examples.sft.train --rows 6
    python -m examples.sft.train --folder runs/sft --output runs/one

Only what the assistant says is learned. The losses are those of one process.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

from meshwright_hf.trainer import MeshwrightTrainerMixin


class PlannedSFTTrainer(MeshwrightTrainerMixin, SFTTrainer): ...


def main(folder: Path, output: Path, steps: int, rows: int) -> None:
    """Train for this many steps in all, and save the model and its tokenizer."""
    args = SFTConfig(
        output_dir=str(output),
        max_steps=steps,
        per_device_train_batch_size=rows,  # of one data-parallel rank
        per_device_eval_batch_size=5,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        assistant_only_loss=True,
        logging_steps=20,
        eval_strategy="steps",
        eval_steps=20,
        save_steps=20,
        save_total_limit=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
    )
    files = {"train": str(folder / "train.jsonl"), "test": str(folder / "held_out.jsonl")}
    data = load_dataset("json", data_files=files)
    trainer = PlannedSFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "base"),
        processing_class=AutoTokenizer.from_pretrained(folder / "base"),
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["test"],
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(output) if output.exists() else None)
    trainer.save_model(str(output / "model"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/sft"), help="what examples.sft.prepare has written")
    parser.add_argument("--output", type=Path, default=Path("runs/sft/out"), help="checkpoints and the model")
    parser.add_argument("--steps", type=int, default=60, help="training steps in all")
    parser.add_argument("--rows", type=int, default=12, help="rows per step of a data-parallel rank: 12 divided by dp")
    options = parser.parse_args()
    main(options.folder, options.output, options.steps, options.rows)
