"""Compares random legal training programs under random plans with the same programs on one process."""
