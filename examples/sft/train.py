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
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import get_last_checkpoint

from meshwright_hf.trl import SFTConfig, SFTTrainer  # was: from trl import SFTConfig, SFTTrainer


def main(folder: Path, output: Path, steps: int, rows: int) -> None:
    """Train for this many steps in all, and save the model and its tokenizer."""
    args = SFTConfig(
        output_dir=str(output),
        max_steps=steps,
        per_device_train_batch_size=rows,  # of one data-parallel rank
        per_device_eval_batch_size=5,
        learning_rate=5e-3,
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
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "base"),
        processing_class=AutoTokenizer.from_pretrained(folder / "base"),
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["test"],
    )
    trainer.remove_callback(PrinterCallback)  # prints every figure of every step
    trainer.train(resume_from_checkpoint=get_last_checkpoint(output) if output.exists() else None)
    trainer.save_model(str(output / "model"))
    if trainer.is_world_process_zero():
        print(curve(trainer.state.log_history))


def curve(history: list[dict[str, float]]) -> str:
    """Return a line for each evaluation: the loss of the training step and that of the held-out conversations."""
    losses = {row["step"]: row["loss"] for row in history if "loss" in row}
    held_out = {row["step"]: row["eval_loss"] for row in history if "eval_loss" in row}
    return "\n".join(f"step {step}: loss {losses[step]:.4f}, held out {held_out[step]:.4f}" for step in held_out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/sft"), help="what examples.sft.prepare has written")
    parser.add_argument("--output", type=Path, default=Path("runs/sft/out"), help="checkpoints and the model")
    parser.add_argument("--steps", type=int, default=120, help="training steps in all")
    parser.add_argument("--rows", type=int, default=12, help="rows per step of a data-parallel rank: 12 divided by dp")
    options = parser.parse_args()
    main(options.folder, options.output, options.steps, options.rows)
