"""Passes without values, and the sizes that they show of a model."""
