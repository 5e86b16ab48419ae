"""Replicas: made equal at the start, and compared during training."""
