"""Published checkpoints whose tensors transformers converts as it loads, read by rank.

A converter that puts a row together from one published tensor each, as that of experts does, runs for each row that the
rank holds, and reads no other. Any other converter runs on all that it takes.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from meshwright.checkpoint.files.place import Place
from meshwright.checkpoint.files.reading import reading
from meshwright.checkpoint.one_device.published_form import Transform, naming_of
from meshwright.checkpoint.one_device.safetensors_file import Entry, Form, read_rows, storage
from meshwright.checkpoint.one_device.weight_files import WeightFiles
from meshwright.errors import CheckpointError
from meshwright.layout.blocks import StridedBlock, copy_blocks, numel, overlap
from meshwright.layout.tensor_layout import TensorLayout, global_shape


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
