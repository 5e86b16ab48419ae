"""The losses of causal LMs over the global batch: by transformers' loss function, by CrossEntropyLoss in forward, or by
a forward that a package has replaced.

``CausalLMLoss`` replaces transformers' ``ForCausalLMLoss`` as ``model.loss_function``. It shifts labels in the same way
and takes the same arguments, including ``shift_labels``, ``ignore_index`` and ``num_items_in_batch``.

A model's forward may add terms to the result of its loss function, such as a penalty, and these are detected. The loss
function returns the loss of the global batch, and so does the load-balancing loss of a model with experts. How other
terms depend on the batch is unknown.

These are the decoders of BART and its relatives (``BartForCausalLM``, ``WhisperForCausalLM``, ...). They do not shift
the labels, and do not call ``model.loss_function``. The stand-in for the logits passes this call on to ``TokenLoss``.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.errors import PlanError, UnreadableTensorError
from meshwright.mesh.axes import Axis
from meshwright.parallel.async_numbers import require_words
from meshwright.parallel.autograd_graph import loss_of
from meshwright.parallel.batch.mean_over_ranks import IGNORE_INDEX, GlobalMean, valid_labels
from meshwright.parallel.losses.cross_entropy import VocabParallelCrossEntropy, Words
from meshwright.parallel.losses.deferred_logits import Deferred, deferred_of, without_stand_in
from meshwright.parallel.method_chain import BatchStep, StepOrder, find_chain
from meshwright.parallel.sequence_parts import Parted, SequenceParts
from meshwright.parallel.shards.stand_in import ShardedLogits
from meshwright.temporarily import temporarily

Batch = Mapping[str, Any]  # the arguments of a model's forward


class BatchLoss:
    """A model's loss, which on every rank is the loss of the global batch."""

    mean: GlobalMean

    def counts(self, batch: Batch) -> Tensor:
        """Return the number of items that this rank's loss averages over, with one number for each of its means."""
        raise NotImplementedError

    def of_output(self, batch: Batch, output: object) -> object:
        """Return ``output``, from the model's own forward, with its loss replaced by that of the global batch."""
        raise NotImplementedError

    def is_global(self) -> None:
        """Say that the loss of the output which the model returns next is already that of the global batch.

        Most losses have nothing to do: nothing averages the loss of their output.
        """


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


def calls_cross_entropy(model: nn.Module) -> bool:
    """Return whether all that a model's forward does with its logits is ``CrossEntropyLoss()(logits.view(-1, V), ..)``.

    Args:
        model: the model, without adapters around it.
    """
    owner = next(kind for kind in type(model).__mro__ if "forward" in vars(kind))
    code = getattr(inspect.unwrap(vars(owner)["forward"]), "__code__", None)
    if code is None or not owner.__name__.endswith("ForCausalLM") or "transformers.models." not in owner.__module__:
        return False
    names = {*code.co_names, *code.co_varnames}
    # Forwards that shift or measure the logits need their values.
    return {"CrossEntropyLoss", "vocab_size", "view"} <= names and not any("shift" in x or x == "size" for x in names)


class TokenLoss:
    """Computes the two operations of such a forward from the head's input, without the logits of all tokens.

    Args:
        vocab_size: the number of words in the full vocabulary; 0 if every rank has all of them.
        tp: the axis over which the logits may be sharded.
    """

    def __init__(self, *, vocab_size: int, tp: Axis):
        # The mean over this rank's labels: what makes it the mean over the global batch sees only the output.
        self._loss = CausalLMLoss(vocab_size=vocab_size, tp=tp, mean=GlobalMean(Axis("dp")))

    def __call__(self, func: Callable[..., object], args: Sequence[Any], kwargs: Batch) -> Tensor | None:
        """Return the result of a torch function on unread logits, its first argument; None for other functions."""
        logits, *rest = args
        deferred = deferred_of(logits)
        assert deferred is not None
        if func is Tensor.view:
            is_flat = not kwargs and rest == [-1, self._loss.vocab_size or deferred.columns]
            return deferred.flat() if is_flat else None
        if func is not F.cross_entropy or len(rest) != 1 or any(kwargs.get(x) is not None for x in _UNKNOWN):
            return None
        (targets,) = rest
        is_mean = kwargs.get("reduction", "mean") == "mean"
        if not is_mean or targets.ndim != 1 or targets.is_floating_point() or deferred.hidden.ndim != 2:
            return None
        with self._loss.smoothed(kwargs.get("label_smoothing", 0.0)):
            return self._loss(logits, None, shift_labels=targets, ignore_index=kwargs.get("ignore_index", -100))


_UNKNOWN = ("weight", "size_average", "reduce")


def stock_owner(model: nn.Module) -> type[nn.Module] | None:
    """Return the class of transformers that has a model's forward; None if the forward is of another class."""
    owner = next(kind for kind in type(model).__mro__ if "forward" in vars(kind))
    return owner if owner.__module__.startswith("transformers.models.") else None


class CallsLossFunction(BatchStep):
    """The step around a replaced forward.

    Args:
        model: the model.
        mean: what the model's loss function computes.
        replacement: the name of the function that is the model's forward.
    """

    order = StepOrder.OWN_LOSS

    def __init__(self, model: nn.Module, mean: GlobalMean, replacement: str):
        super().__init__(model)
        self.mean, self.replacement = mean, replacement

    def __call__(self, *args: object, **kwargs: object) -> object:
        batch = self.batch_of(args, kwargs)
        if batch.get("labels") is None or not torch.is_grad_enabled():
            return self.method(**batch)
        self.mean.returned(None)  # forget the mean of an earlier pass
        try:
            output = self.method(**batch)
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            is_ours = type(error).__module__ == PlanError.__module__ and not isinstance(error, UnreadableTensorError)
            if self.mean.is_pending or is_ours or isinstance(error, torch.OutOfMemoryError):
                raise
            what = f"failed before it called the model's loss function ({type(error).__name__}: {error})"
            raise self._refusal(what) from error
        loss = loss_of(output)
        if loss is not None and loss.requires_grad and not self.mean.is_pending:
            raise self._refusal("returns a loss without calling the model's loss function")
        return output

    def _refusal(self, what: str) -> PlanError:
        cure = "Keep the model's own forward, whose head and loss run in chunks here"
        if self.replacement.startswith("liger_kernel."):
            cure += ": apply_liger_kernel_to_llama(fused_linear_cross_entropy=False)"
        return PlanError(
            f"the forward of {type(self.model).__name__} was replaced by {self.replacement}, which {what}. Such a loss "
            "is the mean of the tokens of one rank or one micro-batch, and a weight that the forward reads itself may "
            f"be a part of the whole. {cure}; or let the new forward compute the logits by the model's head, and "
            "return self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)"
        )


def replacement_of(model: nn.Module) -> str | None:
    """Return the name of a model's forward if it is not one that the package of a class of the model gave the class."""
    chain = find_chain(model)
    method = inspect.unwrap(model.forward if chain is None else chain.method)
    function = inspect.unwrap(getattr(method, "__func__", method))
    if "labels" not in inspect.signature(function).parameters:
        return None
    home = function.__module__
    own = [
        inspect.unwrap(vars(kind)["forward"])
        for kind in type(model).__mro__
        if "forward" in vars(kind) and kind.__module__.partition(".")[0] == home.partition(".")[0]
    ]
    return None if function in own else f"{home}.{getattr(function, '__name__', type(function).__name__)}"
