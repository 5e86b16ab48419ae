"""Replaces ``deepspeed.initialize`` temporarily, for accelerate and the Trainer, which call it themselves."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

from meshwright.distribute.check_arguments import check_launch
from meshwright.errors import PlanError
from meshwright.plan.config import ParallelPlan, ToDistributedConfig
from meshwright_hf.deepspeed.complete_config import BATCH, STEPS, read_config
from meshwright_hf.deepspeed.engine import device_of_engine, initialize, save_pretrained
from meshwright_hf.trainer.checks import StockTrainer


@contextlib.contextmanager
def deepspeed_mpu(plan: ParallelPlan, options: ToDistributedConfig | None = None) -> Iterator[None]:
    """Make accelerate and the Trainer build their engine by the plan, with equal rows on the ranks of tp.

    accelerate and the Trainer have no argument for an ``mpu``, but call ``deepspeed.initialize`` through the module, so
    Meshwright's ``initialize`` replaces it until the block ends. Prepare all objects inside the block, including
    loaders.

    Args:
        plan: the plan, as for :func:`initialize`; accelerate or TrainingArguments set the sizes of a batch.
        options: the options, as for :func:`initialize`.

    Raises:
        PlanError: if there is no Accelerator yet, or if it does not use DeepSpeed and would ignore the plan. On CPU, an
            Accelerator uses DeepSpeed only if ``PartialState(cpu=True)`` was called first.

    Example::

        PartialState(cpu=True)  # on CPU only, where an Accelerator drops the plugin otherwise
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config="ds.json"))
        with deepspeed_mpu(plan):
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    """
    state = AcceleratorState._shared_state
    kind = state.get("distributed_type")
    if kind != DistributedType.DEEPSPEED:
        raise PlanError(
            f"deepspeed_mpu needs an Accelerator (or a Trainer) that uses DeepSpeed, but there is "
            f"{'none yet' if kind is None else 'one of the type ' + str(kind)}; make it before, with a DeepSpeedPlugin "
            "(or TrainingArguments(deepspeed=...)). On CPU, call PartialState(cpu=True) first and leave "
            "Accelerator(cpu=...) out"
        )
    check_launch(plan)
    meshes = {"ds_device_mesh": plan.dims.build(device_of_engine().type)} if plan.tp > 1 else {}
    before = {key: state[key] for key in meshes if key in state}
    stock = deepspeed.initialize
    deepspeed.initialize = functools.partial(_initialize_by, plan, options)
    state.update(meshes)
    try:
        yield
    finally:
        deepspeed.initialize = stock
        for key in meshes:
            del state[key]
        state.update(before)


def _initialize_by(
    plan: ParallelPlan, options: ToDistributedConfig | None, *args: Any, mpu: object = None, **kwargs: Any
) -> tuple[Any, Any, Any, Any]:
    if mpu is not None:
        raise PlanError("ParallelismConfig.sp_size shards sequences in its own way; leave it out under deepspeed_mpu")
    key = "config" if kwargs.get("config") is not None else "config_params"
    config = read_config(kwargs[key])
    # accelerate and the Trainer compute the total as if every process had its own rows.
    rows, steps = config.get(BATCH), config.get(STEPS)
    total = config.get("train_batch_size")
    if isinstance(rows, int) and isinstance(steps, int) and total == rows * steps * dist.get_world_size():
        del config["train_batch_size"]
    return initialize(*args, **{**kwargs, key: config}, plan=plan, options=options)


class DeepSpeedTrainerMixin(StockTrainer):
    """Mixin that makes a subclass of transformers' Trainer with ``TrainingArguments(deepspeed=...)`` train by a plan.

    Put the mixin first among the base classes. ``per_device_train_batch_size`` counts the rows of a dp rank. Build the
    model before the TrainingArguments: otherwise, with stage 3, transformers splits the model before the plan can shard
    it.

    Args:
        plan: the plan, as for :func:`initialize`.
        options: the options, as for :func:`initialize`.

    Raises:
        PlanError: if ``TrainingArguments.deepspeed`` is not set.

    Example::

        class PlannedTrainer(DeepSpeedTrainerMixin, Trainer): ...

        trainer = PlannedTrainer(model, args, train_dataset=data, plan=mw.ParallelPlan(dp=2, tp=2))
    """

    def __init__(
        self, *args: object, plan: ParallelPlan, options: ToDistributedConfig | None = None, **kwargs: object
    ) -> None:
        self._plan = plan
        # The Trainer divides a loss by the global count and multiplies it by dp, since engines average gradients. With
        # "local", the sum of dp global counts is the divisor, which cancels this factor.
        self._options = dataclasses.replace(options or ToDistributedConfig(), num_items_in_batch="local")
        super().__init__(*args, **kwargs)
        if not self.is_deepspeed_enabled:
            raise PlanError("this Trainer is for DeepSpeed; set TrainingArguments.deepspeed, or use MeshwrightTrainer")

    def get_tp_size(self) -> int:
        """Return the number of ranks with the same rows; batch sizes, step counts and the loss scale depend on it."""
        return self._plan.tp

    def train(self, *args: object, **kwargs: object) -> Any:
        """See ``Trainer.train``."""
        with deepspeed_mpu(self._plan, self._options):
            return super().train(*args, **kwargs)  # type: ignore[misc]

    def evaluate(self, *args: object, **kwargs: object) -> Any:
        """See ``Trainer.evaluate``."""
        with deepspeed_mpu(self._plan, self._options):
            return super().evaluate(*args, **kwargs)  # type: ignore[misc]

    def predict(self, *args: object, **kwargs: object) -> Any:
        """See ``Trainer.predict``; each row is returned tp times."""
        with deepspeed_mpu(self._plan, self._options):
            return super().predict(*args, **kwargs)  # type: ignore[misc]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write one-device weights, tokenizer and arguments; every rank makes the call, as in the Trainer."""
        folder = output_dir or self.args.output_dir
        save_pretrained(self.deepspeed, folder)
        if self.args.should_save:
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            torch.save(self.args, os.path.join(folder, "training_args.bin"))
