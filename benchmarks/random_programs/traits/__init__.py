"""All traits; importing this package registers them."""

from benchmarks.random_programs.traits import batches, forwards, loops, losses, models, optimizers, shapes, weights

__all__ = ["batches", "forwards", "loops", "losses", "models", "optimizers", "shapes", "weights"]
