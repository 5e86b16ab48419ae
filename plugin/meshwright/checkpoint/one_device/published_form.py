"""The form in which transformers publishes a model's tensors, where it differs from the model's own.

Most models with experts are published with a matrix for each expert, which the model has as one tensor::

    published   mlp.experts.{0, 1, ...}.gate_proj.weight [I, H] ─┬─> mlp.experts.gate_up_proj [E, 2I, H]   in the model
                mlp.experts.{0, 1, ...}.up_proj.weight   [I, H] ─┘
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshwright.checkpoint.one_device.safetensors_file import Form
from meshwright.temporarily import temporarily

_Revert = Callable[[nn.Module, dict[str, Tensor]], dict[str, Tensor]]


class Transform(Protocol):
    """One of transformers' rules from published names to those of a model; one with ``operations`` is a converter."""

    source_patterns: list[str]
    target_patterns: list[str]

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Return the new name, and the pattern that matched the old one, if any."""

    def add_tensor(self, target_key: str, source_key: str, source_pattern: str, future: Tensor) -> None:
        """Add a published tensor to those that a converter takes."""

    def convert(self, layer_name: str, *, model: object, config: object) -> dict[str, Tensor | list[Tensor]]:
        """Return the model's tensors that are made of the added ones, by name."""


def naming_of(model: nn.Module, state: Mapping[str, object]) -> Naming:
    """Return the function of a published name that finds the model's name, the converter if any, and its pattern.

    Args:
        model: the model; one that is not of transformers has no other names than its own.
        state: something for each name of the model's state.
    """
    modeling = _modeling(model)
    if modeling is None:
        return lambda name: (name, None, "")
    # Those by which it was loaded, if any were used: none are if the checkpoint had the model's own names.
    own: list[Transform] | None = getattr(model, "_weight_conversions", None)
    transforms: list[Transform] = own or modeling.get_model_conversion_mapping(model)
    converters = [each for each in transforms if hasattr(each, "operations")]
    renamings = [each for each in transforms if not hasattr(each, "operations")]
    of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    # transformers' own, which also adds or takes away the name of the base model.
    rename = sys.modules[modeling.revert_weight_conversion.__module__].rename_source_key
    base = getattr(model, "base_model_prefix", "") or None

    def find(name: str) -> tuple[str, Transform | None, str]:
        new, pattern = rename(name, renamings, converters, base, state)
        if new not in state and name in state:
            new, pattern = name, None
        return new, None if pattern is None else of_pattern[pattern], pattern or ""

    return find


Naming = Callable[[str], tuple[str, "Transform | None", str]]


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


@contextlib.contextmanager
def without_quantisation(model: nn.Module) -> Iterator[None]:
    """Let a model that was dequantised as it was loaded be published as one that never was quantised.

    transformers undoes the rules by which a model was loaded. Those of a quantisation would write its form again, for
    which the config has no field any more, so that the files could not be read.
    """
    rules: Any = vars(model).get("_weight_conversions")

    def is_of_quantisation(rule: Transform) -> bool:
        return any(hasattr(each, "hf_quantizer") for each in getattr(rule, "operations", ()))

    if getattr(model, "hf_quantizer", None) is not None or not any(map(is_of_quantisation, rules or ())):
        yield
        return
    # A quantiser puts its operations into the model's own converters.
    modeling: Any = _modeling(model)
    own = {tuple(rule.target_patterns): rule for rule in modeling.get_model_conversion_mapping(model, add_legacy=False)}
    plain = [own.get(tuple(rule.target_patterns)) if is_of_quantisation(rule) else rule for rule in rules]
    with temporarily(model, _weight_conversions=[rule for rule in plain if rule is not None]):
        yield


def _modeling(model: nn.Module) -> ModuleType | None:
    """Return the module that defines transformers' base class of models, if a model is one."""
    kinds = {kind.__name__: kind for kind in type(model).__mro__}
    return sys.modules[kinds["PreTrainedModel"].__module__] if "PreTrainedModel" in kinds else None
