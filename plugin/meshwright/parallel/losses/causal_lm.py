"""The causal-LM loss: on every rank the mean over all valid tokens of the global batch, as on one device.

``CausalLMLoss`` replaces transformers' ``ForCausalLMLoss`` as ``model.loss_function``. It shifts labels in the same way
and takes the same arguments, including ``shift_labels``, ``ignore_index`` and ``num_items_in_batch``.

A model's forward may add terms to the result of its loss function, such as a penalty, and these are detected. The loss
function returns the loss of the global batch, and so does the load-balancing loss of a model with experts. How other
terms depend on the batch is unknown.
"""

from __future__ import annotations

import contextlib
import logging

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.mesh.axes import Axis
from meshwright.parallel.batch.mean_over_ranks import IGNORE_INDEX, GlobalMean, valid_labels
from meshwright.parallel.losses.batch_loss import Batch, BatchLoss
from meshwright.parallel.losses.cross_entropy import VocabParallelCrossEntropy, Words
from meshwright.parallel.losses.deferred_logits import Deferred, deferred_of, without_stand_in
from meshwright.parallel.output_loss import loss_of
from meshwright.parallel.sequence_parts import Parted, SequenceParts
from meshwright.parallel.shards.stand_in import ShardedLogits
from meshwright.parallel.tensor_checks import require_words
from meshwright.temporarily import temporarily

logger = logging.getLogger(__name__)


class CausalLMLoss(BatchLoss):
    """Sums the loss over the valid tokens of all data-parallel ranks and divides by the tokens' count; see GlobalMean.

    Args:
        vocab_size: the number of words in the full vocabulary.
        tp: the axis over which the logits may be sharded.
        mean: the mean over the axis that splits the batch.
        is_aligned: whether the model passes its labels as they are, without a shift, as ``shift_labels``.
    """

    def __init__(self, *, vocab_size: int, tp: Axis, mean: GlobalMean, is_aligned: bool = False):
        self.vocab_size, self.tp, self.mean, self.is_aligned = vocab_size, tp, mean, is_aligned
        self.region: Parted | None = None  # under context parallelism: knows the tokens of this rank's logits
        self._smoothing = 0.0

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | float | None = None,
        ignore_index: int = IGNORE_INDEX,
        shift_labels: Tensor | None = None,
        **_: object,
    ) -> Tensor:
        if shift_labels is None:
            assert labels is not None, "a loss needs labels or shift_labels"
            shift_labels = shift(labels, ignore_index)
        if self.region is not None:
            shift_labels = self.region.parts.take(shift_labels, 1, fill=ignore_index)
        targets_N = shift_labels.reshape(-1).to(logits.device)
        count = valid_labels(targets_N, ignore_index).reshape(1)
        deferred = deferred_of(logits)
        if deferred is not None and not deferred.is_computed:
            return self._of_head(deferred, targets_N, count, num_items_in_batch, ignore_index)
        loss_sum = self._sum(without_stand_in(logits), targets_N, ignore_index)
        return self.mean.of(loss_sum.reshape(1), count, num_items_in_batch)

    def smoothed(self, factor: float) -> contextlib.AbstractContextManager[None]:
        """Compute the loss with label smoothing inside the context, as transformers' ``LabelSmoother`` does."""
        return temporarily(self, _smoothing=factor)

    def counts(self, batch: Batch) -> Tensor:
        """Return the number of valid labels in this rank's part of a batch."""
        if self.is_aligned and "shift_labels" not in batch:
            batch = {**batch, "shift_labels": batch["labels"]}
        return next_words(batch, None if self.region is None else self.region.parts).reshape(1)

    def of_output(self, batch: Batch, output: object) -> object:
        """Check a forward pass's output and return it unchanged, since its loss is already that of the global batch."""
        check_nothing_added(self.mean, output)
        return output

    def _of_head(
        self, deferred: Deferred, targets_N: Tensor, count: Tensor, num_items: Tensor | float | None, ignore_index: int
    ) -> Tensor:
        """Return the loss of logits that the head has not computed."""
        columns = deferred.columns
        vocab_size = self.vocab_size or columns
        words = self._words(targets_N, columns, vocab_size, ignore_index)
        if deferred.product == torch.float16:  # float16 cannot represent gradients before a GradScaler scales them
            return self.mean.of(deferred.loss(targets_N, words, None).reshape(1), count, num_items)
        divisors = self.mean.known_divisors(count, num_items)
        factor = self.mean.factors(divisors).to(torch.promote_types(deferred.dtype, torch.float32))
        loss_sum = deferred.loss(targets_N, words, factor)
        return self.mean.of_weighted(loss_sum.reshape(1), count, divisors, has_items=num_items is not None)

    def _words(self, targets_N: Tensor, columns: int, vocab_size: int, ignore_index: int) -> Words:
        """Return the words of this rank's columns, once all targets are words of the vocabulary."""
        require_words(targets_N, vocab_size, "label", ignored=ignore_index)
        return Words.of_columns(
            columns, vocab_size=vocab_size, ignored=ignore_index, axis=self.tp, smoothing=self._smoothing
        )

    def _sum(self, logits: Tensor, targets_N: Tensor, ignore_index: int) -> Tensor:
        if isinstance(logits, ShardedLogits):
            logits = logits.as_subclass(Tensor)
        columns = logits.shape[-1]
        logits = logits.reshape(-1, columns)
        # Half precision is too coarse for a softmax over a vocabulary.
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if columns >= self.vocab_size:  # not sharded; a traced step's fake tensors are never ShardedLogits
            return F.cross_entropy(
                logits, targets_N, ignore_index=ignore_index, reduction="sum", label_smoothing=self._smoothing
            )
        words = self._words(targets_N, columns, self.vocab_size, ignore_index)
        return VocabParallelCrossEntropy.apply(logits, targets_N, words)


def shift(labels: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Shift labels so that each token's target is the token after it."""
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]


def next_words(batch: Batch, parts: SequenceParts | None = None) -> Tensor:
    """Return the number of a batch's valid labels after the shift: the tokens that the loss predicts.

    Args:
        batch: the arguments of the model's forward.
        parts: under context parallelism, which tokens of a row to count.
    """
    targets, ignore_index = batch.get("shift_labels"), batch.get("ignore_index", IGNORE_INDEX)
    targets = shift(batch["labels"], ignore_index) if targets is None else targets
    return valid_labels(targets if parts is None else parts.take(targets, 1, fill=ignore_index), ignore_index)


def check_nothing_added(mean: GlobalMean, output: object) -> None:
    """Raise if the forward added a term to the loss of a micro-batch, since the losses of micro-batches are summed.

    Args:
        mean: the global mean that the model's loss function computes.
        output: the output of the model's forward.

    Raises:
        ValueError: if the forward added a term.
    """
    if not mean.returned(loss_of(output)):
        raise ValueError(
            "the model's forward adds something to the loss that its loss function returns, such as a penalty or "
            "an auxiliary loss of its own. With micro-batches this term would count once "
            "for each of them. Set ParallelPlan(gradient_accumulation_steps=1, micro_batch_size=None), or remove the "
            "term from the model and add it to the loss that the model returns"
        )


class AddedToLoss:
    """Warns once that data parallelism averages added terms over the ranks.

    Args:
        mean: the global mean that the model's loss function computes.
    """

    def __init__(self, mean: GlobalMean):
        self.mean = mean
        self._has_warned = mean.dp.size == 1

    def watch(self, model: nn.Module) -> None:
        """Check every output of the model from now on."""
        model.register_forward_hook(self._look)

    def _look(self, model: nn.Module, _: object, output: object) -> None:
        if self._has_warned or not torch.is_grad_enabled() or self.mean.returned(loss_of(output)):
            return
        self._has_warned = True
        if self.mean.dp.rank == 0:
            logger.warning(
                "the forward of %s adds something to the loss that its loss function returns, such as a penalty "
                "or an auxiliary loss of its own. Each data-parallel rank computes this term "
                "from its own rows, and the ranks' values are averaged. The result differs from one device unless all "
                "ranks compute the same value. Remove the term from the model. If the program computes it instead, "
                "write loss = meshwright.global_mean(model, loss, count)",
                type(model).__name__,
            )
