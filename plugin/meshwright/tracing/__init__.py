"""Measures what a plan holds and sends, by a run with fake tensors."""
