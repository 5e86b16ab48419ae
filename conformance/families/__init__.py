"""Check which of transformers' causal LMs, when sharded, equal one device: ``python -m conformance.families``."""
