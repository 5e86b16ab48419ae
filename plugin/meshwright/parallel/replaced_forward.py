"""Models whose forward another package has replaced, such as one with kernels that compute head and loss in one."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from meshwright.errors import PlanError
from meshwright.parallel.mean_over_ranks import GlobalMean
from meshwright.parallel.method_chain import BatchStep, MethodChain, StepOrder, add_step
from meshwright.parallel.output_loss import loss_of


def check_replaced_forward(model: nn.Module, mean: GlobalMean) -> None:
    """Let a forward of another package raise in training if it does not call the model's loss function.

    Args:
        model: the model, whose loss function computes ``mean``.
        mean: the mean over the global batch.
    """
    replacement = _replacement_of(model)
    if replacement is not None:
        add_step(model, CallsLossFunction(model, mean, replacement))


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
        try:
            output = self.method(**batch)
        except PlanError:
            raise
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            if self.mean.is_pending:
                raise
            raise self._refusal() from error
        if loss_of(output) is not None and not self.mean.is_pending:
            raise self._refusal()
        return output

    def _refusal(self) -> PlanError:
        return PlanError(
            f"the forward of {type(self.model).__name__} was replaced by {self.replacement}, which computes head and "
            "loss without the model's loss function. It reads a weight of which a rank may hold a part, and the loss "
            "is the mean of one rank's or one micro-batch's tokens. Keep the model's own forward, whose head and loss "
            "run in chunks here: apply_liger_kernel_to_llama(fused_linear_cross_entropy=False), or in the Trainer "
            "liger_kernel_config={'fused_linear_cross_entropy': False}"
        )


def _replacement_of(model: nn.Module) -> str | None:
    """Return the name of the function that a package of none of the model's classes has put in place of forward."""
    method = model.forward.method if isinstance(model.forward, MethodChain) else model.forward
    function = inspect.unwrap(getattr(method, "__func__", method))
    home = getattr(function, "__module__", None)
    if home is None or "labels" not in inspect.signature(function).parameters:
        return None
    packages = {kind.__module__.partition(".")[0] for kind in type(model).__mro__}
    return None if home.partition(".")[0] in packages else f"{home}.{function.__name__}"
