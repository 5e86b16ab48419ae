"""Chooses a parallel plan before anything runs: shapes, hardware, memory, time, search. No torch, no GPU needed."""
