"""Fine-tune LoRA adapters (PEFT) of a model that is sharded over two processes.

torchrun --nproc-per-node 2 -m examples.finetune_lora

The adapters are added before ``to_distributed``, as on one device, and each is sharded like the projection that it
adapts. Only the adapters are trained and saved. The base model is a tiny random Llama, which learns to count.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import meshwright as mw

WORDS, LENGTH, ROWS = 32, 16, 8
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def base_model() -> PreTrainedModel:
    """Return a tiny Llama, in place of LlamaForCausalLM.from_pretrained(...)."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, initializer_range=0.1, **SIZES, **HEADS))


def rows() -> list[dict[str, torch.Tensor]]:
    counts = [torch.arange(start, start + LENGTH) % WORDS for start in range(WORDS)]
    return [{"input_ids": count, "labels": count} for count in counts]


def main(steps: int, folder: Path) -> None:
    model = get_peft_model(base_model(), LoraConfig(r=8, lora_alpha=32, use_rslora=True, target_modules=TARGETS))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    loader = DataLoader(rows(), batch_size=ROWS)

    world = int(os.environ.get("WORLD_SIZE", "1"))
    tp = 2 if world % 2 == 0 else 1
    plan = mw.ParallelPlan(tp=tp, dp=world // tp, sequence_parallel=tp > 1, zero_stage=1)
    model, optimizer, loader = mw.to_distributed(model, optimizer, loader, config=mw.ToDistributedConfig(plan=plan))
    is_first = int(os.environ.get("RANK", "0")) == 0
    step = 0
    while step < steps:
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            mw.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if is_first and step % 10 == 0:
                print(f"step {step}: loss {loss.item():.4f}", flush=True)

    model.save_pretrained(folder)
    if is_first:  # load the adapters on one device, as a user of the folder would
        tuned = PeftModel.from_pretrained(base_model(), folder).merge_and_unload()
        with torch.no_grad():
            word = tuned(input_ids=torch.arange(5, 11)[None]).logits[0, -1].argmax()
        print(f"5 6 7 8 9 10 -> {word.item()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", type=Path, default=Path("runs/finetune_lora"), help="folder for the adapters")
    main(**vars(parser.parse_args()))
