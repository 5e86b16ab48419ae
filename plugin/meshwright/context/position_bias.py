"""Biases for pairs of tokens that an attention makes itself, from the numbers of its queries and keys.

A rank has some of the tokens, and such a bias is for places in the sequence. So it is made for the whole row on every
rank, ``[..., S, S]``, and each block of attention takes its queries and keys of it (``AttentionCall``).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from torch import nn

from meshwright.context.masks import ContextMask
from meshwright.parallel.method_chain import ChainStep, add_step, arguments

_LENGTHS = ("query_length", "key_length")


def lengths_method(attention: nn.Module) -> str | None:
    """Return the name of the method of an attention that takes the numbers of queries and keys; None if none does."""
    for name, method in inspect.getmembers(type(attention), inspect.isfunction):
        if set(_LENGTHS) <= inspect.signature(method).parameters.keys():
            return name
    return None


def make_whole(attentions: Iterable[nn.Module]) -> None:
    """Make attentions compute their biases for all tokens of the row, which their masks show.

    Args:
        attentions: the attentions, without those over an encoder's keys.
    """
    for attention in attentions:
        if (name := lengths_method(attention)) is not None:
            step = _OfWholeRow(attention, name)
            add_step(attention, step, name)
            attention.register_forward_pre_hook(step.enter, with_kwargs=True)


class _OfWholeRow(ChainStep):
    def __init__(self, attention: nn.Module, name: str):
        self.signature, self.length = inspect.signature(getattr(attention, name)), 0

    def enter(self, attention: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Take the number of tokens of the row, also where backward runs a layer again after other rows."""
        masks = (x for x in (*args, *kwargs.values()) if isinstance(x, ContextMask))
        self.length = next((mask.length for mask in masks), 0)

    def __call__(self, *args: object, **kwargs: object) -> object:
        given = arguments(self.signature, args, kwargs)
        if self.length:
            given |= dict.fromkeys(_LENGTHS, self.length)
        return self.method(**given)
