"""Options of torch's embeddings whose gradients a plan that splits the batch would get wrong."""

from __future__ import annotations

from torch import nn

_REASONS = {
    "scale_grad_by_freq": "divides the gradient of each token by its count in the rows of one rank or micro-batch, "
    "instead of its count in the whole batch",
    "sparse": "gives sparse gradients, which are not averaged over ranks, sharded or summed over micro-batches",
}


def refused_option(model: nn.Module, *options: str) -> str | None:
    """Return why a trained embedding cannot be used where the batch is split, and what to change; None if all can.

    Args:
        model: the model.
        options: the options to look for: all by default.
    """
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag) or not module.weight.requires_grad:
            continue
        for option in options or _REASONS:
            if getattr(module, option):
                path = f"model.{name}" if name else "model"
                return (
                    f"{path} is an {type(module).__name__} with {option}=True, which {_REASONS[option]}. Set it off "
                    f"before the call: {path}.{option} = False"
                )
    return None
