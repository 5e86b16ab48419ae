"""Train a tokenizer on text files and write their paragraphs as shards.

python -m examples.pretrain.prepare LICENSE

Every tenth paragraph is held out for validation. Run this once, before training.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"
HELD_OUT_EVERY = 10


def prepare(texts: list[Path], folder: Path, vocab_size: int, shards: int) -> str:
    """Write the tokenizer, ``train-*.jsonl`` and ``validation.jsonl``; return a line that says how much."""
    paragraphs = [part.strip() for text in texts for part in text.read_text(errors="replace").split("\n\n")]
    paragraphs = [part for part in paragraphs if part]
    if len(paragraphs) < 2 * HELD_OUT_EVERY:
        raise SystemExit(f"{len(paragraphs)} paragraphs are too few to train on: name more text files")
    held_out = paragraphs[::HELD_OUT_EVERY]
    training = [part for number, part in enumerate(paragraphs) if number % HELD_OUT_EVERY]
    folder.mkdir(parents=True, exist_ok=True)
    train_tokenizer(training, vocab_size).save_pretrained(folder)
    for number in range(shards):
        write(folder / f"train-{number:03}.jsonl", training[number::shards])
    write(folder / "validation.jsonl", held_out)
    return f"{len(training)} paragraphs in {shards} shards, {len(held_out)} held out"


def train_tokenizer(paragraphs: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer, which can encode any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(paragraphs, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def write(path: Path, paragraphs: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in paragraphs))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", type=Path, nargs="+", help="text files; empty lines separate paragraphs")
    parser.add_argument("--folder", type=Path, default=Path("runs/text"), help="folder to write")
    parser.add_argument("--vocab-size", type=int, default=512)
    parser.add_argument("--shards", type=int, default=4, help="number of files, which are read in parallel")
    print(prepare(**vars(parser.parse_args())))
