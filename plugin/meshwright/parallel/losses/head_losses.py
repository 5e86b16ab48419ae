"""Turn a loss that averages over one rank's rows or labels into the mean over the global batch.

What a model's loss averages over is known from one of four sources: the transformers loss function that the model
calls, the class of a model that computes the loss in its own forward, ToDistributedConfig.loss_averages_over, or a
pass on fake tensors.
"""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import CodeType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.errors import PlanError
from meshwright.mesh.axes import Axis
from meshwright.parallel.autograd_graph import loss_of, with_loss
from meshwright.parallel.batch.mean_over_ranks import IGNORE_INDEX, GlobalMean, valid_labels
from meshwright.parallel.losses.causal_lm import (
    AddedToLoss,
    Batch,
    BatchLoss,
    CausalLMLoss,
    check_nothing_added,
    next_words,
    replacement_of,
    stock_owner,
)
from meshwright.parallel.losses.observed import observe_loss
from meshwright.parallel.method_chain import arguments
from meshwright.plan.config import AveragesOver


@dataclass(frozen=True, kw_only=True)
class LossKind:
    """The kind of loss that a model has.

    Args:
        counts: a function that counts, in this rank's part of a batch, the items that the loss averages over.
        is_function: whether the model calls the loss as ``model.loss_function``; otherwise only the output shows it.
        is_causal_lm: whether the loss is the causal-LM loss, which works on logits sharded over the vocabulary.
        is_aligned: whether the model itself says that a causal-LM loss needs no shift of the labels.
        has_positions: whether the loss is the average of two means, over start positions and over end positions.
        is_observed: whether a pass on fake tensors has shown the kind; a call may ask for more than that pass did.
        part: the name of the child module that computes the loss, which the model is to return unchanged.
    """

    counts: Callable[[Batch], Tensor]
    is_function: bool = False
    is_causal_lm: bool = False
    is_aligned: bool = False
    has_positions: bool = False
    is_observed: bool = False
    part: str | None = None


def find_loss(model: nn.Module, averages_over: AveragesOver | None = None) -> LossKind | None:
    """Return the kind of a model's loss, or None for a user-defined loss that no option describes.

    Args:
        model: the model, without adapters around it.
        averages_over: ToDistributedConfig.loss_averages_over.

    Raises:
        PlanError: if ``averages_over`` is set for a loss whose kind is known without it.
    """
    kind = _of_function(model) or _of_class(model)
    if averages_over is None:
        return kind or _of_pass(model) or _of_part(model) or _of_replaced(model)
    if kind is not None:
        raise PlanError(
            f"ToDistributedConfig.loss_averages_over={averages_over!r}: the loss that {type(model).__name__} returns "
            "is transformers' own and is exact without the option; leave it out. For a loss that the program computes "
            "from the model's outputs, write loss = meshwright.global_mean(model, loss, count)"
        )
    if averages_over == "rows":
        return LossKind(counts=_rows)
    if averages_over == "labels":
        return LossKind(counts=_labels)
    return LossKind(counts=lambda batch: torch.as_tensor(averages_over(dict(batch))))


def _of_function(model: nn.Module) -> LossKind | None:
    name = getattr(getattr(model, "loss_function", None), "__name__", None)
    kind = _FUNCTIONS.get(name or "")
    names = _names_read(type(model))
    # Every model of transformers has the attribute, but older families do not read it.
    if kind is None or "loss_function" not in names:
        return None
    if kind.is_causal_lm and "shift_labels" in names:
        observed = observe_loss(model)
        return replace(kind, is_aligned=observed is not None and not (observed.is_shifted or observed.is_masked))
    return kind


def _of_replaced(model: nn.Module) -> LossKind | None:
    """Return the loss kind of a class whose forward was replaced by one that does not name the loss function, or None.

    What such a forward computes is not known, so that a training pass in which it leaves out the function is refused.
    """
    name = getattr(getattr(model, "loss_function", None), "__name__", None)
    return None if replacement_of(model) is None else _FUNCTIONS.get(name or "")


def _of_class(model: nn.Module) -> LossKind | None:
    """Return the loss kind of a head whose forward computes the loss in the same way in all families, or None."""
    owner = stock_owner(model)
    task = None if owner is None else re.search(r"For([A-Z]\w*?)(Simple)?$", owner.__name__)
    if owner is None or task is None:
        return None
    names = _names_read(owner)
    if "CrossEntropyLoss" not in names:
        return None
    if task[1] == "QuestionAnswering":  # heads that search for spans instead have no ignored_index
        return LossKind(counts=_positions, has_positions=True) if "ignored_index" in names else None
    return LossKind(counts=_labels) if task[1] in _TASKS else None


def _of_pass(model: nn.Module) -> LossKind | None:
    """Return the loss kind of a transformers model that a pass on fake tensors shows, or None."""
    observed = None if stock_owner(model) is None else observe_loss(model)
    return None if observed is None else LossKind(counts=observed.count, is_observed=True)


def _of_part(model: nn.Module) -> LossKind | None:
    """Return the loss kind of a model that passes its labels to a child, such as a decoder after a tower, or None."""
    forward = next(vars(kind)["forward"] for kind in type(model).__mro__ if "forward" in vars(kind))
    code = getattr(inspect.unwrap(forward), "__code__", None)
    is_stock = getattr(forward, "__module__", "").startswith("transformers.models.")
    if code is None or not is_stock or "labels" not in code.co_varnames or "loss" not in code.co_names:
        return None
    stored = [step.argval for step in dis.get_instructions(code) if step.opname.startswith("STORE_")]
    if any("labels" in (name if isinstance(name, tuple) else (name,)) for name in stored):
        return None  # the child gets other labels
    children = [(name, child) for name, child in model.named_children() if name in code.co_names]
    heads = [(name, child) for name, child in children if "labels" in inspect.signature(child.forward).parameters]
    kind = find_loss(heads[0][1]) if len(heads) == 1 else None
    if kind is None or kind.has_positions:
        return None
    return LossKind(counts=kind.counts, is_observed=True, part=heads[0][0])


def _names_read(kind: type) -> set[str]:
    """Return the names in the code of a class's forward and of the base classes' forwards that it calls."""
    names: set[str] = set()
    for owner in (k for k in kind.__mro__ if "forward" in vars(k)):
        code = getattr(inspect.unwrap(vars(owner)["forward"]), "__code__", None)
        own = {*code.co_names, *code.co_varnames, *_arguments_in(code)} if code is not None else set()
        names |= own
        if not own & {"super", "forward"}:
            break
    return names


def _arguments_in(code: CodeType) -> Iterator[str]:
    """Yield the names of the arguments in calls, which the code holds as constants."""
    for constant in code.co_consts:
        yield from (x for x in (constant if isinstance(constant, tuple) else (constant,)) if isinstance(x, str))


def _labels(batch: Batch) -> Tensor:
    labels = batch.get("labels")
    if not isinstance(labels, Tensor):
        raise ValueError(
            "the model's loss is a mean over the labels of the batch, but the model was called without labels, so the "
            "mean over the global batch is unknown. Call model(..., labels=labels). If you set "
            "ToDistributedConfig.loss_averages_over='labels', you may instead pass a callable that counts in the batch"
        )
    return valid_labels(labels, batch.get("ignore_index", IGNORE_INDEX))


def _rows(batch: Batch) -> Tensor:
    labels = batch.get("labels")
    tensors = (x for x in (labels, *batch.values()) if isinstance(x, Tensor) and x.ndim > 0)
    rows = next(tensors)
    count = torch.tensor(rows.shape[0], device=rows.device)
    # To stay in step with other ranks, a rank without rows runs one row whose labels do not count.
    ignored = batch.get("ignore_index", IGNORE_INDEX)
    return count * (valid_labels(rows, ignored) > 0) if rows is labels and len(rows) == 1 else count


def _positions(batch: Batch) -> Tensor:
    tokens = next(x for name in ("input_ids", "inputs_embeds") if (x := batch.get(name)) is not None)
    return torch.stack([(_clamped(batch[name], tokens.shape[1]) != tokens.shape[1]).sum() for name in _SPAN])


_SPAN = ("start_positions", "end_positions")
_TASKS = {"SequenceClassification", "TokenClassification", "MultipleChoice", "MaskedLM"}
_FUNCTIONS = {
    "ForCausalLMLoss": LossKind(counts=next_words, is_function=True, is_causal_lm=True),
    "ForMaskedLMLoss": LossKind(counts=_labels, is_function=True),
    "ForSequenceClassificationLoss": LossKind(counts=_labels, is_function=True),
    "ForTokenClassification": LossKind(counts=_labels, is_function=True),
    "ForQuestionAnsweringLoss": LossKind(counts=_positions, is_function=True, has_positions=True),
}


def install_loss(model: nn.Module, kind: LossKind, mean: GlobalMean, *, tp: Axis, vocab_size: int) -> BatchLoss:
    """Make a model return the loss of the global batch, and return the object that computes this loss.

    Args:
        model: the model; changed in place.
        kind: the kind of the model's loss.
        mean: the mean over the axis that splits the batch.
        tp: the axis over which a causal LM's logits may be sharded.
        vocab_size: the number of words in the model's full vocabulary.
    """
    if kind.is_causal_lm:
        AddedToLoss(mean).watch(model)
        causal = CausalLMLoss(vocab_size=vocab_size, tp=tp, mean=mean, is_aligned=kind.is_aligned)
        object.__setattr__(model, "loss_function", causal)
        return causal
    if kind.is_function:
        AddedToLoss(mean).watch(model)
        stock: Callable[..., Tensor] = model.loss_function  # type: ignore[assignment]
        own = FunctionLoss(stock, kind, mean)
        object.__setattr__(model, "loss_function", own)
        return own
    loss = OutputLoss(kind, mean)
    loss.watch(model)
    return loss


class FunctionLoss(BatchLoss):
    """Replaces a transformers loss function other than the causal-LM loss, and takes the same arguments.

    Args:
        stock: the replaced function, called for the mean over this rank's rows.
        kind: the kind of the loss.
        mean: the mean over the axis that splits the batch.
    """

    def __init__(self, stock: Callable[..., Tensor], kind: LossKind, mean: GlobalMean):
        self.stock, self.kind, self.mean = stock, kind, mean
        self._signature = inspect.signature(stock)

    def __call__(self, *args: object, **kwargs: object) -> object:
        named = dict(self._signature.bind(*args, **kwargs).arguments)
        named |= named.pop("kwargs", {})
        num_items = named.pop("num_items_in_batch", None)
        if self.kind.has_positions:
            if any(named.get(name) is None for name in _SPAN):
                return None
            return self.mean.of_means(*_span_means(named, named), num_items)
        labels = named["labels"]
        # transformers' regression losses ignore num_items_in_batch.
        num_items = None if labels.is_floating_point() else num_items
        count = valid_labels(labels, named.get("ignore_index", IGNORE_INDEX))
        own = self.stock(**named)
        return self.mean.of_means(own.reshape(1), count.to(own.device).reshape(1), num_items)

    def counts(self, batch: Batch) -> Tensor:
        """See BatchLoss."""
        return self.kind.counts(batch).reshape(-1)

    def of_output(self, batch: Batch, output: object) -> object:
        """See BatchLoss; the loss is already that of the global batch."""
        check_nothing_added(self.mean, output)
        return output


class OutputLoss(BatchLoss):
    """Replaces the loss in a forward's output, this rank's mean, by the mean over the global batch.

    Args:
        kind: the kind of the loss.
        mean: the mean over the axis that splits the batch.
    """

    def __init__(self, kind: LossKind, mean: GlobalMean):
        self.kind, self.mean = kind, mean
        self._of_part: Tensor | None = None  # the loss that the child has returned last
        self.is_done = False  # whether the output that the hook sees next already has the global loss

    def watch(self, model: nn.Module) -> None:
        """From now on, replace the loss in every output of the model."""
        self._signature = inspect.signature(model.forward)
        if self.kind.part is not None:
            model.get_submodule(self.kind.part).register_forward_hook(self._keep)
        # The loss of spans is made from logits, not from the model's own loss: hooks are to see the one that is used.
        model.register_forward_hook(self._replace, with_kwargs=True, prepend=self.kind.has_positions)

    def _keep(self, _: nn.Module, args: object, output: object) -> None:
        self._of_part = loss_of(output)

    def _replace(self, _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> object:
        was_done, self.is_done = self.is_done, False
        if was_done:
            return output
        if self.mean.dp.size > 1:
            self._check_nothing_added(output)
        return self._global(arguments(self._signature, args, kwargs), output)

    def counts(self, batch: Batch) -> Tensor:
        """See BatchLoss."""
        return self.kind.counts(batch).reshape(-1)

    def of_output(self, batch: Batch, output: object) -> object:
        """See BatchLoss."""
        self.is_global()
        self._check_nothing_added(output)
        return self._global(batch, output)

    def is_global(self) -> None:
        """See BatchLoss."""
        self.is_done = True

    def _check_part(self, batch: Batch, own: Tensor) -> None:
        of_part, self._of_part = self._of_part, None
        if own is not of_part:
            raise ValueError(
                f"the model returns another loss than its {self.kind.part}, so it is not known what it averages over. "
                "Set ToDistributedConfig(loss_averages_over='rows'), 'labels' or a callable that counts in a batch"
            )
        if batch.get("num_items_in_batch") is not None:
            raise ValueError(
                f"the loss of the model's {self.kind.part} was divided by num_items_in_batch, but only its mean over "
                "this rank's labels can become the mean over the global batch. Leave the argument out; in a Trainer, "
                "set trainer.model_accepts_loss_kwargs = False"
            )

    def _check_nothing_added(self, output: object) -> None:
        own = loss_of(output)
        grad_fn = None if own is None else own.grad_fn
        if self.kind.is_observed and grad_fn is not None and grad_fn.name() == "AddBackward0":
            raise ValueError(
                "the model's forward adds something to its loss that it does not add in a plain call, such as a "
                "load-balancing loss, which is not the mean of what parts of the batch have. Leave out what asks for "
                "it: pass output_router_logits=False, or set model.config.output_router_logits = False"
            )

    def _global(self, batch: Batch, output: object) -> object:
        own = loss_of(output)
        if own is None:
            return output
        if own.numel() != 1:
            raise ValueError(
                f"the model returned a loss of shape {tuple(own.shape)}, but only a scalar mean can "
                "become the mean over the global batch. Return loss.mean()"
            )
        if self.kind.part is not None:
            self._check_part(batch, own)
        if self.kind.has_positions:
            values = output[1:3] if isinstance(output, tuple | list) else ()
            logits = output if isinstance(output, Mapping) else dict(zip(_SPAN_LOGITS, values, strict=True))
            return with_loss(output, self.mean.of_means(*_span_means(logits, batch)))
        count = self.counts(batch).to(own.device)
        return with_loss(output, self.mean.of_means(own.reshape(1), count).reshape(own.shape))


_SPAN_LOGITS = ("start_logits", "end_logits")


def _span_means(logits: Batch, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return this rank's means over start positions and over end positions, and how many positions each covers."""
    means, counts = [], []
    for logits_name, positions_name in zip(_SPAN_LOGITS, _SPAN, strict=True):
        scores = logits[logits_name]
        positions = _clamped(batch[positions_name].to(scores.device), scores.shape[1])
        means.append(F.cross_entropy(scores, positions, ignore_index=scores.shape[1]))
        counts.append((positions != scores.shape[1]).sum())
    return torch.stack(means), torch.stack(counts)


def _clamped(positions: Tensor, length: int) -> Tensor:
    """Clamp positions as transformers does: positions beyond the row get the ignored index."""
    return (positions.squeeze(-1) if positions.ndim > 1 else positions).clamp(0, length)
