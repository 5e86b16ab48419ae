"""Measures the memory and the collectives of a plan by a run with fake tensors."""
