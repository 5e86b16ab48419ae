"""torch.compile of a distributed model: what is between the collectives is compiled, they themselves are not."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def keep_hooks_out(model: Any) -> None:
    """Have dynamo break its graphs at the model's hooks and at its loss, which then run as they are.

    Hooks move activations between ranks and keep state from one to the next, which a traced graph would freeze.

    Args:
        model: distributed; changed in place, before it is compiled.
    """
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in hooks.items():
                hooks[key] = torch.compiler.disable(hook)
    if callable(loss := getattr(model, "loss_function", None)) and not isinstance(loss, nn.Module):
        model.loss_function = torch.compiler.disable(loss)
