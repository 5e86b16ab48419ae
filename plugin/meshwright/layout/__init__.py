"""Which elements of a tensor each rank of a mesh holds."""
