"""``num_items_in_batch`` in the Trainer: whether a loss is divided by it, and multiplied by dp as DDP needs it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from meshwright.optim.runtime import Runtime
from meshwright.parallel.graph import tensors_in
from meshwright.parallel.mean import GlobalMean


class ItemsUse:
    """What becomes of the count of items while the Trainer computes one loss.

    The Trainer counts the items of all ranks. Who divides a rank's sum by that count has to multiply it by dp, since
    gradients are averaged over dp. The Trainer multiplies what comes out of its own ``compute_loss``, and cannot see
    whether a function of the user's divided.
    """

    def __init__(self) -> None:
        self.is_read = self.is_scaled = False
        self._mean: GlobalMean | None = None

    @property
    def is_used(self) -> bool:
        """Whether the loss was divided by the count: by the model as it says, else by whoever read the count."""
        of_model = None if self._mean is None else self._mean.used_items
        return self.is_read if of_model is None else of_model

    @property
    def is_global(self) -> bool:
        """Whether the mean of the ranks' losses is that of the global batch."""
        return self.is_used and self.is_scaled

    @contextlib.contextmanager
    def of_one_loss(self, name: str, runtime: Runtime, *, counts_all_ranks: bool) -> Iterator[None]:
        """Watch while a loss is computed.

        Args:
            name: of the Trainer's class.
            runtime: of the model.
            counts_all_ranks: TrainingArguments.average_tokens_across_devices; else the items are each rank's own, which
                the model's loss adds up by itself.

        Raises:
            ValueError: where a loss was divided by the count of all ranks, and not multiplied.
        """
        self.is_read = self.is_scaled = False
        if runtime.loss is not None:
            self._mean = runtime.loss.mean
            self._mean.used_items = None
        yield
        if not self.is_used or self.is_scaled:
            return
        dp, ranks = runtime.dp.size, runtime.dp.size * runtime.tp.size
        is_of_model = self._mean is not None and self._mean.used_items
        if (counts_all_ranks and ranks > 1) or (dp > 1 and not is_of_model):
            raise ValueError(
                f"{name} divides a loss by num_items_in_batch itself. With {ranks} processes the result depends on "
                "what that number counts, and on a factor that undoes the average over data-parallel ranks, which "
                "only the Trainer's own compute_loss applies. Give the Trainer the loss as a function, "
                "compute_loss_func=f with f(outputs, labels, num_items_in_batch); or end compute_loss with "
                "super().compute_loss(model, inputs, return_outputs, num_items_in_batch); or compute a mean without "
                "that number and return meshwright.global_mean(model, loss, count). "
                "TrainingArguments.average_tokens_across_devices has to be True"
            )

    def watch(self, count: Any) -> Any:
        """The same count, which tells when it is read."""
        if not isinstance(count, Tensor):
            return count
        watched = count.as_subclass(_WatchedCount)
        watched.use = self
        return watched


class _WatchedCount(Tensor):
    use: ItemsUse

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.__name__ not in ("__get__", "__set__"):  # the device and the like say nothing of the value
            for x in tensors_in((args, kwargs)):
                if isinstance(x, _WatchedCount):
                    x.use.is_read = True
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
