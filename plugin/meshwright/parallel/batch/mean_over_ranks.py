"""Compute the mean over the rows or labels of all data-parallel ranks from each rank's own sum and count.

Tells of a loop that cuts a loader's batch and takes a mean over each part.

::

    one device    rows 0 1 2 3 | 4 5 6 7      the mean of each half, and the average of both
    rank 0        rows 0 1 | 2 3              under dp=2 the first half is rows 0, 1, 4 and 5
    rank 1        rows 4 5 | 6 7

Other rows share a mean, so the average of the means differs where the parts count different numbers of items.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node as GraphNode

from meshwright.autograd import Node, TensorFunction, refuse_second_order
from meshwright.errors import ItemCountError, PlanError
from meshwright.mesh.axes import Axis
from meshwright.parallel.async_numbers import is_deferred, read_later, require
from meshwright.parallel.batch.loss_gradients import LossGradients, probe_of
from meshwright.parallel.collectives import all_gather
from meshwright.plan.config import NumItems
from meshwright.progress import is_first_rank

logger = logging.getLogger(__name__)


class BatchSlices:
    """Compares how many items the means over the parts of one batch count."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin anew, for a new model."""
        self._batch: object = None  # of which the last forward pass had some rows; None if it had all, or others
        self._compared: object = None  # the batch of the counts
        self._counts: list[Callable[[], Any]] = []
        self._has_warned = False

    def enter_pass(self, batch: object) -> None:
        """Record that a forward pass has some rows of a batch; None if it has all, or those of no batch."""
        self._batch = batch

    def see(self, counts: Tensor) -> None:
        """See the counts of a mean over rows of several ranks, one row for each rank."""
        if self._batch is None or self._has_warned or len(counts) == 1:
            return
        if self._batch is not self._compared:
            self._compare()
            self._compared, self._counts = self._batch, []
        self._counts.append(read_later(counts))
        if not is_deferred(counts.device):
            self._compare()

    def _compare(self) -> None:
        """Compare the parts of a batch. Those on a device are read when the next batch begins."""
        read = [count() for count in self._counts]
        first, other = read[:1], [count for count in read if count != read[0]][:1]
        self._has_warned |= bool(other)
        if other and is_first_rank():
            logger.warning(
                "the program calls the model with parts of a loader's batch and takes a mean over each of them, of "
                "which the ranks count %s items, and then %s. Under data parallelism each part has rows of all ranks, "
                "so other rows share a mean than on one device, and the losses differ. Pass the whole batch to the "
                "model and cut it with ParallelPlan(gradient_accumulation_steps=2), or divide the sum over each part "
                "by the number of items of the whole batch: loss = meshwright.global_mean(model, sum_of_part / count, "
                "count), where count is that of this rank's rows of the whole batch",
                *(", ".join(f"{number:g}" for rank in counted for number in rank) for counted in (*first, *other)),
            )


slices = BatchSlices()  # of this process


IGNORE_INDEX = -100  # the label that transformers' losses skip
TARGETS = ("labels", "shift_labels", "start_positions", "end_positions")
_OTHER_COUNT = (
    "the micro-batches' loss averages over another number of labels than the batch shows. Use a plan without "
    "micro-batches and with ParallelPlan(pp=1), or compute the loss from the model's outputs: "
    "loss = meshwright.global_mean(model, loss, count)"
)
BLANK = -(2.0**40)  # the floating-point label that losses skip, in rows that only keep a rank in step with others


def valid_labels(labels: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Return the number of labels that a loss does not skip."""
    return (labels != (BLANK if labels.is_floating_point() else ignore_index)).sum()


def without_targets(batch: Mapping[str, Any]) -> dict[str, object]:
    """Return the batch with its targets replaced by values that the loss skips.

    A loader knows no ``ignore_index`` of the model's call, so a forward pass calls this again for a filler.
    """
    out = dict(batch)
    for name in TARGETS:
        if isinstance(target := out.get(name), Tensor):
            if "positions" in name:
                blank: float = torch.iinfo(target.dtype).max  # beyond every row, so transformers skips it
            else:
                blank = BLANK if target.is_floating_point() else batch.get("ignore_index", IGNORE_INDEX)
            out[name] = torch.full_like(target, blank)
    return out


class GlobalMean:
    """Computes a global mean: sums over the data-parallel ranks and divides by the global count.

    The value is the same on every rank. The gradient carries a factor dp, so that averaging gradients over the
    data-parallel axis (as torch DDP does) gives the gradient of the global mean.

    Args:
        dp: the axis over which the batch is split.
        num_items: what ``num_items_in_batch`` counts; see ToDistributedConfig.num_items_in_batch.
        parts: the number of neighbours on ``dp`` that hold parts of the same rows (cp).
        gradients: takes the gradients that reach the means, which are compared over ``dp``; None to compare none.
    """

    def __init__(self, dp: Axis, num_items: NumItems = "auto", parts: int = 1, gradients: LossGradients | None = None):
        self.dp, self.num_items, self.parts = dp, num_items, parts
        self.gradients = gradients if dp.size > 1 else None
        self.used_items: bool | None = None  # whether num_items divided the last mean; None before the first mean
        # Of a larger global batch: the divisors of losses that ignore num_items, and of those that use it.
        self._divisors: tuple[Tensor, Tensor] | None = None
        self._seen: Tensor | None = None  # what the losses have counted of a larger global batch
        self.has_miscounted: Tensor | None = None  # whether that was another number than was expected of the last one
        self._micro_batches = 1  # into how many the larger global batch is split
        # Sequence numbers of the autograd nodes of the last mean and of what was added to it; the nodes are not kept.
        self._last: int | None = None
        self._added: int | None = None
        # Of a larger global batch: what was added last, and all that was added so far.
        self.last_added: Tensor | None = None
        self.all_added = torch.zeros(())

    @contextlib.contextmanager
    def over_micro_batches(
        self, counts: Tensor, num_items: Tensor | float | None, micro_batches: int
    ) -> Iterator[None]:
        """Let each mean inside the context be an addend of the mean over a global batch of several micro-batches.

        Afterwards ``has_miscounted`` says whether the losses have counted something else, the same on all ranks of dp,
        and is None on a rank that has computed none; see :meth:`check_counts`.

        Args:
            counts: what this rank's losses of all micro-batches will count together, one number for each sum.
            num_items: the ``num_items_in_batch`` that this rank's program passed, if any; it divides the means of
                losses that use it.
            micro_batches: their number.
        """
        ranks = all_gather(self._with_items(counts.double(), num_items)[None], self.dp)
        if num_items is None:
            slices.see(ranks)
        by_counts = self._divisors_of(ranks, len(counts), has_items=False)
        self._divisors = by_counts, self._divisors_of(ranks, len(counts), has_items=num_items is not None)
        self._micro_batches, self._seen, self.has_miscounted = micro_batches, None, None
        try:
            yield
            if self._seen is not None and not self.used_items:
                self.has_miscounted = (self._seen != by_counts.to(self._seen.device)).any()
        finally:
            self._divisors = self._seen = self._last = self._added = self.last_added = None
            self._micro_batches = 1

    def divisors(self, counts: Tensor, num_items: Tensor | float | None = None) -> Tensor:
        """Return the divisors of a global batch's sums: its counts, or the ``num_items`` that the program passed.

        Args:
            counts: this rank's counts, one for each sum.
            num_items: the ``num_items_in_batch`` that this rank's program passed, if any.
        """
        ranks = all_gather(self._with_items(counts.double(), num_items)[None], self.dp)
        if num_items is None:
            slices.see(ranks)
        return self._divisors_of(ranks, len(counts), has_items=num_items is not None)

    def known_divisors(self, counts: Tensor, num_items: Tensor | float | None = None) -> Tensor:
        """Return the divisors of the sums to come: those of the larger batch inside :meth:`over_micro_batches`."""
        return self.divisors(counts, num_items) if self._divisors is None else self._divisors[num_items is not None]

    def check_counts(self) -> None:
        """Raise if the losses of the last global batch of several micro-batches have counted something else."""
        has_miscounted, self.has_miscounted = self.has_miscounted, None
        if has_miscounted is not None:
            require(~has_miscounted, lambda: PlanError(_OTHER_COUNT))

    def _see(self, counts_of_ranks: Tensor) -> None:
        counts = counts_of_ranks.sum(0)
        self._seen = counts if self._seen is None else self._seen + counts

    def factors(self, divisors: Tensor) -> Tensor:
        """Return the gradient of a mean with respect to each of its sums."""
        # As in torch, a mean over nothing is NaN and its gradient is zero.
        return torch.where(divisors > 0, self.dp.size / len(divisors) / divisors, 0)

    def of_weighted(self, sums: Tensor, counts: Tensor, divisors: Tensor, *, has_items: bool) -> Tensor:
        """Return the mean over the global batch of sums whose gradients have their factors already.

        Args:
            sums: this rank's sums, ``[n]``.
            counts: how many rows or labels each sum covers, ``[n]``.
            divisors: what :meth:`known_divisors` returned.
            has_items: whether the program passed num_items.
        """
        own, size = sums.detach().double(), len(sums)
        if self._divisors is not None:
            own = torch.cat([own, counts.double()])
        ranks = all_gather(own[None], self.dp)
        if self._divisors is not None:
            self._see(ranks[:, size:])
        self.used_items = has_items
        return self._replaced(sums, ranks[:, :size], divisors.to(sums.dtype), torch.ones_like(sums))

    def of(self, sums: Tensor, counts: Tensor, num_items: Tensor | float | None = None) -> Tensor:
        """Return the mean over the global batch; for several sums, the average of their means.

        Args:
            sums: this rank's sums, ``[n]``.
            counts: how many rows or labels each sum covers, ``[n]``.
            num_items: the number to divide by instead of the counts, if the program passed one.
        """
        # float64, since float32 cannot represent every count above 2**24.
        own = torch.cat([sums.detach().double(), self._with_items(counts.double(), num_items)])
        ranks = all_gather(own[None], self.dp)
        size = len(sums)
        if self._divisors is None:
            if num_items is None:
                slices.see(ranks[:, size:])
            divisors = self._divisors_of(ranks[:, size:], size, has_items=num_items is not None)
        else:
            divisors = self._divisors[num_items is not None]
            self._see(ranks[:, size : 2 * size])
        self.used_items = num_items is not None
        divisors = divisors.to(sums.dtype)
        return self._replaced(sums, ranks[:, :size], divisors, self.factors(divisors))

    def _replaced(self, sums: Tensor, ranks: Tensor, divisors: Tensor, factors: Tensor) -> Tensor:
        value = (ranks.sum(0).to(sums.dtype) / divisors).mean()
        mean: Tensor = _ReplaceValue.apply(sums, value, factors, *self._in_backward(sums))
        self._last = None if mean.grad_fn is None else mean.grad_fn._sequence_nr()
        return mean

    def added(self, x: Tensor, value: Tensor, factors: Tensor) -> Tensor:
        """Return a number that a forward adds to the mean, which is one of the global batch already.

        For a larger global batch it is the mean of its micro-batches' numbers.

        Args:
            x: this rank's vector, on which the number depends.
            value: the number.
            factors: the number's gradient with respect to ``x``.
        """
        share = 1 / self._micro_batches
        factors = (factors * share * self.dp.size).to(x.dtype)
        if self._last is not None and not x.requires_grad:
            # Nothing before needs a gradient; without a node the number would look like one of another origin.
            x = x.detach().requires_grad_()
        number: Tensor = _ReplaceValue.apply(
            x, (value * share).to(x.dtype), factors, *self._in_backward(x, is_compared=False)
        )
        self._added = None if number.grad_fn is None else number.grad_fn._sequence_nr()
        if self._divisors is not None:
            self.all_added = number.detach() + (0 if self.last_added is None else self.all_added)
            self.last_added = number
        return number

    def watched(self, mean: Tensor) -> Tensor:
        """Return a loss that is already the mean over the global batch; the gradient that reaches it is compared."""
        factor, own = torch.ones_like(mean, requires_grad=False), mean.reshape(1)
        return _ReplaceValue.apply(own, mean.detach(), factor.reshape(1), *self._in_backward(own))

    def _in_backward(self, x: Tensor, *, is_compared: bool = True) -> tuple[object, ...]:
        """Return what the backward of a mean needs besides its factors."""
        look = None if self.gradients is None or not is_compared else self.gradients.of_next()
        return look, self.gradients, self.dp.size, probe_of(x)

    @property
    def is_pending(self) -> bool:
        """Whether a mean was computed that :meth:`returned` has not seen."""
        return self._last is not None or self._added is not None

    def returned(self, loss: Tensor | None) -> bool:
        """Return whether a loss is the last mean and :meth:`added` alone; also True for a loss without a graph."""
        known, self._last, self._added = {self._last, self._added}, None, None
        return known == {None} or loss is None or loss.grad_fn is None or _is_sum(loss.grad_fn, known)

    def of_means(self, means: Tensor, counts: Tensor, num_items: Tensor | float | None = None) -> Tensor:
        """Return what :meth:`of` returns, from each rank's means. A mean with count 0 may be anything, even NaN."""
        return self.of(means.where(counts > 0, 0) * counts, counts, num_items)

    def _with_items(self, counts: Tensor, num_items: Tensor | float | None) -> Tensor:
        if num_items is None:
            return counts
        with torch._C.DisableTorchFunctionSubclass():  # num_items may be a tensor subclass that detects reads
            if isinstance(num_items, Tensor):
                items = num_items.to(counts.device, counts.dtype, non_blocking=True)
            else:  # not a tensor of the number, which would have to be copied to the device
                items = torch.full((1,), num_items, device=counts.device, dtype=counts.dtype)
            return torch.cat([counts, items.reshape(1)])

    def _divisors_of(self, ranks: Tensor, size: int, *, has_items: bool) -> Tensor:
        counts = ranks[:, :size]
        if not has_items:
            return counts.sum(0)
        return self._items(ranks[:, size], counts[:, 0]).expand(size)

    def _items(self, passed: Tensor, counts: Tensor) -> Tensor:
        """Return the global count for the ``num_items_in_batch`` that each rank passed, given each rank's own count."""
        passed, counts = passed.view(-1, self.parts), counts.view(-1, self.parts).sum(1)
        if self.parts > 1:
            require(
                (passed == passed[:, :1]).all(),
                lambda: ItemCountError(
                    "the ranks of cp hold parts of the same rows, but passed different num_items_in_batch"
                    f"{_listed(passed.flatten())}; pass the count of the whole rows on each of them"
                ),
            )
        passed = passed[:, 0]
        if len(passed) == 1:
            return passed[0]
        if self.num_items == "global":
            require(
                (passed == passed[0]).all(),
                lambda: ItemCountError(
                    "ToDistributedConfig.num_items_in_batch='global', but the ranks of dp passed different numbers"
                    f"{_listed(passed)}. Sum the number over the ranks before it is passed, or set "
                    "num_items_in_batch='local' if each rank passes its own count"
                ),
            )
            return passed[0]
        # A number that equals the rank's own count is unambiguous. A number that equals the global count may also be
        # the rank's count over an accumulation window of dp batches.
        if self.num_items == "auto":
            require(
                (passed == counts).all(),
                lambda: ItemCountError(
                    "num_items_in_batch is ambiguous: set ToDistributedConfig(num_items_in_batch='global') if every "
                    "rank passes the count of all ranks, 'local' if each passes that of its own rows, or leave it out, "
                    f"which averages over the batch's labels. Here {_described(passed, counts)}. The number may count "
                    "the global batch or each rank's own rows, of one batch or of an accumulation window, and the "
                    "wrong count scales the loss and its gradient"
                ),
            )
        return passed.sum()


def _listed(passed: Tensor) -> str:
    return f" ({', '.join(f'{x:g}' for x in passed.tolist())})" if passed.device.type == "cpu" else ""


def _described(passed: Tensor, counts: Tensor) -> str:
    if passed.device.type != "cpu":  # the host would have to wait for the numbers
        return "some rank of dp has another number of valid labels"
    own = "; ".join(
        f"rank {rank} of dp passed {number:g} and has {count:g} valid labels"
        for rank, (number, count) in enumerate(zip(passed.tolist(), counts.tolist(), strict=True))
    )
    return f"{own}; the global batch has {counts.sum().item():g}"


def _is_sum(node: GraphNode | None, known: set[int | None]) -> bool:
    """Return whether a node adds up known numbers, of which some may be cast or multiplied by a number."""
    if node is None or node._sequence_nr() in known:
        return node is not None
    inputs = [input for input, _ in node.next_functions]
    if node.name() == "AddBackward0":
        return all(_is_sum(input, known) for input in inputs)
    scaled = [input for input in inputs if input is not None]
    return node.name() in ("MulBackward0", "ToCopyBackward0") and len(scaled) == 1 and _is_sum(scaled[0], known)


class _ReplaceValue(TensorFunction):
    """Replaces a vector by a given scalar, whose gradient with respect to the vector is the given factors.

    Backward calls ``look``, if there is one, with the gradient of the scalar. The ranks share the factor that it has
    in passes whose gradients are averaged.
    """

    has_graph = True  # on one rank

    @staticmethod
    def forward(
        ctx: Node,
        x: Tensor,
        value: Tensor,
        factors: Tensor,
        look: Callable[[Tensor], None] | None,
        gradients: LossGradients | None,
        ranks: int,
        probe: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(factors)
        ctx.look, ctx.gradients, ctx.ranks = look, gradients, ranks
        return value.clone()

    @staticmethod
    def backward(ctx: Node, grad: Tensor) -> tuple[Tensor | None, ...]:
        share = 1.0 if ctx.gradients is None else ctx.gradients.enter()
        if ctx.ranks * share > 1:  # until gradients are averaged they have a factor, and a penalty is not linear in it
            refuse_second_order("Use ParallelPlan(dp=1, cp=1)")
        (factors,) = ctx.saved_tensors
        if ctx.look is not None:
            ctx.look(grad)
        return grad * (factors if share == 1 else factors * share), None, None, None, None, None, None
