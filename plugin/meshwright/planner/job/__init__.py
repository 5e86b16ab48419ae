"""What is trained: the sizes of a model, its adapters and optimizer, and a candidate plan for it."""
