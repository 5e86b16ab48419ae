"""Proves and times everything on a GPU, in one command: ``python -m conformance.gpu``."""
