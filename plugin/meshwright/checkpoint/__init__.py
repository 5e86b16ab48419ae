"""Getting whole tensors out of a distributed model."""
