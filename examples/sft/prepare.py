"""Write what supervised fine-tuning begins with: a base model with a tokenizer, and conversations.

    python -m examples.sft.prepare

In place of a download, the base model is a tiny random Llama. Its tokenizer has one token per word, and a chat template
that marks what the assistant says. The conversations ask to count on: "3 4 5 6" has the answer "7 8 9".
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NUMBERS = 40
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|> "
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }} <|end|> {% endgeneration %}"
    "{% else %}{{ message.content }} <|end|> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each number and word, and a chat template."""
    special = ["<|pad|>", "<|unknown|>", "<|end|>", "<|user|>", "<|assistant|>"]
    words = [*special, "Count", "on:", *map(str, range(NUMBERS))]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    roles = {"pad_token": "<|pad|>", "unk_token": "<|unknown|>", "eos_token": "<|end|>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **roles)


def conversation(start: int, asked: int) -> dict[str, list[dict[str, str]]]:
    """Return a question with this many numbers, and an answer of three."""
    numbers = [str(n % NUMBERS) for n in range(start, start + asked + 3)]
    user = {"role": "user", "content": f"Count on: {' '.join(numbers[:asked])}"}
    return {"messages": [user, {"role": "assistant", "content": " ".join(numbers[asked:])}]}


def main(folder: Path) -> None:
    """Write ``base/``, ``train.jsonl`` and ``held_out.jsonl`` into a folder."""
    torch.manual_seed(0)
    tokenizer = chat_tokenizer()
    tokens = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.05, **SIZES, **HEADS, **tokens)
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    conversations = [conversation(start, asked) for start in range(NUMBERS) for asked in (2, 3, 4)]
    held_out = conversations[::12]
    rest = [each for each in conversations if each not in held_out]
    for name, rows in (("train", rest), ("held_out", held_out)):
        lines = [json.dumps(row) for row in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        print(f"{len(lines)} conversations in {folder / name}.jsonl")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/sft"), help="where the files are written")
    main(parser.parse_args().folder)
