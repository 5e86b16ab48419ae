"""DeepSpeed as the engine under Meshwright's tensor and sequence parallelism.

First the plan's tensor and sequence parallelism is applied to the model. DeepSpeed then averages gradients over the
data-parallel axis, shards (ZeRO 1, 2, 3) or offloads, clips, steps and writes checkpoints.

    engine.py           ``initialize``                  hooks.py      for accelerate and the Trainer, which call it
    complete_config.py  DeepSpeed's JSON                universal.py  universal checkpoints
"""

from meshwright_hf.deepspeed.engine import full_state_dict, initialize, save_pretrained
from meshwright_hf.deepspeed.hooks import DeepSpeedTrainerMixin, deepspeed_mpu

__all__ = ["DeepSpeedTrainerMixin", "deepspeed_mpu", "full_state_dict", "initialize", "save_pretrained"]
