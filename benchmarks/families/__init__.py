"""Which of transformers' causal language models equal one device when sharded. Run ``python -m benchmarks.families``."""
