"""An accelerate script that trains, evaluates, saves and resumes under a plan.

torchrun --nproc-per-node 4 -m examples.accelerate_train --tp 2 --dp 2 --state state
torchrun --nproc-per-node 2 -m examples.accelerate_train --dp 2 --state state --resume  # under another plan
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import meshwright as mw
import meshwright_hf.accelerate

WORDS, LENGTH = 32, 16


def counting(rows: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Return rows that count up from a random word, so that a model soon predicts the next one."""
    starts = torch.randint(WORDS, (rows,), generator=torch.Generator().manual_seed(seed))
    ids = (starts[:, None] + torch.arange(LENGTH)) % WORDS
    return [{"input_ids": row, "labels": row} for row in ids]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--state", help="folder to save to after the last epoch")
    parser.add_argument("--resume", action="store_true", help="resume from the folder of --state")
    options = parser.parse_args(arguments)

    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = LinearLR(optimizer, end_factor=0.1, total_iters=200)
    loader = DataLoader(counting(256, seed=1), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(2))
    test_loader = DataLoader(counting(30, seed=3), batch_size=8)

    plan = mw.ParallelPlan(tp=options.tp, dp=options.dp, sequence_parallel=options.tp > 1)
    model, optimizer, scheduler, loader, test_loader = meshwright_hf.accelerate.prepare(
        accelerator, model, optimizer, scheduler, loader, test_loader, config=mw.ToDistributedConfig(plan=plan)
    )

    if options.resume:
        accelerator.load_state(options.state)
    for epoch in range(2):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

        model.eval()
        right = []
        for batch in test_loader:
            with torch.no_grad():
                guesses = model(input_ids=batch["input_ids"]).logits[:, -2].argmax(-1)
            right.append(accelerator.gather_for_metrics(guesses == batch["input_ids"][:, -1]))
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}, {int(torch.cat(right).sum())} of 30 rows right")

    if options.state:
        accelerator.save_state(options.state)
    accelerator.end_training()


if __name__ == "__main__":
    main()
