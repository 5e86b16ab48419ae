"""Optimizers over shards: ZeRO, the global gradient norm, clipping."""
