"""Which of transformers' causal language models equal one device when sharded: ``python -m benchmarks.families``."""
