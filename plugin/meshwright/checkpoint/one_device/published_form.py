"""The form in which transformers publishes a model's tensors where it differs from the model's own, and its conversion
on each rank.

Most models with experts are published with a matrix for each expert, which the model has as one tensor::

    published   mlp.experts.{0, 1, ...}.gate_proj.weight [I, H] ─┬─> mlp.experts.gate_up_proj [E, 2I, H]   in the model
                mlp.experts.{0, 1, ...}.up_proj.weight   [I, H] ─┘

A converter that puts a row together from one published tensor each, as that of experts does, runs for each row that the
rank holds, and reads no other. Any other converter runs on all that it takes.
"""

from __future__ import annotations

import contextlib
import copy
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshwright.checkpoint.files.place import Place
from meshwright.checkpoint.files.reading import reading
from meshwright.checkpoint.one_device.safetensors_file import Entry, Form, read_rows, storage
from meshwright.checkpoint.one_device.weight_files import WeightFiles
from meshwright.errors import CheckpointError
from meshwright.layout.row_layout import StridedBlock, copy_blocks, numel, overlap
from meshwright.layout.tensor_layout import TensorLayout, global_shape
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


def as_of_model(files: WeightFiles, model: nn.Module) -> WeightFiles:
    """Return files of published tensors as files of a model's tensors, which are made as they are read.

    Raises:
        CheckpointError: if a converter cannot take what the files have.
    """
    shapes = {name: global_shape(x) for name, x in model.state_dict(keep_vars=True).items() if isinstance(x, Tensor)}
    own_name = naming_of(model, shapes)
    asked = _one_device(model, shapes)
    entries: dict[str, tuple[Place, Entry]] = {}
    conversions: dict[str, Conversion] = {}
    # Experts are numbered, and converters take them in the order of their numbers.
    for name in sorted(files.entries, key=lambda name: [part.zfill(9) for part in re.split(r"(\d+)", name)]):
        new, converter, pattern = own_name(name)
        if new not in shapes or converter is None:
            entries[new if new in shapes else name] = files.entries[name]
        else:
            conversion = conversions.setdefault(new, Conversion(converter, new, asked))
            conversion.sources.setdefault(pattern, []).append(name)
    if entries == files.entries:
        return files
    made: dict[str, Conversion] = {}
    for conversion in conversions.values():
        for name, form in conversion.forms(files).items():
            made[name], entries[name] = conversion, (files.source, Entry(*form, start=0))
    return ConvertedFiles(files.source, entries, files.progress, files, made)


def _one_device(model: nn.Module, shapes: Mapping[str, torch.Size]) -> SimpleNamespace:
    """Return what operations of a converter may ask of a model, as it is on one device."""

    def get_parameter(name: str) -> Tensor:
        return torch.empty(shapes[name], device="meta")

    return SimpleNamespace(config=getattr(model, "config", None), get_parameter=get_parameter)


@dataclass
class Conversion:
    """How some tensors of a model are made of published ones.

    Args:
        converter: transformers' converter.
        target: the name of the first tensor that it makes.
        model: the model that its operations ask.
        sources: the names of the published tensors for each of its patterns, in order.
    """

    converter: Transform
    target: str
    model: SimpleNamespace
    sources: dict[str, list[str]] = field(default_factory=dict)
    rows: int = 1  # the number of parts, one for each row, that can be made one by one

    def forms(self, files: WeightFiles) -> dict[str, Form]:
        """Return the dtype and the shape of each tensor that is made, by name, and note whether it is made by rows.

        Raises:
            CheckpointError: if the files do not have what the converter takes.
        """

        def stand_in(name: str) -> Tensor:
            entry = files.entries[name][1]
            entry.check_dtype(name)
            return torch.empty(entry.shape, dtype=entry.dtype, device="meta")

        try:
            whole = self.run(stand_in)
            first = self.run(stand_in, row=0)
        except (RuntimeError, ValueError, IndexError) as error:
            names = [name for names in self.sources.values() for name in names]
            raise CheckpointError(
                f"{files.source} has {len(names)} tensor(s), such as {names[0]}, of which transformers makes "
                f"{self.target} of the model, but they do not fit together: {str(error).splitlines()[0]}"
            ) from error
        counts = {len(names) for names in self.sources.values()}
        if len(counts) == 1 and all(x.shape[:1] == (*counts,) for x in whole.values()):
            are_rows = all(first[name].shape == (1, *x.shape[1:]) for name, x in whole.items())
            self.rows = counts.pop() if are_rows else 1
        return {name: (x.dtype, tuple(x.shape)) for name, x in whole.items()}

    def run(self, read: Callable[[str], Tensor], row: int | None = None) -> dict[str, Tensor]:
        """Return the tensors that are made, by name; only a row of each, with a first dim of 1, if ``row`` is given."""
        converter = copy.deepcopy(self.converter)
        for pattern, names in self.sources.items():
            for name in names if row is None else names[row : row + 1]:
                converter.add_tensor(self.target, name, pattern, read(name))
        made = converter.convert(self.target, model=self.model, config=self.model.config)
        return {name: x[0] if isinstance(x, list) else x for name, x in made.items()}


@dataclass(frozen=True)
class ConvertedFiles(WeightFiles):
    """Files of published tensors, under the names and in the shapes of a model's.

    Args:
        published: the files as they are.
        conversions: how each tensor is made that differs by more than its name.
    """

    published: WeightFiles
    conversions: dict[str, Conversion]

    def read(self, name: str, dtype: torch.dtype, layout: TensorLayout | None = None) -> Tensor:
        """Make what this rank has of a tensor, on the CPU, from the published tensors that it needs."""
        if name not in self.conversions:
            return super().read(name, dtype, layout)
        conversion, entry = self.conversions[name], self.entries[name][1]
        layout = layout or entry.layout
        values, own, rows = storage(layout, dtype), layout.blocks(), conversion.rows
        size = math.prod(entry.shape) // rows
        for row in range(rows):
            if shared := overlap(own, [StridedBlock(0, row * size, size)]):
                part = conversion.run(lambda name: self._published(name, dtype), row if rows > 1 else None)[name]
                copy_blocks(values.view(-1), part.flatten(), shared)
                self.progress.add(numel(shared) * entry.dtype.itemsize)
        return values

    def _published(self, name: str, dtype: torch.dtype) -> Tensor:
        path, entry = self.published.entries[name]
        with reading(path, follows_links=True) as reader:
            return read_rows(reader, entry, entry.layout, dtype, lambda _: None)
