"""Detect terms that a model's forward adds to the result of its loss function, such as a penalty.

The loss function returns the loss of the global batch, and so does the load-balancing loss of a model with experts. How
other terms depend on the batch is unknown.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

from meshwright.parallel.batch.mean_over_ranks import GlobalMean
from meshwright.parallel.output_loss import loss_of

logger = logging.getLogger(__name__)


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
