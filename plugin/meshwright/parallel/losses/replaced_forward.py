"""Models whose forward was replaced, such as by a package with kernels that compute head and loss in one."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from meshwright.errors import PlanError, UnreadableTensorError
from meshwright.parallel.batch.mean_over_ranks import GlobalMean
from meshwright.parallel.method_chain import BatchStep, StepOrder, find_chain
from meshwright.parallel.output_loss import loss_of


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
