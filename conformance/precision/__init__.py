"""Trains in float8 and bfloat16 under plans and on one device, and prints the tables of evidence/precision.md."""
