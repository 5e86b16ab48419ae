"""Refuses features of a tower that a decoder adds between its layers, which a rank with some of the layers lacks."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshwright.errors import PlanError
from meshwright.roles import Decoder

_BEFORE_LAYERS = ("inputs_embeds", "attention_mask")


def refuse_features_between_layers(decoder: Decoder, axis: str) -> None:
    """Make the module that runs the layers raise if it gets features beside the embeddings, which towers compute.

    Args:
        decoder: the decoder.
        axis: the axis that cuts the decoder, for the message.
    """
    if decoder.towers:
        modules, first = list(decoder.model.modules()), decoder.layers[0]
        layers = next(module for module in modules if first in set(module.children()))
        owner = next(module for module in modules if layers in set(module.children()))
        names = tuple(inspect.signature(owner.forward).parameters)
        owner.register_forward_pre_hook(functools.partial(_check, names, axis), with_kwargs=True)


def _check(names: tuple[str, ...], axis: str, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for name, value in {**dict(zip(names, args, strict=False)), **kwargs}.items():
        features = [x for x in tree_leaves(value) if isinstance(x, Tensor) and x.is_floating_point()]
        if features and name not in _BEFORE_LAYERS:
            raise PlanError(
                f"{type(owner).__name__} is given {name} beside the embeddings, which it may add between its layers. "
                f"ParallelPlan.{axis} > 1 cuts what its layers compute, and a rank would add features of other layers "
                f"or tokens. Use {axis}=1"
            )
