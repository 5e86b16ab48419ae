"""What layers are given beside their hidden states that is computed from weights, and what of it crosses a boundary.

Such an input is an encoder's result, a table of positions, an input of each layer alone, or a second stream that a
layer hands to the next. Only the stage that has the weights computes it. It crosses from stage to stage with the hidden
states, and its gradient comes back the same way: each stage adds the part of its own layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from meshwright.errors import PlanError
from meshwright.parallel.fake_passes.sources import OUTSIDE, Sources
from meshwright.parallel.method_chain import arguments
from meshwright.parallel.tensor_parallel.second_inputs import is_cache_with_gradient

HIDDEN = "hidden states"


@dataclass(frozen=True, kw_only=True)
class LayerInput:
    """An input of a layer beside its hidden states.

    Args:
        name: the argument.
        place: the place in the argument, if it is a list or tuple; None if it is a tensor.
        tensor: the number of the tensor; the inputs of several layers that are one tensor have one number.
        source: the last layer that the tensor was computed from, or ``OUTSIDE``.
        earliest: the first one that the model has used beside it, without a layer in between; ``source`` if none.
    """

    name: str
    place: int | None
    tensor: int
    source: int
    earliest: int

    def of(self, given: dict[str, Any]) -> Any:
        """Return the input among a layer's arguments by name; None if the layer is not given it."""
        value = given.get(self.name)
        if self.place is None or value is None:
            return value
        return value[self.place] if self.place < len(value) else None

    def put(self, given: dict[str, Any], x: Tensor) -> None:
        """Set the input among a layer's arguments by name."""
        if self.place is None:
            given[self.name] = x
            return
        values = list(given[self.name])
        values[self.place] = x
        given[self.name] = type(given[self.name])(values)


@dataclass(frozen=True, kw_only=True)
class Returned:
    """The form in which a layer returns its result.

    Args:
        spec: the structure around the values.
        values: for each value ``HIDDEN``, the name of the next layer's argument that it becomes, or None.
    """

    spec: TreeSpec
    values: tuple[str | None, ...]

    def passed(self, hidden: Tensor, given: dict[str, Any]) -> Any:
        """Return what a layer returns that only passes on what it was given."""
        found = [hidden if name == HIDDEN else given.get(name) if name else None for name in self.values]
        return tree_unflatten(found, self.spec)


@dataclass(frozen=True)
class Crossing:
    """The inputs that cross the boundary before a layer.

    Args:
        inputs: the layer that first gets each of them, and the input.
        end: the layer at whose call the stage before has seen them all.
    """

    inputs: tuple[tuple[int, LayerInput], ...]
    end: int

    @property
    def place(self) -> dict[int, int]:
        """The place of each tensor in what crosses, behind the hidden states."""
        return {one.tensor: 1 + i for i, (_, one) in enumerate(self.inputs)}


def crossing(of_layers: tuple[tuple[LayerInput, ...], ...], before: int) -> Crossing:
    """Return what crosses the boundary before a layer: what this and later layers get that is computed earlier.

    Args:
        of_layers: the inputs of each layer.
        before: the index of the layer.
    """
    found: dict[int, tuple[int, LayerInput]] = {}
    for layer in range(before, len(of_layers)):
        for one in of_layers[layer]:
            if one.source < before:
                found.setdefault(one.tensor, (layer, one))
    return Crossing(tuple(found.values()), max((layer for layer, _ in found.values()), default=before))


class InputRecorder:
    """Records in a pass without values what each layer is given beside its hidden states, and in which form it returns.

    Args:
        sources: knows what the tensors of the pass are computed from.
    """

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._numbers: dict[int, int] = {}  # of tensors, by id
        self._kept: list[Tensor] = []  # so that no other tensor gets the id
        self._leaves: list[Any] = []
        self._spec: TreeSpec | None = None
        self.inputs: list[tuple[LayerInput, ...]] = []
        self.hidden: list[LayerInput] = []
        self.returned: list[Returned] = []

    def enter(self, layer: nn.Module, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take what the next layer is given."""
        given = arguments(inspect.signature(layer.forward), args, kwargs)
        caches = [name for name, value in given.items() if is_cache_with_gradient(value)]
        if caches and not self.inputs:  # later layers may get the cache in which earlier ones keep their own
            raise PlanError(
                f"{type(layer).__name__} is given {', '.join(caches)} beside its hidden states, and this input "
                "requires a gradient. A pipeline hands tensors from stage to stage. Use ParallelPlan(pp=1)"
            )
        named = [(name, place, x) for name, value in given.items() for place, x in _tensors(value)]
        found = [item for item in named if self._sources.layers(item[2]) and item[2] is not hidden]
        self.hidden.append(self._input(HIDDEN, None, hidden))
        self.inputs.append(tuple(self._input(*item) for item in found))
        if self._spec is not None:
            names = {id(x): name for name, place, x in found if place is None} | {id(hidden): HIDDEN}
            values = [names.get(id(x)) if isinstance(x, Tensor) else None for x in self._leaves]
            if HIDDEN not in values:  # the model computes something between the layers
                first = next(i for i, x in enumerate(self._leaves) if isinstance(x, Tensor))
                values[first] = HIDDEN
            self.returned.append(Returned(spec=self._spec, values=tuple(values)))

    def leave(self, output: Any) -> None:
        """Take what a layer returns."""
        self._leaves, self._spec = tree_flatten(output)

    def _input(self, name: str, place: int | None, x: Tensor) -> LayerInput:
        self._kept.append(x)
        number, layers = self._numbers.setdefault(id(x), len(self._numbers)), self._sources.layers(x) or {OUTSIDE}
        return LayerInput(name=name, place=place, tensor=number, source=max(layers), earliest=min(layers))


def _tensors(value: Any) -> Iterator[tuple[int | None, Tensor]]:
    if isinstance(value, Tensor):
        yield None, value
    elif isinstance(value, list | tuple):
        yield from ((place, x) for place, x in enumerate(value) if isinstance(x, Tensor))
