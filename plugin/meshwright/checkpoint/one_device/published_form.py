"""The form in which transformers publishes a model's tensors, where it differs from the model's own.

Most models with experts are published with a matrix for each expert, which the model has as one tensor::

    published   mlp.experts.{0, 1, ...}.gate_proj.weight [I, H] ─┬─> mlp.experts.gate_up_proj [E, 2I, H]   in the model
                mlp.experts.{0, 1, ...}.up_proj.weight   [I, H] ─┘
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor, nn

from meshwright.checkpoint.one_device.safetensors_file import Form

_Revert = Callable[[nn.Module, dict[str, Tensor]], dict[str, Tensor]]


class Transform(Protocol):
    """One of transformers' rules from published names to those of a model; one with ``operations`` is a converter."""

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Return the new name, and the pattern that matched the old one, if any."""

    def add_tensor(self, target_key: str, source_key: str, source_pattern: str, future: Tensor) -> None:
        """Add a published tensor to those that a converter takes."""

    def convert(self, layer_name: str, *, model: object, config: object) -> dict[str, Tensor | list[Tensor]]:
        """Return the model's tensors that are made of the added ones, by name."""


def transforms_of(model: nn.Module) -> list[Transform]:
    """Return transformers' rules for a model; none for a model of another kind."""
    # Those by which it was loaded, if any were used: none are if the checkpoint had the model's own names.
    own: list[Transform] | None = getattr(model, "_weight_conversions", None)
    find: Callable[[nn.Module], list[Transform]] = getattr(
        _modeling(model), "get_model_conversion_mapping", lambda _: []
    )
    return own or find(model)


@dataclass(eq=False)
class PublishedTensors:
    """The published tensors that are made of one tensor of a model.

    Args:
        source: the name of the model's tensor.
        forms: the dtype and the shape of each published tensor, by name.
        units: the names of those that share memory on one device.
        revert: transformers' function that makes them; None if only the name differs.
    """

    source: str
    forms: Mapping[str, Form]
    units: Sequence[Sequence[str]]
    revert: _Revert | None = None
    _made: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def renamed(source: str, name: str, form: Form) -> PublishedTensors:
        """Return a model's tensor as the published one of another name."""
        return PublishedTensors(source, {name: form}, [[name]])

    def make(self, model: nn.Module, whole: Tensor) -> None:
        """Make the published tensors from the model's whole one; :meth:`take` then returns each of them once."""
        if self.revert is None:
            self._made = dict.fromkeys(self.forms, whole)
        else:
            self._made = self.revert(model, {self.source: whole})

    def take(self, name: str) -> Tensor:
        """Return a published tensor."""
        return self._made.pop(name)


def as_they_are(forms: Mapping[str, Form]) -> dict[str, PublishedTensors]:
    """Return tensors of a model as published ones of the same names."""
    return {name: PublishedTensors.renamed(name, name, form) for name, form in forms.items()}


def published_form(model: nn.Module, forms: Mapping[str, Form]) -> dict[str, PublishedTensors] | None:
    """Return how transformers publishes tensors of a model: each published name, in order, with its source.

    The result is None if a published tensor is made of several of the model's.

    Args:
        model: the model.
        forms: the dtype and the whole shape of each tensor, by name.
    """
    revert: _Revert = getattr(_modeling(model), "revert_weight_conversion", lambda _, state: state)
    state = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in forms.items()}
    published = revert(model, dict(state))
    kept = {id(x): name for name, x in published.items()}
    found: dict[str, PublishedTensors] = {}
    for source, x in state.items():
        if id(x) in kept:
            found[kept[id(x)]] = PublishedTensors.renamed(source, kept[id(x)], forms[source])
            continue
        made = revert(model, {source: x})
        if any(name not in published or published[name].shape != y.shape for name, y in made.items()):
            return None
        units: dict[int, list[str]] = {}
        for name, y in made.items():
            units.setdefault(y.untyped_storage()._cdata, []).append(name)
        own_forms = {name: (y.dtype, tuple(y.shape)) for name, y in made.items()}
        found |= dict.fromkeys(made, PublishedTensors(source, own_forms, list(units.values()), revert))
    return {name: found[name] for name in published} if found.keys() == published.keys() else None


def _modeling(model: nn.Module) -> ModuleType | None:
    """Return the module that defines transformers' base class of models, if a model is one."""
    kinds = {kind.__name__: kind for kind in type(model).__mro__}
    return sys.modules[kinds["PreTrainedModel"].__module__] if "PreTrainedModel" in kinds else None
