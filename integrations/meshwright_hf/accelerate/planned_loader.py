"""The loader and the learning-rate scheduler of a plan, with the attributes that accelerate reads from its own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from itertools import islice
from typing import Any

from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import GradientState
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from meshwright.data.loader import DistributedLoader, made_together, part_of
from meshwright.data.peers import LoaderMesh
from meshwright.errors import CheckpointError
from meshwright.faults.together import succeed_together
from meshwright.mesh.axes import Axis
from meshwright.optim.runtime import device_of, runtime_of
from meshwright.parallel.batch.items import BatchFormat
from meshwright.parallel.batch.share import BatchShare, yield_next
from meshwright.plan.loader_options import LoaderOptions
from meshwright_hf.batches import batch_size_of, global_batches, one_ahead, order_by_seed_and_epoch


class PlannedLoader:
    """Yields this rank's batches, and has the attributes that accelerate reads from an active loader.

    The loader reads one batch ahead, to know whether the yielded batch is the last. ``state_dict`` is the state after
    the yielded batch. Other attributes, such as ``dataset`` or ``batch_size``, are those of the user's loader.

    Args:
        loader: the loader as the user made it.
        inner: a loader of this rank's rows of the global batches.
        dp: the axis whose ranks read different rows.
        total_batch_size: the number of rows of a global batch; None if it is unknown.
    """

    _is_accelerate_prepared = True

    def __init__(self, loader: Iterable[Any], inner: DistributedLoader, dp: Axis, total_batch_size: int | None):
        self.user_loader, self.inner, self.dp = loader, inner, dp
        self.total_batch_size = total_batch_size
        self.gradient_state = GradientState()
        self.end_of_dataloader = False
        self.share: BatchShare | None = None  # what the yielded batch is of the global batch
        self.remainder = -1
        self._state: dict[str, Any] | None = None
        self._to_drop = 0

    def __iter__(self) -> Iterator[Any]:
        self.end_of_dataloader = False
        self.remainder = self._rows_of_last()
        self.gradient_state._add_dataloader(self)
        try:
            dropped, self._to_drop = self._to_drop, 0
            batches = islice(self.inner, dropped, None)
            read = one_ahead(batches, lambda: (self.inner.place(), self.inner.share))
            for batch, (self._state, self.share), self.end_of_dataloader in read:
                yield_next(self.share)
                yield batch
            self._state = None
        finally:
            self.gradient_state._remove_dataloader(self)

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name in ("user_loader", "inner"):  # not yet set: under construction or being unpickled
            raise AttributeError(name)
        return part_of(self.user_loader, name)

    @property
    def total_dataset_length(self) -> int:
        return len(self.user_loader.dataset)  # type: ignore[attr-defined]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next iteration reads; by default each iteration reads the next epoch."""
        self.inner.set_epoch(epoch)
        self._state = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last yielded batch: a small state, equal on all ranks, for any mesh."""
        return {**self.inner.state_dict(), **self.place()}

    def place(self) -> dict[str, Any]:
        """Return the state without torch's random state, which ``Accelerator.save_state`` saves itself."""
        return self.inner.place() if self._state is None else self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration resume from a state."""
        self.inner.load_state_dict(state)
        self._state = None

    def skip(self, num_batches: int) -> None:
        """Make the next iteration begin after the first ``num_batches`` batches of its epoch.

        Batches are counted from the start of the epoch. ``load_state`` already restores the position; if the script
        then also skips the batches of the saved run, the position stays the same.
        """
        place = self.inner.position
        is_restored = place.is_fresh and place.samples > 0
        samples = None if self.total_batch_size is None else num_batches * self.total_batch_size
        if is_restored and samples in (None, place.samples):
            return  # a new DataLoader would draw a seed once more, and so change the orders of later epochs
        if samples is not None and self.inner.skip(samples):
            self._state = None
        elif not is_restored:
            self._to_drop = num_batches  # where they end is known only after reading them

    def _rows_of_last(self) -> int:
        """Return the rows of the last batch over all ranks, 0 if it is full, or -1 as in accelerate if unknown."""
        if self.total_batch_size is None or getattr(self.user_loader, "drop_last", False):
            return -1
        try:
            return self.total_dataset_length % self.total_batch_size
        except TypeError:
            return -1


def check_loader(loader: DataLoader[Any], dp: int, options: LoaderOptions, *, is_global: bool) -> None:
    """Raise on all ranks if a loader cannot be put on a mesh; changes nothing.

    Raises:
        ValueError: see ``global_batches`` and ``DistributedLoader``.
    """
    mesh = LoaderMesh(dp=Axis("dp"))
    succeed_together(
        lambda: DistributedLoader(loader if is_global else global_batches(loader, dp), mesh, options=options)
    )


def plan_loader(
    loader: DataLoader[object], model: nn.Module, options: LoaderOptions, *, is_global: bool, accelerator: Accelerator
) -> PlannedLoader:
    """Return a loader on the mesh of a distributed model; every rank makes the call.

    Args:
        loader: a loader of one data-parallel rank's batches or, with ``is_global``, of global batches.
        model: the model that ``to_distributed`` returned.
        options: the options of the loader.
        is_global: whether the loader's batches are global.
        accelerator: the Accelerator, which decides whether to shuffle by a seed and the epoch.
    """
    runtime = runtime_of(model)
    joined = loader if is_global else global_batches(loader, runtime.mesh.dp.size)
    if accelerator.use_seedable_sampler:
        order_by_seed_and_epoch(joined, accelerator.dataloader_config.data_seed)

    mesh = LoaderMesh.of(runtime.mesh, device_of(model))
    format = runtime.features.find(BatchFormat)
    inner = made_together(lambda: DistributedLoader(joined, mesh, options=options, blanks="either", format=format))
    return PlannedLoader(loader, inner, runtime.mesh.dp, batch_size_of(joined))


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
