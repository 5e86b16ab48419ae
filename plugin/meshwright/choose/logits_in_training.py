"""Determines how many logits a model has in memory at once in training, for the planner's estimate of memory."""

from __future__ import annotations

from torch import nn

from meshwright.parallel.foreign_hooks import has_foreign_hooks
from meshwright.parallel.losses.deferred_logits import DeferringHead
from meshwright.plan.config import ToDistributedConfig
from meshwright.planner.job.candidate import Logits
from meshwright.roles.adapters import without_wrappers


def logits_in_training(model: nn.Module, config: ToDistributedConfig) -> Logits:
    """Return the logits that are in memory at once in training with labels, as in ``planner.candidate.Job``.

    Args:
        model: the model, before or after it was distributed.
        config: the options of ``to_distributed``.

    Example:
        >>> from torch import nn
        >>> logits_in_training(nn.Linear(2, 2), ToDistributedConfig(gather_logits=True))
        'gathered'
    """
    if config.gather_logits:
        return "gathered"
    find = getattr(without_wrappers(model)[1], "get_output_embeddings", None)
    head = find() if callable(find) else None
    if head is not None and has_foreign_hooks(head, backward=True):
        return "gathered"  # for the hook, also over the ranks of tp
    # An adapter on the head and an engine that gathers weights need all logits of this rank.
    is_whole = config.engine is not None or (head is not None and not DeferringHead.is_deferrable(head))
    return "sharded" if is_whole else "chunked"
