"""One forward call of a distributed model: its state, its micro-batches, and what it refuses or warns about."""
