"""The mean over the global batch of a loss that the program computes from the model's outputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwright.optim.runtime import Watch, runtime_of
from meshwright.parallel.batch.mean_over_ranks import GlobalMean
from meshwright.parallel.forward.uneven_batches import UnevenBatches


def global_mean(model: nn.Module, loss: Tensor, count: Tensor | int) -> Tensor:
    """Return the mean of a loss over the global batch, in value and gradient, given the mean that this rank computed.

    Every data-parallel rank must call ``global_mean`` once per loss, before ``backward``. On one process it returns
    the loss unchanged, so a program may always call it. A loss that the model itself returns needs no such call; see
    docs/losses.md.

    Args:
        model: the model that ``to_distributed`` or ``DataParallel`` returned.
        loss: the mean over this rank's rows or labels, as a scalar.
        count: the number of those rows or labels; if it is 0, the value of the loss is ignored.

    Returns:
        The sum over the ranks of ``loss * count``, divided by the sum of ``count``; the same on every rank.

    Raises:
        ValueError: if the model is not distributed, or the loss is not a scalar.

    Example::

        batch = next(iter(loader))
        labels = batch.pop("labels")
        loss = weighted_cross_entropy(model(**batch).logits, labels)
        loss = mw.global_mean(model, loss, count=(labels != -100).sum())
        loss.backward()
    """
    runtime = runtime_of(model)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"global_mean(model, loss, count) takes a scalar loss, the mean over this rank's rows or labels, not "
            f"{found}: pass loss.mean()"
        )
    if (uneven := runtime.features.find(UnevenBatches)) is not None:
        uneven.stop()
    if runtime.mesh.tokens.size > 1:
        counts = torch.as_tensor(count, device=loss.device).reshape(1)
        mean = GlobalMean(runtime.mesh.tokens, gradients=runtime.loss_gradients)
        loss = mean.of_means(loss.reshape(1), counts).reshape(loss.shape)
    if (watch := runtime.features.find(Watch)) is not None:
        watch.saw_loss(loss)
    return loss
