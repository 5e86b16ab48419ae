"""Records in a pass without values what a decoder's forward does around its layers, and which inputs of layers cross
the boundaries of stages.

A pipeline stage runs the model's own forward, with the layers of other stages passing their input on. For that it must
be known which modules with weights run before and after the layers, and in which form a layer returns its result.

Such an input is an encoder's result, a table of positions, an input of each layer alone, or a second stream that a
layer hands to the next. Only the stage that has the weights computes it. It crosses from stage to stage with the hidden
states, and its gradient comes back the same way: each stage adds the part of its own layers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from meshwright.errors import PlanError
from meshwright.parallel.experts.routers import OPTION, RouterRecord, RouterWatcher, forward_with_router_loss
from meshwright.parallel.fake_passes.observe import Watcher, hooked, observe, once
from meshwright.parallel.fake_passes.sources import OUTSIDE, Sources
from meshwright.parallel.method_chain import arguments
from meshwright.parallel.tensor_parallel.block_boundary import hidden_states
from meshwright.parallel.tensor_parallel.second_inputs import is_cache_with_gradient
from meshwright.roles.decoder import Decoder, owner_of_layers, stacks_of

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

    def of(self, inputs: dict[str, Any]) -> Any:
        """Return the input among a layer's arguments by name; None if the layer is not given it."""
        value = inputs.get(self.name)
        if self.place is None or value is None:
            return value
        return value[self.place] if self.place < len(value) else None

    def put(self, inputs: dict[str, Any], x: Tensor) -> None:
        """Set the input among a layer's arguments by name."""
        if self.place is None:
            inputs[self.name] = x
            return
        values = list(inputs[self.name])
        values[self.place] = x
        inputs[self.name] = type(inputs[self.name])(values)


@dataclass(frozen=True, kw_only=True)
class Returned:
    """The form in which a layer returns its result.

    Args:
        spec: the structure around the values.
        values: for each value ``HIDDEN``, the name of the next layer's argument that it becomes, or None.
    """

    spec: TreeSpec
    values: tuple[str | None, ...]

    def passed(self, hidden: Tensor, inputs: dict[str, Any]) -> Any:
        """Return what a layer returns that only passes on what it was given."""
        found = [hidden if name == HIDDEN else inputs.get(name) if name else None for name in self.values]
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
        named_inputs = arguments(inspect.signature(layer.forward), args, kwargs)
        caches = [name for name, value in named_inputs.items() if is_cache_with_gradient(value)]
        if caches and not self.inputs:  # later layers may get the cache in which earlier ones keep their own
            raise PlanError(
                f"{type(layer).__name__} is given {', '.join(caches)} beside its hidden states, and this input "
                "requires a gradient. A pipeline hands tensors from stage to stage. Use ParallelPlan(pp=1)"
            )
        named = [(name, place, x) for name, value in named_inputs.items() for place, x in _tensors(value)]
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


_ROWS, _LENGTH = 2, 8


@dataclass(frozen=True, kw_only=True)
class LayerOrder:
    """A record of what a decoder's forward does around its layers.

    Args:
        before: the names of the modules with weights of their own that run before the first layer.
        after: the names of those that run after the last layer.
        returned: for each layer but the last, the form in which it returns its result.
        inputs: for each layer, its inputs beside the hidden states that are computed from weights.
        hidden: for each layer, what its hidden states are computed from.
        given: the names of what the module around the layers gets that is computed from weights.
        passing: by name, the layers of towers that return hidden states of the shape that they are given.
        hidden_size: the number of channels of the activation that layers hand to each other; None if its shape is not
            [rows, tokens, channels].
        output_kind: the class of the output of forward, a mapping with ``loss`` and ``logits``.
        routers: the routers of the load-balancing loss that forward computes after the layers; None if it has none.
    """

    before: frozenset[str]
    after: frozenset[str]
    returned: tuple[Returned, ...]
    inputs: tuple[tuple[LayerInput, ...], ...]
    hidden: tuple[LayerInput, ...]
    given: frozenset[str]
    passing: dict[str, Returned]
    hidden_size: int | None
    output_kind: type
    routers: RouterRecord | None

    @property
    def is_plain(self) -> bool:
        """Whether hidden states of shape [rows, tokens, channels] are all that crosses between the layers."""
        return self.hidden_size is not None and not any(self.inputs)


def record_order(decoder: Decoder, seen: Callable[[], OrderWatcher | None] | None = None) -> LayerOrder:
    """Run a decoder on fake tensors, and return what its forward does around its layers.

    Args:
        decoder: the decoder, with or without memory. It is not changed.
        seen: returns one that has seen a pass also for others; it returns None if this did not work.

    Raises:
        PlanError: if the layers cannot be cut into stages: one is at two places, they do not run once each and in
            order, or weights are used between them.
    """
    layers = decoder.layers
    for layer in layers:
        if layers.count(layer) > 1:
            places = [name for name, module in decoder.facts.modules.items() if module is layer]
            raise PlanError(
                f"{' and '.join(places)} are one module, and a pipeline runs each layer at one place. Use "
                f"ParallelPlan(pp=1), or give each place a layer of its own: copy.deepcopy({places[0]})"
            )
    return once(decoder, "order", lambda: _record((seen and seen()) or _seen_alone(decoder)))


def _record(watcher: OrderWatcher) -> LayerOrder:
    """Return what a pass has shown."""
    model, output = watcher.decoder.model, watcher.output
    names = {field.name for field in dataclasses.fields(output)} if dataclasses.is_dataclass(output) else set()
    if not isinstance(output, MutableMapping) or not {"loss", "logits"} <= {*output, *names}:
        raise PlanError(
            f"{type(model).__name__} returns a {type(output).__name__}, and under ParallelPlan.pp > 1 a model must "
            "return an output with loss and logits, as transformers' models do. Use pp=1"
        )
    order = watcher.order()
    watcher.check_result()
    return order


def _seen_alone(decoder: Decoder) -> OrderWatcher:
    """Return a watcher that has seen a pass. The labels are of tokens, of rows, or left out."""
    watcher, first = OrderWatcher(decoder, _LENGTH), None
    with contextlib.suppress(PlanError):
        return watcher.see(labels=(_ROWS, _LENGTH))
    if watcher.routers is not None:
        # What the stages have of the load-balancing loss crosses as numbers of its own. A model that does not run with
        # this loss is refused it later.
        watcher.routers = None
    for labels in ((_ROWS, _LENGTH), (_ROWS,), None):
        try:
            return watcher.see(labels=labels)
        except PlanError as error:
            first = first or error
    assert first is not None
    raise first


class OrderWatcher(Watcher):
    """Sees the order in which layers and other modules with weights run.

    Args:
        decoder: the decoder.
        length: the number of tokens of a row.

    Attributes:
        output: what the forward has returned.
        routers: sees the routers of the load-balancing loss; None if there is no such loss, or it is left out.
    """

    def __init__(self, decoder: Decoder, length: int):
        self.decoder, self.facts, self.layers, self.length = decoder, decoder.facts, decoder.layers, length
        self._index = {layer: i for i, layer in enumerate(self.layers)}
        stacks = stacks_of(self.facts).keys() & {m for tower in decoder.towers for m in self.facts.inside(tower)}
        self._of_towers = {layer for stack in stacks for layer in stack.children()} - set(self.layers)
        self._has_router_loss = forward_with_router_loss(decoder.model) is not None
        self.routers = RouterWatcher(self.facts) if self._has_router_loss else None
        self.output: Any = None

    def see(self, *others: Watcher, labels: tuple[int, ...] | None, source: int | None = None) -> OrderWatcher:
        """Run the decoder, also for other watchers, and return this object.

        Raises:
            PlanError: if the decoder cannot be run in this way.
        """
        own = (self,) if self.routers is None else (self, self.routers)
        self.output = observe(
            self.decoder,
            (*own, *others),
            rows=_ROWS,
            length=self.length,
            labels=labels,
            instead="ParallelPlan(pp=1)",
            options={OPTION: self.routers is not None} if self._has_router_loss else None,
            source=source,
        )
        return self

    def begin(self) -> None:
        """See Watcher."""
        self._events: list[int | str] = []
        self._inputs = InputRecorder(self.sources)
        self._shapes: set[tuple[int, ...]] = set()
        self._passing: dict[str, Returned] = {}
        self._given: set[str] = set()
        for parameter in self.facts.parameters.values():
            self.sources.set(parameter, [OUTSIDE])
        self._is_inside = False  # a layer runs

    def watching(self) -> AbstractContextManager[object]:
        """See Watcher."""
        owner = owner_of_layers(self.decoder)
        handles: list[RemovableHandle] = [owner.register_forward_pre_hook(self._enter_owner, with_kwargs=True)]
        for layer in self._of_towers:
            handles.append(layer.register_forward_hook(self._leave_tower_layer, with_kwargs=True))
        for layer in self.layers:
            handles.append(layer.register_forward_pre_hook(self._enter_layer, with_kwargs=True))
            handles.append(layer.register_forward_hook(self._leave_layer))
        for module in self.facts.names:
            if module not in self._index and any(p is not None for p in module._parameters.values()):
                handles.append(module.register_forward_pre_hook(self._enter_other))
        return hooked(handles)

    def _enter_owner(self, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = arguments(inspect.signature(owner.forward), args, kwargs)
        self._given = {name for name, x in inputs.items() if isinstance(x, Tensor) and self.sources.layers(x)}

    def _enter_layer(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._is_inside = True
        x, _ = hidden_states(args, kwargs)
        self._inputs.enter(layer, x, args, kwargs)
        self._shapes.add(tuple(x.shape))
        self._events.append(self._index[layer])

    def _leave_layer(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._is_inside = False
        if layer is self.layers[-1]:
            for parameter in self.facts.parameters.values():  # the last stage has the weights that are used from now on
                self.sources.set(parameter, [])
        self._inputs.leave(output)

    def _leave_tower_layer(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        x, _ = hidden_states(args, kwargs)
        leaves, spec = tree_flatten(output)
        if isinstance(leaves[0], Tensor) and (leaves[0].shape, leaves[0].dtype) == (x.shape, x.dtype):
            self._passing[self.facts.names[layer]] = Returned(spec=spec, values=(HIDDEN, *[None] * (len(leaves) - 1)))

    def _enter_other(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not self._is_inside:
            self._events.append(self.facts.names[module])

    def check_result(self) -> None:
        """Raise if the model computes its loss from more than the result of the last layer."""
        last = len(self.layers) - 1
        result = next((x for name in ("loss", "logits") if isinstance(x := self.output.get(name), Tensor)), None)
        if result is not None and (others := self.sources.layers(result) - {last}):
            what = "what it computes before them" if min(others) < 0 else f"the result of layer {min(others)}"
            raise PlanError(
                f"{type(self.facts.model).__name__} computes its loss from the result of its last layer and from "
                f"{what}, which the last stage of a pipeline does not have. Use ParallelPlan(pp=1)"
            )

    def order(self) -> LayerOrder:
        """Return what was seen of a pass.

        Raises:
            PlanError: if the layers did not run once each and in order, or weights were used between them.
        """
        ran = [event for event in self._events if isinstance(event, int)]
        kind = type(self.facts.model).__name__
        if ran != list(range(len(self.layers))):
            raise PlanError(
                f"the layers of {kind} do not run once each and in the order of their list, so they cannot be cut "
                "into pipeline stages. Use ParallelPlan(pp=1)"
            )
        first, last = self._events.index(0), self._events.index(ran[-1])
        if between := [event for event in self._events[first:last] if isinstance(event, str)]:
            raise PlanError(
                f"{kind} uses the weights of {between[0]} between its layers, so its layers cannot be cut into "
                "pipeline stages. Use ParallelPlan(pp=1)"
            )
        before = {event for event in self._events[:first] if isinstance(event, str)}
        after = {event for event in self._events[last:] if isinstance(event, str)}
        return LayerOrder(
            before=frozenset(before),
            after=frozenset(after),
            returned=tuple(self._inputs.returned),
            inputs=tuple(self._inputs.inputs),
            hidden=tuple(self._inputs.hidden),
            given=frozenset(self._given),
            passing=self._passing,
            hidden_size=self._hidden_size(),
            output_kind=type(self.output),
            routers=None if self.routers is None else self.routers.record(self.output),
        )

    def _hidden_size(self) -> int | None:
        shapes = set(self._shapes)
        shape = shapes.pop()
        return shape[-1] if not shapes and shape[:-1] == (_ROWS, self.length) else None
