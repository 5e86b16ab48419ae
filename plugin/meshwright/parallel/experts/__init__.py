"""Experts: their ways of tokens, slices, counts, and the load-balancing loss."""
