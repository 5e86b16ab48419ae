"""Losses: what a model computes becomes the mean over the global batch; logits may be sharded or deferred."""
