"""Refuses losses that are no mean over the rows of a batch, such as contrastive ones, where the batch is split.

What the loss of a stock model is the mean over may be unknown. In the first pass the loss is then computed for the same
rows once and twice. A mean, over rows, labels or elements, is the same for both. A loss that compares each row with all
others is not, and neither is a sum. The two are compared as far as the pass is precise: a contrastive loss grows by
log(2) only, whatever is added to it.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.compiling import active_backend
from meshwright.errors import PlanError
from meshwright.faults.memory_digest import has_values
from meshwright.parallel.autograd_graph import in_backward, loss_of
from meshwright.parallel.batch.items import BatchFormat
from meshwright.parallel.batch.schema import BatchSchema
from meshwright.parallel.draws.kernels import apart
from meshwright.parallel.losses.causal_lm import stock_owner
from meshwright.parallel.method_chain import BatchStep
from meshwright.parallel.tensor_parallel.float8 import float8_layers
from meshwright.plan.config import ParallelPlan

logger = logging.getLogger(__name__)

# Relative differences of a loss: of the same kernels, which may sum in another order; and of kernels for another number
# of rows, which round otherwise, in 32 bits and in fewer.
_ROUNDING, _OTHER_SHAPES, _OTHER_SHAPES_IN_16_BITS = 1e-5, 2e-4, 1e-2
# Differences of a loss that is small since large numbers cancel in it, in 32 bits and in fewer.
_CANCELLED, _CANCELLED_IN_16_BITS = 1e-6, 1e-3
# By which part a contrastive loss alone grows: log(2) of log(rows), for a million rows.
_LEAST_GROWTH = 0.05


def has_stock_loss(model: nn.Module) -> bool:
    """Return whether a model runs a forward of transformers, whose passes without gradients change nothing."""
    return stock_owner(model) is not None


# Why a loss grows with the rows of a batch, and what to write instead.
_SUM = (
    "is a sum over rows",
    "let the model return a mean, for a CTC head by model.config.ctc_loss_reduction = 'mean', and pass "
    "ToDistributedConfig(loss_averages_over='rows')",
)
_COMPARED = (
    "compares rows with each other, or is a sum",
    "compute the loss in the program, from the rows of all ranks: meshwright.gather_rows(features)",
)


class CoupledRows(BatchStep):
    """The step of a model's forward that compares the loss of the first batch with that of the same rows twice.

    It does so again for a call with other options, such as ``return_loss=True``. The trial passes are those of
    evaluation, so that dropout draws nothing. A loss that still depends on random draws is not tried, and a warning
    says so.

    Args:
        model: the model.
        plan: the plan, which splits the rows.
        format: what the inputs of the model mean.
        warns: whether this rank gives the warning.
        draws_alike: whether the ranks draw what one device draws.
    """

    def __init__(
        self, model: nn.Module, plan: ParallelPlan, format: BatchFormat, *, warns: bool, draws_alike: bool = False
    ):
        super().__init__(model)
        self.plan, self.format, self.warns, self.draws_alike = plan, format, warns, draws_alike
        self._tried: set[frozenset[tuple[str, bool]]] = set()

    def __call__(self, *args: object, **kwargs: object) -> object:
        trains = self.model.training and torch.is_grad_enabled() and not in_backward()
        if trains and active_backend() is None:
            self._try(self.batch_of(args, kwargs))
        return self.method(*args, **kwargs)

    def _try(self, batch: dict[str, Any]) -> None:
        # Of what all ranks pass alike, since they must run the trial passes together.
        options = frozenset({name: x for name, x in batch.items() if isinstance(x, bool)}.items())
        options |= {("labels", batch.get("labels") is not None)}
        if options in self._tried:
            return
        schema = BatchSchema(batch, self.format)
        if not schema.tensors or not all(map(has_values, schema.tensors.values())):
            return
        self._tried.add(options)
        parts = [module for module in self.model.modules() if module.training]
        device = next(iter(schema.tensors.values())).device
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []), apart():
            try:
                self.model.eval()
                if (alone := self._loss(batch)) is None or alone.numel() != 1:
                    return
                # Every rank runs all passes, whatever it finds, since they may gather weights.
                again = self._loss(batch, seed=1)
                twice = self._loss_of_twice(schema, batch)
            finally:
                for module in parts:
                    module.training = True
        if not alone.isfinite():
            return
        if not torch.allclose(again, alone, rtol=_ROUNDING):
            self._tell_of_draws()
        elif twice is None:
            self._tell_of_no_trial()
        elif (grown := abs(twice.item() - alone.item())) > self._rounding(alone, device):
            is_sum = torch.isclose(twice, 2 * alone, rtol=_ROUNDING)
            cause, cure = _SUM if is_sum else _COMPARED
            raise PlanError(
                f"the loss that {type(self.model).__name__} returns is {alone.item():.4g} for this rank's rows and "
                f"{twice.item():.4g} for the same rows twice: it {cause}, so the mean of the losses of "
                f"dp={self.plan.dp} ranks is not the loss of the whole batch. Use dp=1, for example plan='tp2+sp'; or "
                f"{cure}"
            )
        elif grown and not self._shows_growth(alone, device):
            self._tell_of_rounding(alone)

    def _rounding(self, loss: Tensor, device: torch.device) -> float:
        """Return by how much a mean over rows may differ between the two passes."""
        relative, absolute = _OTHER_SHAPES, _CANCELLED
        if not self._is_precise(device):
            relative, absolute = _OTHER_SHAPES_IN_16_BITS, _CANCELLED_IN_16_BITS
        return max(relative * abs(loss.item()), absolute)

    def _shows_growth(self, loss: Tensor, device: torch.device) -> bool:
        """Return whether rounding is less than what a loss that compares rows would grow by: log(2), and if it is
        scaled by a factor, a part of the logarithm of the number of rows."""
        return self._rounding(loss, device) < min(math.log(2), _LEAST_GROWTH * abs(loss.item()))

    def _is_precise(self, device: torch.device) -> bool:
        """Return whether a pass computes in 32 bits or more."""
        if torch.get_float32_matmul_precision() != "highest" or torch.is_autocast_enabled(device.type):
            return False
        dtypes = {parameter.dtype for parameter in self.model.parameters()}
        is_wide = all(dtype.is_floating_point and dtype.itemsize >= 4 for dtype in dtypes)
        return is_wide and not any(float8_layers(self.model))

    def _tell_of_draws(self) -> None:
        if self.warns and not self.draws_alike:
            logger.warning(
                "the forward of %s draws random numbers, and the ranks of dp=%d draw others than one device, so the "
                "losses are not those of one device, but as good. To compare the two, pass the numbers to the model, "
                "if it takes them (such as noise and timestep)",
                type(self.model).__name__, self.plan.dp,
            )  # fmt: skip

    def _tell_of_no_trial(self) -> None:
        if self.warns:
            logger.warning(
                "the loss of %s could not be computed for the same rows twice, so it is not known whether it is a mean "
                "over rows, as the average over the ranks of dp=%d must be",
                type(self.model).__name__, self.plan.dp,
            )  # fmt: skip

    def _tell_of_rounding(self, loss: Tensor) -> None:
        if self.warns:
            logger.warning(
                "the loss of %s is %.4g, of which rounding hides whether it compares rows with each other: such a loss "
                "is not the average of the losses of the ranks of dp=%d. To find out, run one pass in float32, or "
                "without the factor or the addend that makes the loss this small or large",
                type(self.model).__name__, loss.item(), self.plan.dp,
            )  # fmt: skip

    def _loss_of_twice(self, schema: BatchSchema, batch: dict[str, Any]) -> Tensor | None:
        """Return the loss of the same rows twice; None if an argument does not show its rows, or memory is short."""
        try:
            loss: Tensor | None = self._loss(schema.twice())
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
            return None
        return loss

    def _loss(self, batch: dict[str, Any], seed: int = 0) -> Any:
        torch.manual_seed(seed)
        return loss_of(self.method(**batch))
