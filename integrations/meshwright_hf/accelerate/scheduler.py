"""The learning-rate scheduler of a model under a plan."""

from __future__ import annotations

import math
from fractions import Fraction

from accelerate.scheduler import AcceleratedScheduler
from torch.optim.lr_scheduler import LambdaLR

from meshwright.errors import CheckpointError


class PlannedScheduler(AcceleratedScheduler):
    """A scheduler that steps once for each of the loader's batches in an optimizer step.

    A script's scheduler counts batches of the script's loader. If such a batch is for one rank, an optimizer step uses
    one batch per data-parallel rank. accelerate counts processes instead, but tp processes share a batch.

    Args:
        scheduler: the user's scheduler.
        optimizers: accelerate's wrappers of the scheduled optimizers.
        batches: how many batches of the loader a step uses: dp, or 1 with ``split_batches``.
        step_with_optimizer: the value of ``Accelerator(step_scheduler_with_optimizer=...)``.
    """

    def __init__(self, scheduler: object, optimizers: object, *, batches: int, step_with_optimizer: bool):
        super().__init__(scheduler, optimizers, step_with_optimizer=step_with_optimizer, split_batches=True)
        self.batches = batches

    def step(self, *args: object, **kwargs: object) -> None:
        """Step the scheduler; with ``step_with_optimizer``, skip it if an optimizer skipped its step."""
        if not (self.step_with_optimizer and self.gradient_state.sync_gradients):
            super().step(*args, **kwargs)
            return
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        last = getattr(self.scheduler, "total_steps", math.inf)  # OneCycleLR raises beyond its end
        for _ in range(self.batches):
            if self.batches == 1 or self.scheduler._step_count <= last:
                self.scheduler.step(*args, **kwargs)

    def count_in(self, rows: int, saved_rows: int, saved_batches: int) -> None:
        """Convert a saved count of batches with another number of rows, so that it is the same number of samples.

        Args:
            rows: the rows of an optimizer step of this run, on all ranks.
            saved_rows, saved_batches: ``rows`` and ``batches`` of the run that saved the count.

        Raises:
            CheckpointError: if the scheduler keeps more than the count, or the new count is not a whole number.
        """
        ratio = Fraction(saved_rows, saved_batches) / Fraction(rows, self.batches)
        if ratio == 1 or not self.step_with_optimizer:  # without step_with_optimizer the program's calls count
            return
        counted = self.scheduler.last_epoch * ratio
        if not isinstance(self.scheduler, LambdaLR) or counted.denominator > 1:
            raise CheckpointError(
                f"the checkpoint's {type(self.scheduler).__name__} has counted to {self.scheduler.last_epoch}, by "
                f"{saved_rows // saved_batches} rows at a time, but this run counts by {rows // self.batches}: only a "
                "torch.optim.lr_scheduler.LambdaLR, such as transformers' get_scheduler makes, can resume with another "
                "number, and at a whole count. Resume with the same batch_size of the DataLoader and the same "
                "gradient_accumulation_steps"
            )
        self.scheduler._step_count += int(counted) - self.scheduler.last_epoch
        self.scheduler.last_epoch = int(counted)
