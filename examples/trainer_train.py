"""A script that runs transformers' Trainer under a plan.

    torchrun --nproc-per-node 2 -m examples.trainer_train --tp 2
    torchrun --nproc-per-node 2 -m examples.trainer_train --dp 2 --zero-stage 1 --output-dir out --resume

Only the import of the Trainer has to change. Under every plan, the losses equal those of one process. Without sizes,
the planner picks a plan.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import meshwright as mw
from meshwright_hf.callback import MeshwrightCallback
from meshwright_hf.trainer import MeshwrightTrainer  # was: from transformers import Trainer

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
)


class Counting(torch.utils.data.Dataset):
    """Rows that count up from a random number: easy to learn, without a download."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = torch.randint(256, (), generator=torch.Generator().manual_seed(index))
        row = (start + torch.arange(32)) % 256
        return {"input_ids": row, "labels": row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--zero-stage", type=int, default=0)
    parser.add_argument("--output-dir", default="out")
    parser.add_argument("--resume", action="store_true", help="resume from the last checkpoint, saved under any plan")
    options = parser.parse_args()
    sizes = {"dp": options.dp, "tp": options.tp, "zero_stage": options.zero_stage}
    plan = mw.ParallelPlan(**sizes, sequence_parallel=options.tp > 1)
    args = TrainingArguments(
        output_dir=options.output_dir,
        per_device_train_batch_size=8 // options.dp,  # rows per data-parallel rank, as with Trainer
        max_steps=8,
        logging_steps=2,
        save_steps=4,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    trainer = MeshwrightTrainer(
        model=LlamaForCausalLM(CONFIG),
        args=args,
        train_dataset=Counting(),
        eval_dataset=Counting(),
        callbacks=[MeshwrightCallback(check_every=4)],
        meshwright=plan if plan.world_size > 1 else None,
    )
    trainer.train(resume_from_checkpoint=options.resume or None)
    print({name: value for name, value in trainer.evaluate().items() if name == "eval_loss"}, flush=True)
    trainer.save_model()  # one-device weights, for from_pretrained anywhere


if __name__ == "__main__":
    main()
