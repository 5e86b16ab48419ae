"""Pretraining on text files: tokenizer, shards, packed stream, validation, checkpoints. See docs/sft.md."""
