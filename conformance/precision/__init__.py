"""Trains in float8 under plans and on one device, and prints the table of docs/precision.md."""
