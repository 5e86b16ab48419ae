"""The plans that are legal, and the fastest of those that fit."""
