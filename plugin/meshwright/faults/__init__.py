"""Raises an error on every rank when one rank fails or the ranks differ, and reports the first cause."""
