"""accelerate and the Trainer call ``deepspeed.initialize`` themselves: here they get ours for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import deepspeed
from accelerate.state import AcceleratorState, PartialState
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

from meshwright.config import ParallelPlan, ToDistributedConfig
from meshwright_hf.deepspeed.config import BATCH, STEPS
from meshwright_hf.deepspeed.engine import initialize
from meshwright_hf.deepspeed.export import save_pretrained


@contextlib.contextmanager
def deepspeed_mpu(plan: ParallelPlan, options: ToDistributedConfig | None = None) -> Iterator[None]:
    """Inside, accelerate and the Trainer make their DeepSpeed engine by the plan, and give the ranks of tp equal rows.

    They offer no argument for an ``mpu``; they look ``deepspeed.initialize`` up when they call it, and this takes
    its place until the block ends. Prepare everything inside, loaders too.

    Args:
        plan: as for :func:`initialize`; the sizes of a batch come from accelerate or TrainingArguments.
        options: as for :func:`initialize`.

    Raises:
        PlanError: if ``Accelerator`` is not in DeepSpeed's mode, where the plan would be ignored.

    Example::

        PartialState(cpu=True)  # on CPU, where accelerate drops a DeepSpeed plugin otherwise
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config="ds.json"))
        with deepspeed_mpu(plan):
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    """
