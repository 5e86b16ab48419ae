"""Finds the kinds of decoder layers in a model, and a small set of layers that includes all kinds."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from torch import nn
from transformers import PretrainedConfig

LEAST = 2  # minimum number of layers to keep, so that code between two layers runs
MOST = 8  # maximum number of kinds to include
_PLAIN = (bool, int, str, type(None))


def kinds_of_layers(model: nn.Module) -> list[Hashable]:
    """Return the kind of each decoder layer: a hashable value of its modules, their settings and its parameter shapes.

    Args:
        model: a causal LM, on the meta device or not.
    """
    count = getattr(model.config, "num_hidden_layers", 0)
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not stacks:
        return []
    settings = [dict(_settings(layer)) for layer in stacks[0]]
    # A setting that holds the layer's index does not distinguish kinds.
    counts = {
        p
        for p in settings[0]
        if len(settings) > 1 and all(_counts(s.get(p), settings[0][p], i) for i, s in enumerate(settings))
    }
    return [
        (
            tuple((place, value) for place, value in one.items() if place not in counts),
            tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters()),
        )
        for one, layer in zip(settings, stacks[0], strict=True)
    ]


def _settings(layer: nn.Module) -> Iterator[tuple[Any, Any]]:
    for name, module in layer.named_modules():
        yield (name, ""), type(module).__name__
        for key, value in sorted(vars(module).items()):
            if not key.startswith("_") and isinstance(value, _PLAIN):
                yield (name, key), value


def _counts(value: object, first: object, index: int) -> bool:
    return type(value) is int and type(first) is int and value == first + index


def layers_to_keep(
    config: PretrainedConfig, kinds: Sequence[Hashable], least: int
) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """Yield sets of layers that include all kinds, the smallest first, with the config fields for only these layers.

    Args:
        config: the config of the whole model.
        kinds: the kinds of its layers.
        least: the smallest number of layers to keep, if the model has that many; never less than 2.
    """
    least = max(least, LEAST)
    first = sorted(dict.fromkeys(kinds.index(kind) for kind in kinds))[:MOST]
    chosen = first
    if len(first) < least <= len(kinds):
        chosen = [*first, *(i for i in range(len(kinds)) if i not in first)][:least]
    prefix = list(range(max(chosen) + 1))
    for kept in (sorted(chosen), prefix):
        if len(kept) < len(kinds):
            yield kept, {"num_hidden_layers": len(kept), **_per_layer(config, len(kinds), kept)}


def _per_layer(config: PretrainedConfig, count: int, kept: list[int]) -> dict[str, Any]:
    return {
        name: [value[i] for i in kept]
        for name, value in config.to_dict().items()
        if isinstance(value, list) and len(value) == count and any(word in name for word in ("layer", "block", "attn"))
    }
