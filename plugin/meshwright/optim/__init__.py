"""Optimizers over shards: ZeRO, the global gradient norm and gradient clipping."""
