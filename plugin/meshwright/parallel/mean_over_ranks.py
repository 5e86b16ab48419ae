"""The mean over the rows or labels of all data-parallel ranks, from what each rank has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from meshwright.config import NumItems
from meshwright.errors import ItemCountError
from meshwright.parallel.collectives import Axis, all_gather
from meshwright.parallel.tensor_checks import require

IGNORE_INDEX = -100  # transformers' label of what does not count
TARGETS = ("labels", "shift_labels", "start_positions", "end_positions")
BLANK = -(2.0**40)  # the same for labels that are real numbers, of a row that only keeps a rank in step


def valid_labels(labels: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """How many labels count."""
    return (labels != (BLANK if labels.is_floating_point() else ignore_index)).sum()


def without_targets(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The same rows, which no loss counts."""
    out = dict(batch)
    for name in TARGETS:
        if isinstance(target := out.get(name), Tensor):
            if "positions" in name:
                blank: float = torch.iinfo(target.dtype).max  # behind every row
            else:
                blank = BLANK if target.is_floating_point() else batch.get("ignore_index", IGNORE_INDEX)
            out[name] = torch.full_like(target, blank)
    return out


class GlobalMean:
    """Sums over the data-parallel ranks, divided by the global count.

    The value is the same on every rank. The gradient carries a factor dp, so that averaging gradients over the
    data-parallel axis (as torch DDP does) gives the gradient of that value.

    Args:
        dp: axis over which the batch is split.
        num_items: how a ``num_items_in_batch`` is meant; see ToDistributedConfig.num_items_in_batch.
    """

    def __init__(self, dp: Axis, num_items: NumItems = "auto"):
        self.dp, self.num_items = dp, num_items
        self.used_items: bool | None = None  # whether the last mean was divided by a number passed; None before
        self._divisors: Tensor | None = None
        self._last: int | None = None  # the node of the last mean in autograd's graph, which is not kept

    @contextlib.contextmanager
    def divided_by(self, divisors: Tensor) -> Iterator[None]:
        """Divide every sum inside by the divisors of a larger global batch."""
        self._divisors = divisors
        try:
            yield
        finally:
            self._divisors = self._last = None

    def divisors(self, counts: Tensor, num_items: Tensor | float | None = None) -> Tensor:
        """What the sums of a global batch are divided by: its counts, or the number of items passed.

        Args:
            counts: what this rank has, one for each sum.
            num_items: the number passed on this rank, if any.
        """
        ranks = all_gather(self._with_items(counts.double(), num_items)[None], self.dp)
        return self._divisors_of(ranks, len(counts), has_items=num_items is not None)

    def of(self, sums: Tensor, counts: Tensor, num_items: Tensor | float | None = None) -> Tensor:
        """The mean, over the global batch; where there are several sums, the average of their means.

        Args:
            sums: this rank's, in one dim.
            counts: over how many rows or labels each of them goes.
            num_items: a number to divide by instead, if the program passed one.
        """
        # float64: a count above 2**24 would lose tokens in float32.
        own = torch.cat([sums.detach().double(), self._with_items(counts.double(), num_items)])
        ranks = all_gather(own[None], self.dp)
        size = len(sums)
        divisors = self._divisors
        if divisors is None:
            divisors = self._divisors_of(ranks[:, size:], size, has_items=num_items is not None)
        self.used_items = num_items is not None
        divisors = divisors.to(sums.dtype)
        value = (ranks[:, :size].sum(0).to(sums.dtype) / divisors).mean()
        # As torch has it, a mean over nothing is not a number, and has a gradient of zero.
        factors = torch.where(divisors > 0, self.dp.size / size / divisors, 0)
        mean = _ReplaceValue.apply(sums, value, factors)
        self._last = None if mean.grad_fn is None else mean.grad_fn._sequence_nr()
        return mean

    def returned(self, loss: Tensor | None) -> bool:
        """Whether a loss is the last mean, to which nothing was added; True for one without a graph."""
        last, self._last = self._last, None
        return last is None or loss is None or loss.grad_fn is None or loss.grad_fn._sequence_nr() == last

    def of_means(self, means: Tensor, counts: Tensor, num_items: Tensor | float | None = None) -> Tensor:
        """The same from each rank's means; that of a rank without anything to count may be any number, or none."""
        return self.of(means.where(counts > 0, 0) * counts, counts, num_items)

    def _with_items(self, counts: Tensor, num_items: Tensor | float | None) -> Tensor:
        if num_items is None:
            return counts
        with torch._C.DisableTorchFunctionSubclass():  # a number that tells when a program reads it
            items = torch.as_tensor(num_items, device=counts.device, dtype=counts.dtype)
            return torch.cat([counts, items.reshape(1)])

    def _divisors_of(self, ranks: Tensor, size: int, *, has_items: bool) -> Tensor:
        counts = ranks[:, :size]
        if not has_items:
            return counts.sum(0)
        return self._items(ranks[:, size], counts[:, 0]).expand(size)

    def _items(self, passed: Tensor, counts: Tensor) -> Tensor:
        """The global count that ``num_items_in_batch`` means, from what each rank passed and has."""
        if self.dp.size == 1:
            return passed[0]
        if self.num_items == "global":
            require(
                (passed == passed[0]).all(),
                lambda: ItemCountError(
                    "ToDistributedConfig.num_items_in_batch='global', but the data-parallel ranks passed different "
                    f"numbers{_listed(passed)}, so they cannot all be the count of the global batch. Sum the number "
                    "over the ranks before it is passed, or, if each rank passes its own count, set "
                    "num_items_in_batch='local'"
                ),
            )
            return passed[0]
        # A number that is each rank's own count of this batch is nothing else. One that equals the global count may
        # also be a rank's count over a window of dp batches, so that its value says nothing.
        if self.num_items == "auto" and not bool((passed == counts).all()):
            raise ItemCountError(
                "num_items_in_batch may count the global batch or each rank's own, over one batch or a window of them, "
                f"and its value does not say which. {_described(passed, counts)}. Dividing by the wrong one scales the "
                "loss and its gradient. Set ToDistributedConfig(num_items_in_batch='global') if every rank passes the "
                "count of all ranks, or num_items_in_batch='local' if each passes that of its own rows; or leave "
                "num_items_in_batch out, and the loss is the mean over the valid labels of the global batch"
            )
        return passed.sum()


def _listed(passed: Tensor) -> str:
    return f" ({', '.join(f'{x:g}' for x in passed.tolist())})" if passed.device.type == "cpu" else ""


def _described(passed: Tensor, counts: Tensor) -> str:
    own = "; ".join(
        f"rank {rank} of dp passed {number:g} and has {count:g} valid labels"
        for rank, (number, count) in enumerate(zip(passed.tolist(), counts.tolist(), strict=True))
    )
    return f"{own}; the global batch has {counts.sum().item():g}"


class _ReplaceValue(torch.autograd.Function):
    """A scalar in the place of a vector whose gradient is the given factors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, factors: Tensor) -> Tensor:
        ctx.save_for_backward(factors)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (factors,) = ctx.saved_tensors
        return grad * factors, None, None
