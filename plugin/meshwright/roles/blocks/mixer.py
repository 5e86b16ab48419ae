"""Mixers: modules in which tokens meet by a convolution or a recurrence, such as Mamba and the gated delta net."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from meshwright.errors import PlanError
from meshwright.roles.blocks.block import BlockKind
from meshwright.roles.blocks.experts import roles_of_experts
from meshwright.roles.decoder import Decoder, hidden_size, layer_stack, token_embedding
from meshwright.roles.projection import in_features, is_projection, out_features
from meshwright.roles.sharding_plan import Role


class Mixer(BlockKind):
    """A module with a convolution over tokens, and projections from and to the width of the hidden states.

    A layer calls it with hidden states, so it is exact as a whole if it is given those of all tokens.
    """

    @classmethod
    def claim(cls, module: nn.Module, hidden: int, hinted: Mapping[str, Role]) -> dict[str, Role]:
        modules = list(module.modules())
        projections = [m for m in modules if is_projection(m)]
        is_mixer = (
            any(isinstance(m, nn.Conv1d) for m in modules)
            and any(in_features(m) == hidden for m in projections)
            and any(out_features(m) == hidden for m in projections)
            # A list is not called, and of experts each rank must take its own tokens alone.
            and not (isinstance(module, nn.ModuleList | nn.ModuleDict) or hinted or any(map(roles_of_experts, modules)))
        )
        return {"": Role.WHOLE} if is_mixer else {}


def mixers_of(model: nn.Module, decoder: Decoder | None = None) -> dict[str, nn.Module]:
    """Return the mixers inside of a decoder's layers, by name; none if the model has no decoder.

    Args:
        model: the whole model, with all of its weights.
        decoder: its parts; None to find its layers here.
    """
    if not any(isinstance(module, nn.Conv1d) for module in model.modules()):
        return {}
    if decoder is None:
        try:
            name, stack = layer_stack(model)
            layers, embedding = tuple(stack), token_embedding(model, name)
        except PlanError:
            return {}
    elif isinstance(decoder.embedding, nn.Embedding):
        layers, embedding = decoder.layers, decoder.embedding
    else:
        return {}
    hidden = hidden_size(layers, embedding)
    found = {mixer for layer in layers for mixer in _outermost(layer, hidden)}
    return {name: module for name, module in model.named_modules() if module in found}


def has_attention(mixer: nn.Module) -> bool:
    """Return whether a mixer holds an attention, which takes a mask; transformers gives each this mark."""
    return any(hasattr(module, "is_causal") for module in mixer.modules())


def _outermost(module: nn.Module, hidden: int) -> Iterator[nn.Module]:
    for child in module.children():
        if Mixer.claim(child, hidden, {}):
            yield child
        else:
            yield from _outermost(child, hidden)
