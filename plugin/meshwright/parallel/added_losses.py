"""What a model's own forward adds to the loss that its loss function returned: a router's auxiliary loss, for example.

The loss function returns the loss of the global batch. Of what is added nothing is known.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from meshwright.parallel.mean_over_ranks import GlobalMean
from meshwright.parallel.output_loss import loss_of

logger = logging.getLogger(__name__)


def check_nothing_added(mean: GlobalMean, output: Any) -> None:
    """Refuse it where a batch is split into micro-batches, whose losses are added up.

    Args:
        mean: of the loss function that the model calls.
        output: of the model's forward.

    Raises:
        ValueError: naming the fields of the plan.
    """
    if not mean.returned(loss_of(output)):
        raise ValueError(
            "the model's forward adds something to the loss that its loss function returns, such as a router's "
            "auxiliary loss (config.output_router_logits) or a penalty. With micro-batches it would count once for "
            "each of them. Set ParallelPlan.gradient_accumulation_steps=1 and micro_batch_size=None, or leave it out "
            "of the model and add it to the loss that the model returns"
        )


class AddedToLoss:
    """Says once what data parallelism makes of it.

    Args:
        mean: of the loss function that the model calls.
    """

    def __init__(self, mean: GlobalMean):
        self.mean = mean
        self._has_warned = mean.dp.size == 1

    def watch(self, model: nn.Module) -> None:
        """Look at all that the model returns from now on."""
        model.register_forward_hook(self._look)

    def _look(self, model: nn.Module, _: Any, output: Any) -> None:
        if self._has_warned or not torch.is_grad_enabled() or self.mean.returned(loss_of(output)):
            return
        self._has_warned = True
        if self.mean.dp.rank == 0:
            logger.warning(
                "the forward of %s adds something to the loss that its loss function returns, such as a router's "
                "auxiliary loss (config.output_router_logits) or a penalty. Each data-parallel rank computes it from "
                "its own rows, and the mean of the ranks' is taken: that is another number than on one device, unless "
                "all ranks compute the same. Leave it out of the model, and pass what the program computes itself to "
                "meshwright.global_mean(model, loss, count)",
                type(model).__name__,
            )
