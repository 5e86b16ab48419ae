"""transformers' Trainer under a plan: the same arguments and numbers, with a sharded model."""

from meshwright_hf.trainer.trainer import MeshwrightTrainer, MeshwrightTrainerMixin

__all__ = ["MeshwrightTrainer", "MeshwrightTrainerMixin"]
