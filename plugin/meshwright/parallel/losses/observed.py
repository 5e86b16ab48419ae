"""Finds what a loss is the mean over, for a model whose own forward calls one of torch's loss functions.

The forward is run on fake tensors. If the loss that it returns is what a loss function of torch has returned, the
function's targets show which labels count: all of them, all but the first of each row, or those of real tokens.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.errors import PlanError
from meshwright.parallel.autograd_graph import loss_of
from meshwright.parallel.batch.mean_over_ranks import valid_labels
from meshwright.parallel.experts.routers import OPTION
from meshwright.parallel.fake_passes.fake_pass import run_without_values
from meshwright.parallel.losses.causal_lm import Batch

_ROWS, _LENGTH, _INSTEAD = 2, 8, "a plan without micro-batches"
_LOSSES = (F.cross_entropy, F.nll_loss)


@dataclass(frozen=True, kw_only=True)
class ObservedLoss:
    """A loss that is the mean over a batch's labels, and which of them count.

    Args:
        ignore_index: the label that does not count.
        is_shifted: whether the first label of each row does not count, since no token predicts it.
        is_masked: whether labels of padding, by the mask of the tokens, do not count.
    """

    ignore_index: int
    is_shifted: bool = False
    is_masked: bool = False

    def count(self, batch: Batch) -> Tensor:
        """Return how many of a batch's labels count."""
        labels, mask = batch["labels"], batch.get("attention_mask")
        if self.is_shifted:
            labels = labels[..., 1:]
        if self.is_masked and isinstance(mask, Tensor):
            labels = labels[mask[..., -labels.shape[-1] :] != 0]
        return valid_labels(labels, self.ignore_index)


def observe_loss(model: nn.Module) -> ObservedLoss | None:
    """Return what a model's loss is the mean over; None if a pass on fake tensors does not show it.

    Args:
        model: the model, with or without memory. It is not changed.
    """
    if "labels" not in inspect.signature(model.forward).parameters:
        return None
    return _observed(model)


def _observed(model: nn.Module) -> ObservedLoss | None:
    inner = [module for module in model.modules() if module is not model]
    for watch, parts in ((_LossCalls, []), (_LossCallsAtEnd, inner)):
        with contextlib.ExitStack() as stack:
            for part in parts:
                stack.enter_context(_passes_through(part))
            with contextlib.suppress(PlanError):
                return _observe(model, watch)
    return None


def _observe(model: nn.Module, watch: Callable[[], _LossCalls]) -> ObservedLoss | None:
    for labels in ((_ROWS, _LENGTH), (_ROWS,)):  # of tokens or of rows
        for options in _options(model):
            calls = watch()
            try:
                with calls:
                    output = run_without_values(
                        model, rows=_ROWS, length=_LENGTH, labels=labels, instead=_INSTEAD, options=options
                    )
            except PlanError:
                continue
            return calls.explain(loss_of(output), labels)
    raise PlanError(f"{type(model).__name__} could not be run on tensors without values")


@contextlib.contextmanager
def _passes_through(part: nn.Module) -> Iterator[None]:
    """Let a part return its input where it cannot run without values; the innermost part that can do so does it."""
    own = vars(part).get("forward")
    forward = part.forward

    @functools.wraps(forward)
    def run(*args: object, **kwargs: object) -> object:
        try:
            return forward(*args, **kwargs)
        except Exception:  # whatever a module raises without values
            hidden = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
            if hidden is None or not hidden.is_floating_point() or hidden.ndim < 2:
                raise
            return hidden.clone()

    vars(part)["forward"] = run
    try:
        yield
    finally:
        if own is None:
            del vars(part)["forward"]
        else:
            vars(part)["forward"] = own


def _options(model: nn.Module) -> Iterator[dict[str, object]]:
    """Yield arguments of forward beside tokens and labels.

    An encoder's result takes the place of inputs whose shapes are not known, such as those of audio.
    """
    parameters = inspect.signature(model.forward).parameters
    ones: dict[str, object] = {"attention_mask": torch.ones(_ROWS, _LENGTH, dtype=torch.int64)}
    mask = ones if "attention_mask" in parameters else {}
    plain: dict[str, object] = {OPTION: False} if OPTION in parameters else {}  # the loss without those of routers
    width = getattr(getattr(model, "config", None), "hidden_size", None)
    if "encoder_outputs" in parameters and isinstance(width, int):
        dtype = next(model.parameters()).dtype
        yield {"encoder_outputs": _EncoderOutput(torch.zeros(_ROWS, _LENGTH, width, dtype=dtype)), **plain}
    yield {**mask, **plain}
    yield plain


class _EncoderOutput(tuple[Tensor]):
    """The result of an encoder, read by place or by name."""

    def __new__(cls, hidden: Tensor) -> _EncoderOutput:
        return super().__new__(cls, (hidden,))

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    hidden_states = attentions = None


class _LossCalls(TorchFunctionMode):
    """Notes the calls of torch's loss functions, and whether a mask chooses the labels that count.

    A mask chooses all tokens here, since how many it chooses is a value.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[inspect.BoundArguments, object]] = []
        self._is_masked = self._is_padded = False

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and isinstance(args[1], Tensor) and args[1].dtype is torch.bool:
            self._is_masked |= not args[0].is_floating_point()
            return args[0].flatten(0, args[1].ndim - 1)
        self._is_padded |= func is F.pad and not args[0].is_floating_point()
        result = func(*args, **(kwargs or {}))
        if func in _LOSSES:
            call = inspect.signature(func).bind(*args, **(kwargs or {}))
            call.apply_defaults()
            self._calls.append((call, result))
        return result

    def explain(self, loss: Tensor | None, labels: tuple[int, ...]) -> ObservedLoss | None:
        """Return what a loss is the mean over, if a loss function has returned it for labels of this shape."""
        call = next((call.arguments for call, result in self._calls if loss is not None and result is loss), None)
        if call is None or call["reduction"] != "mean" or call["weight"] is not None:
            return None
        if self._is_padded:  # labels moved by a place, of which the call does not show the first
            return None
        found = call["target"].numel()
        is_shifted = found == labels[0] * (labels[-1] - 1) and len(labels) > 1
        if found != prod(labels) and not is_shifted:
            return None
        return ObservedLoss(ignore_index=call["ignore_index"], is_shifted=is_shifted, is_masked=self._is_masked)


class _LossCallsAtEnd(_LossCalls):
    """The calls in a pass in which parts may have stopped midway, so that their masks say nothing of the labels."""

    def explain(self, loss: Tensor | None, labels: tuple[int, ...]) -> ObservedLoss | None:
        """See _LossCalls."""
        found = super().explain(loss, labels)
        return None if found is None or found.is_masked else found
