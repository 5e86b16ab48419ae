"""torch.compile for a distributed model: compiles the code between collectives, but not the collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate.utils import DynamoBackend
from torch import nn


def compile_decoder(model: Any, options: Mapping[str, Any]) -> None:
    """Compile the decoder in place; the head, its sharded logits and the loss are not compiled.

    Graphs break at hooks, which are excluded from compilation: hooks communicate activations and pass state to later
    hooks, and a traced graph would freeze this state.

    Args:
        model: the distributed model, changed in place.
        options: the arguments of ``torch.compile``.
    """
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    decoder: nn.Module = getattr(whole, "base_model", whole)
    for module in decoder.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in hooks.items():
                hooks[key] = torch.compiler.disable(hook)
    decoder.compile(**options)


@contextlib.contextmanager
def left_to_us(plugin: Any) -> Iterator[None]:
    """Keep accelerate from compiling the model inside the context.

    Args:
        plugin: accelerate's TorchDynamoPlugin.
    """
    before, plugin.backend = plugin.backend, DynamoBackend.NO
    try:
        yield
    finally:
        plugin.backend = before
