"""A loss that the program computes itself: say once what data parallelism makes of it where ranks have unlike rows."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from meshwright.parallel.collectives import Axis, all_gather
from meshwright.parallel.mean_over_ranks import valid_labels
from meshwright.parallel.output_loss import tensors_of

logger = logging.getLogger(__name__)


class UnevenBatches:
    """Compares over dp what the ranks' own losses average over, until they differ once, and warns then.

    The comparison is a collective at the end of the backward pass, where all ranks are; a model whose loss is known
    has none of it.

    Args:
        dp: the axis that averages gradients.
        tp: the axis whose ranks have the same rows, and of which the first one speaks.
    """

    def __init__(self, dp: Axis, tp: Axis):
        self.dp, self.tp = dp, tp
        self.is_on = dp.size > 1
        self._batch: Mapping[str, Any] | None = None
        self._earlier: Callable[[], list[list[float]]] | None = None

    def stop(self) -> None:
        """The program, or what drives it, knows what to do about such batches."""
        self.is_on = False

    @contextlib.contextmanager
    def of_batch(self, batch: Any) -> Iterator[None]:
        """Count in this batch, from which a program may take labels before the model is called."""
        self._batch = batch if isinstance(batch, Mapping) else None
        try:
            yield
        finally:
            self._batch = None

    def look(self, inputs: Mapping[str, Any], output: Any, known: Tensor | None = None) -> None:
        """Compare, once the gradient of a loss comes back to what the model returned.

        Args:
            inputs: of the pass.
            output: what the model returned.
            known: the loss in it, where that is the global batch's; a pass whose gradient comes back through it is left
                alone.
        """
        # Sharded logits are the known loss's alone, which overwrites them.
        tensors = [x for x in tensors_of(output) if x.requires_grad and x is not known and type(x) is Tensor]
        if not tensors:
            return
        batch, is_pass = (inputs, True) if self._batch is None else (self._batch, False)
        device = tensors[0].device  # a hook that held its own tensor would keep it for ever
        is_queued = is_known = False

        def compare() -> None:
            if not is_known:
                # Where the group communicates; a batch may still be on the host.
                self._compare(rows_and_labels(batch, with_mask=is_pass).to(device, non_blocking=True))

        def queue(_: Tensor) -> None:
            nonlocal is_queued
            if not is_queued:
                is_queued = True
                torch.autograd.Variable._execution_engine.queue_callback(compare)

        def is_used(_: Tensor) -> None:
            nonlocal is_known
            is_known = True

        for tensor in tensors:
            tensor.register_hook(queue)
        if known is not None and known.requires_grad:
            known.register_hook(is_used)

    def _compare(self, counted: Tensor) -> None:
        if not self.is_on:
            return
        ranks = all_gather(counted[None], self.dp)
        earlier, self._earlier = self._earlier, _read_later(ranks)
        if ranks.device.type == "cpu":
            earlier = self._earlier
        if earlier is not None:
            self._warn(earlier())

    def _warn(self, ranks: list[list[float]]) -> None:
        if all(rank == ranks[0] for rank in ranks):
            return
        self.is_on = False
        if self.dp.rank > 0 or self.tp.rank > 0:
            return
        logger.warning(
            "the model's loss is not one that is known, or the program computes its own, and the data-parallel ranks "
            "had %s: data parallelism takes the mean of the ranks' means, in which a row or label of a rank that has "
            "fewer of them weighs more than on one device. For the mean of the global batch write loss = "
            "meshwright.global_mean(model, loss, count), with count what this rank's loss is the mean of, for example "
            "(labels != -100).sum(); or, if the model returns the loss, set "
            "ToDistributedConfig(loss_averages_over='rows'), 'labels' or a callable that counts in a batch",
            said_of_ranks(ranks),
        )


def said_of_ranks(ranks: list[list[float]]) -> str:
    """What each rank has, as ``rows_and_labels`` counted it."""
    what = "{:g} rows" if ranks[0][1] < 0 else "{:g} rows with {:g} labels or tokens that count"
    return "; ".join(f"{what.format(*rank)} on rank {index}" for index, rank in enumerate(ranks))


def rows_and_labels(batch: Mapping[str, Any], *, with_mask: bool) -> Tensor:
    """Rows; labels that count; or, without labels, tokens that are not padding."""
    tensors = [x for x in batch.values() if isinstance(x, Tensor) and x.ndim > 0]
    labels, mask = batch.get("labels"), batch.get("attention_mask")
    rows = tensors[0].shape[0] if tensors else 0
    count: Tensor | int = -1
    if isinstance(labels, Tensor):
        count = valid_labels(labels)
    elif with_mask and isinstance(mask, Tensor) and mask.ndim == 2:
        count = mask.sum()
    device = tensors[0].device if tensors else torch.device("cpu")
    return torch.stack([torch.as_tensor(x, device=device, dtype=torch.float64) for x in (rows, count)])


def _read_later(x: Tensor) -> Callable[[], list[list[float]]]:
    """Begin to copy a tensor to the host; the returned call gives its values, without a wait a step later."""
    if x.device.type != "cuda":
        return x.tolist
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> list[list[float]]:
        copied.synchronize()
        return host.tolist()

    return read
