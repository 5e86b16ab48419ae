"""The learning-rate scheduler of a model on a plan."""

from __future__ import annotations

import math
from typing import Any

from accelerate.scheduler import AcceleratedScheduler


class PlannedScheduler(AcceleratedScheduler):
    """Steps once for every one-device batch that an optimizer step stands for.

    A script's scheduler counts batches of its loader. With a loader whose batch is one rank's, a step takes as many of
    them as there are data-parallel ranks; accelerate counts processes, of which tp share a batch.

    Args:
        scheduler: the user's.
        optimizers: accelerate's wrappers of those that it schedules.
        batches: how many of the loader's batches a step takes: dp; 1 with ``split_batches``.
        step_with_optimizer: as ``Accelerator(step_scheduler_with_optimizer=...)`` says.
    """

    def __init__(self, scheduler: Any, optimizers: Any, *, batches: int, step_with_optimizer: bool):
        super().__init__(scheduler, optimizers, step_with_optimizer=step_with_optimizer, split_batches=True)
        self.batches = batches

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step, unless the optimizer did not."""
        if not (self.step_with_optimizer and self.gradient_state.sync_gradients):
            super().step(*args, **kwargs)
            return
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        last = getattr(self.scheduler, "total_steps", math.inf)  # OneCycleLR raises beyond its end
        for _ in range(self.batches):
            if self.batches == 1 or self.scheduler._step_count <= last:
                self.scheduler.step(*args, **kwargs)
