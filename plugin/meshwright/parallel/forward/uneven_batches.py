"""Warns once about batches that differ between data-parallel ranks: in the numbers of rows or labels of an unknown
loss, or in the length that a program pads to.

A loader gives the batches of its collate function one length over the ranks. It cannot do so for rows that the program
pads itself, so the lengths are compared in the first training passes.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node as GraphNode

from meshwright.faults.guard import Guard
from meshwright.mesh.axes import Axis
from meshwright.parallel.async_numbers import read_later
from meshwright.parallel.autograd_graph import in_backward, loss_of, tensors_of
from meshwright.parallel.batch.mean_over_ranks import IGNORE_INDEX, valid_labels
from meshwright.parallel.batch.schema import Batch, BatchSchema
from meshwright.parallel.batch.share import BatchShare, labels_beside
from meshwright.parallel.collectives import all_gather
from meshwright.parallel.losses.deferred_logits import DeferredLogits, watch_gradient
from meshwright.temporarily import temporarily

logger = logging.getLogger(__name__)

_CROSS_ENTROPY = re.compile(r"NllLoss(2D)?Backward\d+")  # not the node of its own gradient under create_graph
_MEAN = 1  # torch's number of the reduction "mean"
_ENOUGH = math.log(1e8)  # a program with labels of classes is told wrongly once in as many cases


class UnevenBatches:
    """Compares over dp how many items the ranks' own losses average over, and warns the first time they differ.

    The comparison is a collective at the end of the backward pass, which all ranks reach. A loss of a known kind needs
    no comparison.

    Args:
        dp: the axis over which gradients are averaged.
        tp: the axis whose ranks have the same rows, so that only its first rank warns.
    """

    def __init__(self, dp: Axis, tp: Axis):
        self.dp, self.tp = dp, tp
        self.is_on = dp.size > 1
        self._batch: Batch | None = None
        self._outputs = frozenset[int]()  # the sequence numbers of the autograd nodes of the last pass's output
        self._divisor: Tensor | None = None  # what torch's cross-entropies of the loss divide by, if it has any
        self._has_weights = False  # whether that is a sum of weights
        self._is_left_out = False  # whether the loss of the last pass is of all rows
        self._earlier: Callable[[], list[list[float]]] | None = None
        self._pairs = _PairedRows(dp, warns=dp.rank == 0 and tp.rank == 0)
        if self.is_on:
            _observers.add(self)
            _show_losses()

    def stop(self) -> None:
        """Stop comparing, because the program or its Trainer handles uneven batches."""
        self.is_on = False

    def leave_out_pass(self) -> None:
        """Do not compare the last pass, because the program computes a loss of the rows of all ranks from its output.

        In a pass that is running, this has no effect: its loss may be of this rank's rows.
        """
        self._is_left_out = True

    def of_batch(self, batch: object) -> contextlib.AbstractContextManager[None]:
        """Count this batch, not the model's inputs, since a program may remove labels before it calls the model."""
        return temporarily(self, _batch=batch if isinstance(batch, Mapping) else None)

    def of_losses(self, losses: Sequence[object]) -> None:
        """Look for torch's cross-entropies of this model's outputs in losses whose backward follows."""
        self._divisor, self._has_weights = None, False
        if not self.is_on or not self._outputs:
            return
        for node in self._nodes_from([loss.grad_fn for loss in losses if isinstance(loss, Tensor)]):
            if _CROSS_ENTROPY.fullmatch(node.name()) is None:
                continue
            below = list(self._nodes_from([node]))
            is_own = any(x._sequence_nr() in self._outputs for x in below)
            if is_own or _is_of_features(below):  # another model's loss is none of this one's
                with contextlib.suppress(RuntimeError):  # a graph that was freed, of which torch itself tells
                    # The program's hooks on saved tensors, such as those that offload, may unpack a tensor only once.
                    if node._raw_saved_target.unpack_hook is None:
                        self._see_cross_entropy(node, is_own=is_own)

    def _nodes_from(self, nodes: list[Any]) -> Iterator[Any]:
        """Yield the autograd nodes that some nodes lead to, and that are not older than this model's output."""
        seen, oldest = set[GraphNode](), min(self._outputs)
        while nodes:
            node = nodes.pop()
            if node is None or node in seen or node._sequence_nr() < oldest:
                continue
            seen.add(node)
            yield node
            nodes += [following for following, _ in node.next_functions]

    def _see_cross_entropy(self, node: Any, *, is_own: bool) -> None:
        """Count what torch divides a mean by, labels or their weights, and see if the labels number the rows."""
        if is_own and node._saved_reduction == _MEAN:
            self._divisor = node._saved_total_weight.detach() + (0 if self._divisor is None else self._divisor)
            self._has_weights |= node._saved_weight is not None
        if not self._is_left_out:
            self._pairs.see(node)

    def look(self, inputs: Batch, output: object, known: Tensor | None = None) -> None:
        """Compare the ranks once backward from a loss reaches the model's output.

        Args:
            inputs: the inputs of the pass.
            output: the model's output.
            known: the output's loss, if it is the loss of the global batch. A pass in which backward reaches this loss
                is not compared.
        """
        self._is_left_out, self._divisor = False, None
        # Only the known loss uses sharded logits, and it overwrites them.
        kinds = (Tensor, DeferredLogits)
        tensors = [x for x in tensors_of(output) if x.requires_grad and x is not known and type(x) in kinds]
        if not tensors:
            return
        self._outputs = frozenset(x.grad_fn._sequence_nr() for x in tensors if x.grad_fn is not None)
        batch, is_pass = (inputs, True) if self._batch is None else (self._batch, False)
        kept = labels_beside(inputs.values()) if is_pass and "labels" not in inputs else None
        has_mask = _mask_of(inputs) is not None
        is_counted = not is_pass or kept is not None or "labels" in batch or has_mask
        used: list[Tensor] = []
        # A hook that held its own tensor would keep that tensor alive forever.
        device, has_known = tensors[0].device, known is not None
        is_queued = is_known = is_own = False

        def compare() -> None:
            if not (is_known or self._is_left_out):
                # Moved to the group's device, since a batch may still be on the host.
                counted = rows_and_labels(batch, with_mask=is_pass, in_mask=is_own).to(device, non_blocking=True)
                if self._divisor is not None:
                    counted[1] = self._divisor.to(device, non_blocking=True)
                elif kept is not None:  # labels from the same batch of the loader, which the model was not given
                    counted[1] = kept.to(device, non_blocking=True)
                elif used:
                    counted[1] = torch.stack(used).sum()
                self._compare(counted)

        def compare_last() -> None:
            # Queued again, to follow the reductions of gradients: a rank with an unused parameter, such as one of a
            # layer that it drops, starts these only at the end of backward, and the others before.
            torch.autograd.Variable._execution_engine.queue_callback(compare)

        def queue(gradient: Tensor) -> None:
            nonlocal is_queued
            if not is_counted and gradient.ndim == 3 and gradient.dtype is not torch.float16:  # which underflows
                # Nothing says which tokens count, but a token that no loss uses has a gradient of zeros.
                used.append((torch.linalg.vector_norm(gradient, torch.inf, -1) != 0).sum())
            if not is_queued:
                is_queued = True
                torch.autograd.Variable._execution_engine.queue_callback(compare_last)

        def is_used(_: Tensor) -> None:
            nonlocal is_known, is_own
            is_known, is_own = has_known, not has_known

        for tensor in tensors:
            watch_gradient(tensor, queue)
        loss = loss_of(output) if known is None else known
        if loss is not None and loss.requires_grad:
            loss.register_hook(is_used)

    def _compare(self, counted: Tensor) -> None:
        if not self.is_on:
            return
        ranks = all_gather(counted[None], self.dp)
        earlier, self._earlier = self._earlier, read_later(ranks)
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
        if len({labels / rows for rows, labels in ranks if rows}) == 1:  # the numbers of rows say it all
            ranks = [[rows, -1] for rows, _ in ranks]
        logger.warning(
            "the model's loss is of an unknown kind, or the program computes its own, and the data-parallel ranks "
            "had %s. Data parallelism averages the ranks' means, so a row or label of a rank that has fewer of them "
            "weighs more than on one device. For the mean over the global batch, write loss = "
            "meshwright.global_mean(model, loss, count), where count is the number of items that this rank's loss "
            "averages over, for example (labels != -100).sum(), or the sum of their weights. If the "
            "model returns the loss, you may set ToDistributedConfig(loss_averages_over='rows'), 'labels' or a "
            "callable that counts in a batch instead",
            said_of_ranks(ranks, "labels, by their weights" if self._has_weights else "labels or tokens that count"),
        )


class _PairedRows:
    """Tells of a program's own contrastive loss, which compares only the rows of one rank with each other.

    In such a loss row i of one side belongs to row i of the other, so the labels of a cross-entropy over as many
    classes as rows number the rows. Labels of classes do so by chance alone: once in ``rows ** rows`` batches.

    Args:
        dp: the axis whose ranks have different rows.
        warns: whether this rank warns.
    """

    def __init__(self, dp: Axis, *, warns: bool):
        self._dp = dp
        self._is_open = warns and dp.size > 1
        self._evidence = 0.0

    def see(self, node: Any) -> None:
        """See the autograd node of a cross-entropy of a backward pass."""
        if not self._is_open or "2D" in node.name():
            return
        labels, scores = node._saved_target, node._saved_self
        rows = len(labels) if labels.ndim else 0
        if rows == 1:  # which shows nothing, and a look at the label would wait for the device
            return
        if tuple(scores.shape) != (rows, rows) or not torch.equal(labels, torch.arange(rows, device=labels.device)):
            self._is_open = False
            return
        self._evidence += rows * math.log(rows)
        if self._evidence > _ENOUGH:
            self._is_open = False
            logger.warning(
                "the labels of the program's cross-entropy number the %d rows of this rank: such a loss compares the "
                "rows with each other, and each of the dp=%d ranks compares only its own, where one device compares "
                "all. For the loss of one device, compute it from the rows of all ranks: features = "
                "meshwright.gather_rows(features)",
                rows,
                self._dp.size,
            )


def _is_of_features(nodes: Sequence[Any]) -> bool:
    """Return whether a loss is computed from plain tensors alone, such as features that a model gave without a graph.

    Their gradients reach the model by another backward pass, in which nothing shows what the loss was.
    """
    leaves = [node.variable for node in nodes if node.name().endswith("AccumulateGrad")]
    return bool(leaves) and not any(isinstance(leaf, nn.Parameter) for leaf in leaves)


def said_of_ranks(ranks: list[list[float]], counted: str = "labels or tokens that count") -> str:
    """Return each rank's counts from ``rows_and_labels`` as text."""
    what = "{:g} rows" if ranks[0][1] < 0 else f"{{:g}} rows with {{:g}} {counted}"
    return "; ".join(f"{what.format(*rank)} on rank {index}" for index, rank in enumerate(ranks))


def rows_and_labels(batch: Batch, *, with_mask: bool, in_mask: bool = False) -> Tensor:
    """Return the numbers of rows and of valid labels in a batch, the second -1 if it is unknown.

    Args:
        batch: the batch.
        with_mask: whether to count the tokens that are not padding, if there are no labels.
        in_mask: whether labels of padding do not count, as in a loss of the model's own that reads the mask.
    """
    schema = BatchSchema(batch)
    labels, mask = batch.get("labels"), _mask_of(batch)
    count: Tensor | int = -1
    if isinstance(labels, Tensor):
        ignored = batch.get("ignore_index")
        ignored = ignored if isinstance(ignored, int) else IGNORE_INDEX
        if in_mask and mask is not None and mask.shape == labels.shape and not labels.is_floating_point():
            labels = labels.where(mask != 0, ignored)
        count = valid_labels(labels, ignored)
    elif with_mask and mask is not None:
        count = mask.sum()
    device = next((x.device for x in schema.tensors.values()), torch.device("cpu"))
    return torch.stack([torch.as_tensor(x, device=device, dtype=torch.float64) for x in (schema.rows, count)])


def _mask_of(batch: Batch) -> Tensor | None:
    """Return the mask that chooses what counts in the rows of a batch: of tokens, or of the patches to predict."""
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return mask
    chosen = [x for x in batch.values() if isinstance(x, Tensor) and x.dtype is torch.bool and x.ndim >= 2]
    return chosen[0] if len(chosen) == 1 else None


# torch has no hook that shows the losses of a backward pass, so its function is wrapped once, for all models.
_observers: weakref.WeakSet[UnevenBatches] = weakref.WeakSet()


@functools.cache
def _show_losses() -> None:
    backward: Any = torch.autograd.backward  # which Tensor.backward calls by this name

    @functools.wraps(backward)
    def shown(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if not in_backward():  # a pass inside of another one is of a part of the graph
            losses = tensors if isinstance(tensors, list | tuple) else [tensors]
            for observer in tuple(_observers):
                observer.of_losses(losses)
        backward(tensors, *args, **kwargs)

    torch.autograd.backward = shown


_FIRST = 3  # passes


class PaddedRows:
    """Compares over dp the lengths of rows that are no tensors of a loader.

    Args:
        dp: the axis over which the batch is split.
        guard: the guard, by which the ranks compare their lengths without waiting for a device.
    """

    def __init__(self, dp: Axis, guard: Guard | None):
        self._dp, self._guard = dp, guard
        self._passes = 0
        self._has_warned = False

    def look(self, inputs: Mapping[str, object]) -> None:
        """Compare the ranks; in the first passes, all of them make this call."""
        self._passes += 1
        if self._passes > _FIRST or self._guard is None or not self._guard.is_current:
            return
        mask, labels = inputs.get("attention_mask"), inputs["labels"]
        length = 0
        if type(mask) is Tensor and type(labels) is Tensor and mask.ndim == 2 and mask.shape == labels.shape:
            length = mask.shape[1] if BatchShare.of(inputs.values()) is None else 0
        if self._guard.agree("length of the rows", str(length), group=self._dp.group):
            return
        own = torch.full((1, 3), length, dtype=torch.long, device=getattr(labels, "device", None))
        if isinstance(mask, Tensor) and isinstance(labels, Tensor) and length:
            is_first = mask[:, 0].to(labels.device) != 0
            own[0, 1] = (~is_first).any()
            own[0, 2] = (is_first & (labels[:, 0] != IGNORE_INDEX)).any()
        ranks = read_later(all_gather(own, self._dp))()
        most = max(n for n, *_ in ranks)
        # Behind padding, the first token of such a rank's row is a label that one device counts.
        misses = [rank for rank, (n, _, begins) in enumerate(ranks) if 0 < n < most and begins]
        is_left = any(has_padding for n, has_padding, _ in ranks if n)
        if is_left and misses[:1] == [self._dp.rank] and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the program pads on the left, and this rank's rows have length %d while another data-parallel rank's "
                "rows of the same batch have length %d. One device pads all rows to the longest one, and the first "
                "token after padding is a label, so the loss differs from that of one device. Pad in the loader, "
                "DataLoader(dataset, collate_fn=...), whose batches get one length over the ranks, or pad all batches "
                "to one length, tokenizer.pad(rows, padding='max_length', max_length=N)",
                length,
                most,
            )
