"""Supervised fine-tuning with LoRA (PEFT): answers to prompts, validation, and a run that goes on where it stopped.

torchrun --nproc-per-node 2 -m examples.finetune_lora
python -m examples.finetune_lora --steps 60

The adapters are added before ``to_distributed``, as on one device, and each is sharded like the projection that it
adapts. Only the adapters are trained. The base model is a tiny random Llama, which learns to count: the prompt
"5 6 7 8" has the answer "9 10 11 12".
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
from meshwright_hf.datasets import TokenCollator

WORDS, PROMPT, ROWS = 32, 4, 8
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def base_model() -> PreTrainedModel:
    """Return a tiny Llama, in place of LlamaForCausalLM.from_pretrained(...)."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, initializer_range=0.1, **SIZES, **HEADS))


def dialogues(starts: list[int]) -> list[dict[str, torch.Tensor]]:
    """Prompts with answers of several lengths; a prompt's labels are -100, so that only answers are learned."""
    rows = []
    for start in starts:
        ids = torch.arange(start, start + PROMPT + 4 + start % 5) % WORDS
        rows.append({"input_ids": ids, "labels": torch.where(torch.arange(len(ids)) < PROMPT, -100, ids)})
    return rows


@torch.no_grad()
def evaluate(model: torch.nn.Module, loader: DataLoader) -> float:
    """Return the mean loss of the batches; every rank gets the same number."""
    model.eval()
    losses = [model(**batch).loss for batch in loader]
    model.train()
    return torch.stack(losses).mean().item()


def main(steps: int, folder: Path) -> None:
    model = get_peft_model(base_model(), LoraConfig(r=8, lora_alpha=32, use_rslora=True, target_modules=TARGETS))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    collate = TokenCollator(pad_token_id=0)
    training = [start for start in range(WORDS) if start % 8 != 5]
    shuffled = torch.Generator().manual_seed(0)
    loader = DataLoader(dialogues(training), ROWS, shuffle=True, generator=shuffled, collate_fn=collate)
    held_out = DataLoader(dialogues([5, 13, 21, 29]), ROWS, collate_fn=collate)

    world = int(os.environ.get("WORLD_SIZE", "1"))
    tp = 2 if world % 2 == 0 else 1
    plan = mw.ParallelPlan(tp=tp, dp=world // tp, sequence_parallel=tp > 1, zero_stage=1)
    model, optimizer, loader = mw.to_distributed(model, optimizer, loader, plan=plan)
    _, _, held_out = mw.to_distributed(model, None, held_out)
    saved = mw.load_checkpoint(folder, model, optimizer, loader=loader, missing_ok=True)
    step = 0 if saved is None else saved.step

    is_first = int(os.environ.get("RANK", "0")) == 0
    while step < steps:
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            mw.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0 or step == steps:
                mw.save_checkpoint(folder / f"step-{step}", model, optimizer, loader=loader, step=step, keep=2)
                validation = evaluate(model, held_out)
                if is_first:
                    print(f"step {step}: loss {loss.item():.4f}, validation {validation:.4f}", flush=True)
            if step == steps:
                break

    model.save_pretrained(folder / "adapters")  # the whole adapters, without the base model
    if is_first:
        answer(folder / "adapters", torch.arange(5, 5 + PROMPT))


def answer(adapters: Path, prompt: torch.Tensor) -> None:
    """Load the adapters on one device, as a user of the folder would, and print an answer to a prompt."""
    tuned = PeftModel.from_pretrained(base_model(), adapters).merge_and_unload().eval()
    asked = prompt[None]
    words = tuned.generate(input_ids=asked, attention_mask=torch.ones_like(asked), max_new_tokens=4, do_sample=False)
    print(*prompt.tolist(), "->", *words[0, PROMPT:].tolist(), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="train until this step")
    parser.add_argument("--folder", type=Path, default=Path("runs/finetune_lora"), help="checkpoints and adapters")
    main(**vars(parser.parse_args()))
