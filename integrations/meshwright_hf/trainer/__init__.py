"""transformers' Trainer under a plan: the same arguments and numbers, with a sharded model.

trainer.py       MeshwrightTrainer: what it overrides         data.py        its loaders
checkpoints.py   saves and loads a checkpoint-N folder        folders.py     its folders, and the parts of one
checks.py        arguments that a plan cannot serve           evaluation.py  the evaluation loss
accelerator.py   the Accelerator that the Trainer is given    control.py     what follows a step, on all ranks alike
trl_trainers.py  TRL's trainers
"""

from meshwright_hf.trainer.trainer import MeshwrightTrainer, MeshwrightTrainerMixin

__all__ = ["MeshwrightTrainer", "MeshwrightTrainerMixin"]
