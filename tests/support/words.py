"""A tokenizer and texts that need no download; its words are those of the tiny models."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = [f"w{number}" for number in range(94)]


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{word: 3 + index for index, word in enumerate(WORDS)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def texts(count: int) -> list[str]:
    """Sentences of 3 to 13 words."""
    drawn = torch.Generator().manual_seed(3)
    lengths = torch.randint(3, 14, (count,), generator=drawn).tolist()
    rows = [torch.randint(len(WORDS), (length,), generator=drawn).tolist() for length in lengths]
    return [" ".join(WORDS[index] for index in row) for row in rows]


def write_text(path: Path, *, lines: int) -> None:
    path.write_text("\n".join(texts(lines)) + "\n", encoding="utf-8")
