"""The loss of models whose own forward calls torch's CrossEntropyLoss on the logits of all tokens.

These are the decoders of BART and its relatives (``BartForCausalLM``, ``WhisperForCausalLM``, ...). They do not shift
the labels, and do not call ``model.loss_function``. The stand-in for the logits passes this call on to ``TokenLoss``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.mesh.axes import Axis
from meshwright.parallel.batch.mean_over_ranks import GlobalMean
from meshwright.parallel.losses.batch_loss import Batch
from meshwright.parallel.losses.causal_lm import CausalLMLoss
from meshwright.parallel.losses.deferred_logits import deferred_of


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
