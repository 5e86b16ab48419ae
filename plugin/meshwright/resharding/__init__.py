"""Computes which rank holds which part of a tensor, and moves the parts between layouts."""
