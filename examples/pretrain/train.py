"""Pretrain on the shards that ``prepare`` wrote; stop it in any way, run it again under any plan, and it goes on.

meshwright launch --plan tp2+sp -m examples.pretrain.train
python -m examples.pretrain.train --steps 80
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
import torch
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase
from transformers import get_constant_schedule_with_warmup as warm_up

import meshwright as mw
from meshwright.data.packing import Packing
from meshwright_hf.datasets import pack_dataset

ROWS = 8  # rows per step, under every plan
LENGTH = 64
SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def packed(data: Path, pattern: str, tokenizer: PreTrainedTokenizerBase, *, streaming: bool) -> Any:
    """Return the files' documents, each with an end token, packed into rows of one length."""

    def tokenise(row: dict[str, str]) -> dict[str, list[int]]:
        return {"input_ids": [*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id]}

    files = [str(path) for path in sorted(data.glob(pattern))]
    documents = datasets.load_dataset("json", data_files=files, split="train", streaming=streaming)
    return pack_dataset(documents.map(tokenise, remove_columns=["text"]), Packing(length=LENGTH, multiple_of=8))


@torch.no_grad()
def evaluate(model: torch.nn.Module, loader: Iterable[Any]) -> float:
    """Return the mean loss of the batches; every rank gets the same number."""
    model.eval()
    losses = [model(**batch).loss for batch in loader]
    model.train()
    return torch.stack(losses).mean().item()


def main(data: Path, folder: Path, steps: int, every: int) -> None:
    datasets.disable_progress_bars()
    is_first = int(os.environ.get("RANK", "0")) == 0
    tokenizer = AutoTokenizer.from_pretrained(data)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **SIZES, **HEADS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95))
    scheduler = warm_up(optimizer, num_warmup_steps=10)
    loader = DataLoader(packed(data, "train-*.jsonl", tokenizer, streaming=True), batch_size=ROWS)
    held_out = DataLoader(packed(data, "validation.jsonl", tokenizer, streaming=False), batch_size=ROWS)

    config = mw.ToDistributedConfig(  # the plan is the launcher's, or else the planner picks one for such a batch
        input_spec={"input_ids": ((ROWS, LENGTH), torch.int64)},
        loader=mw.LoaderOptions(shuffle=True, buffer_size=256, seed=0),
    )
    model, optimizer, loader = mw.to_distributed(model, optimizer, loader, config=config)
    _, _, held_out = mw.to_distributed(model, None, held_out)
    state = {"loader": loader, "scheduler": scheduler}
    saved = mw.load_checkpoint(folder, model, optimizer, **state, missing_ok=True)
    step = 0 if saved is None else saved.step
    if is_first and step:
        print(f"goes on after step {step}", flush=True)

    while step < steps:
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            mw.clip_grad_norm_(model, 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if step % every == 0 or step == steps:
                mw.save_checkpoint(folder / f"step-{step}", model, optimizer, **state, step=step, keep=2)
                validation = evaluate(model, held_out)
                if is_first:
                    print(f"step {step}: loss {loss.item():.4f}, validation {validation:.4f}", flush=True)
            if step == steps:
                break

    model.save_pretrained(folder / "model")  # one-device files, for from_pretrained
    if is_first:
        tokenizer.save_pretrained(folder / "model")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="train until this step")
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--data", type=Path, default=Path("runs/text"), help="what prepare wrote")
    parser.add_argument("--folder", type=Path, default=Path("runs/pretrain"), help="checkpoints and the model")
    main(**vars(parser.parse_args()))
