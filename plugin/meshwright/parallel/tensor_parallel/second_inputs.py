"""Inputs beside the hidden states that need a gradient or must be cut: an encoder's result, biases of positions,
features of towers.

Every rank of tp has the whole input, and its blocks compute with some heads or channels, so each has an addend of the
gradient. The blocks share the input: backward sums the addends. A module that stays whole has the whole gradient
already. Any other use in a layer would count once per rank or in part, and is refused in the layer's first pass.

An input with a value for each token, which the layer itself combines with its hidden states, is cut as these are.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node as GraphNode
from torch.utils._pytree import tree_map_only

from meshwright.errors import PlanError
from meshwright.mesh.axes import Axis
from meshwright.parallel.autograd_graph import bypasses, in_backward, tensors_in
from meshwright.parallel.collectives import share
from meshwright.parallel.method_chain import arguments
from meshwright.parallel.sequence_parts import Parted
from meshwright.parallel.tensor_parallel.block_boundary import PER_HEAD, hidden_states
from meshwright.parallel.tensor_parallel.sequence_parallel import SequenceSharding
from meshwright.roles import Decoder
from meshwright.roles.blocks import Block
from meshwright.roles.decoder import owner_of_layers

PER_TOKEN = frozenset({"per_layer_input"})  # the arguments of layers with a value for each token


class SecondInputs:
    """Hooks on layers, on their blocks and on their whole modules that give each its part of a second input's gradient.

    Args:
        layers: the layers.
        blocks: the blocks of the layers.
        whole: the modules of layers that every rank computes for all tokens.
        axis: the axis of tp.
        sequence: how the ranks share the tokens between the blocks; None if each has all.
    """

    def __init__(
        self,
        layers: Iterable[nn.Module],
        blocks: Iterable[Block],
        whole: Iterable[nn.Module],
        axis: Axis,
        sequence: SequenceSharding | None = None,
    ):
        self.axis, self.sequence = axis, sequence
        blocks = tuple(blocks)
        self._local_heads = {block.heads.local_heads for block in blocks if block.heads is not None}
        self._layers = tuple(dict.fromkeys(layers))
        self._has_parts = any(PER_TOKEN & inspect.signature(x.forward).parameters.keys() for x in self._layers)
        self._outside: list[weakref.ref[Tensor]] = []  # what the first layer got: nothing in a layer has computed it
        self._given: dict[str, Tensor] = {}  # the second inputs of the running layer
        self._gates: list[GraphNode | None] = []
        self._checked: set[nn.Module] = set()
        for layer in self._layers:
            layer.register_forward_pre_hook(self._enter, with_kwargs=True)
            layer.register_forward_hook(self._leave, always_call=True)
        for block in blocks:
            for entry in block.entries:
                entry.register_forward_pre_hook(self._share, with_kwargs=True, prepend=True)
        for module in whole:
            module.register_forward_pre_hook(self._pass, with_kwargs=True, prepend=True)

    def _enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._given, self._gates = {}, []
        found = second_inputs(layer, args, kwargs)
        if layer is self._layers[0] and not in_backward():
            if caches := {n: x for n, x in _named(layer, args, kwargs).items() if is_cache_with_gradient(x)}:
                _refuse(layer, caches)
            self._outside = [weakref.ref(x) for x in found.values() if isinstance(x, Tensor)]
        found = {n: x for n, x in found.items() if n not in PER_TOKEN and not self._is_of_own_heads(n, x)}
        if not found:
            return self._cut(layer, args, kwargs)
        if not all(isinstance(x, Tensor) and self._is_from_outside(x) for x in found.values()):
            _refuse(layer, found)
        self._given = {n: x.view_as(x) for n, x in found.items()}
        args, kwargs = _replaced(args, kwargs, {id(x): self._given[n] for n, x in found.items()})
        return self._cut(layer, args, kwargs)

    def _cut(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments with this rank's tokens of those that have a value for each token."""
        if self.sequence is None or not self._has_parts:
            return args, kwargs
        named = _named(layer, args, kwargs)
        parts = {id(x): self.sequence.split(x) for n, x in named.items() if n in PER_TOKEN and isinstance(x, Tensor)}
        return _replaced(args, kwargs, parts)

    def _is_from_outside(self, x: Tensor) -> bool:
        # A stage of a pipeline receives what no layer has computed as a leaf.
        is_received = x.is_leaf and not isinstance(x, nn.Parameter)
        return in_backward() or is_received or any(x is known() for known in self._outside)

    def _is_of_own_heads(self, name: str, x: Any) -> bool:
        """Return whether an input is a bias for each of this rank's heads, which an earlier layer has computed."""
        return name.endswith(PER_HEAD) and isinstance(x, Tensor) and x.ndim == 4 and x.shape[1] in self._local_heads

    def _share(self, entry: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._through(args, kwargs, lambda x: share(x, self.axis))

    def _pass(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._through(args, kwargs, lambda x: x.view_as(x))

    def _through(self, args: tuple[Any, ...], kwargs: dict[str, Any], gate: Callable[[Tensor], Tensor]) -> Any:
        if not self._given:
            return None
        own = {id(x) for x in self._given.values()}
        gated = {id(x): gate(x) for x in (*args, *kwargs.values()) if id(x) in own}
        self._gates += [x.grad_fn for x in gated.values()]
        return _replaced(args, kwargs, gated)

    def _leave(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        given, self._given = self._given, {}
        if not given or output is None or layer in self._checked:
            return
        if beside := {n: x for n, x in given.items() if bypasses(output, x, *self._gates)}:
            _refuse(layer, beside)
        self._checked.add(layer)


def second_inputs(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return by name what a layer is given beside its hidden states that requires a gradient."""
    if not torch.is_grad_enabled():
        return {}
    hidden, _ = hidden_states(args, kwargs)
    if not any(_has_gradient(x, hidden) for x in (*args, *kwargs.values())):
        return {}
    return {n: x for n, x in _named(layer, args, kwargs).items() if _has_gradient(x, hidden)}


def _named(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return arguments(inspect.signature(layer.forward), args, kwargs)


def is_cache_with_gradient(value: Any) -> bool:
    """Return whether a value has keys or values for each layer that require a gradient: those of another decoder."""
    if not torch.is_grad_enabled() or isinstance(value, Tensor | nn.Module):
        return False
    kept = getattr(value, "layers", None)
    tensors = [getattr(x, name, None) for x in (kept if isinstance(kept, list) else ()) for name in ("keys", "values")]
    return any(isinstance(x, Tensor) and x.requires_grad for x in tensors)


def _has_gradient(value: Any, hidden: Tensor) -> bool:
    # Not a function inside its caller: one that calls itself would hold the hidden states until a garbage collection.
    if isinstance(value, Tensor):
        return value.requires_grad and value is not hidden
    return isinstance(value, list | tuple) and any(_has_gradient(x, hidden) for x in value if isinstance(x, Tensor))


def _refuse(layer: nn.Module, names: Iterable[str]) -> None:
    raise PlanError(
        f"{type(layer).__name__} is given {', '.join(names)} beside its hidden states, and this input requires a "
        "gradient. Each rank of tp would have only a part of that gradient. Use ParallelPlan(tp=1)"
    )


def _replaced(args: tuple[Any, ...], kwargs: dict[str, Any], by: dict[int, Tensor]) -> Any:
    return tuple(by.get(id(x), x) for x in args), {n: by.get(id(x), x) for n, x in kwargs.items()}


_BEFORE_LAYERS = ("inputs_embeds", "attention_mask")


class TowerFeatures:
    """A hook on the module that runs the layers, which cuts the features that it gets beside the embeddings.

    They are known if a mask of the tokens, ``[B, S]``, is True in as many places as there are features: then the module
    adds them to the hidden states of these tokens. Other features are refused, since how to cut them is not known.

    Args:
        decoder: the decoder, with towers.
        axis: the axis that cuts what the layers compute, for messages.
        sequence: how the ranks of tp share the tokens; None if each has all of them.
        region: what knows the tokens of this rank of cp; None without context parallelism.
        is_staged: whether the layers are spread over the stages of a pipeline.
        of_layers: the names of what the layers themselves are given, such as the result of an encoder, which reaches
            them whatever this rank has of the tokens and layers.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        axis: str,
        sequence: SequenceSharding | None,
        region: Parted | None,
        is_staged: bool,
        of_layers: Set[str],
    ):
        self.axis, self.sequence, self.region, self.is_staged = axis, sequence, region, is_staged
        self._added: list[_Features] = []  # those of the running stage
        owner = owner_of_layers(decoder)
        self._of_layers = of_layers
        self._owner, self._signature = type(owner).__name__, inspect.signature(owner.forward)
        owner.register_forward_pre_hook(self._enter, with_kwargs=True)

    def end_stage(self) -> None:
        """Check that the layers of a stage have got all features, since the stages after it have none.

        Raises:
            PlanError: if some features belong to layers of later stages.
        """
        added, self._added = self._added, []
        if any(len(features.read) < len(features) for features in added):
            raise PlanError(
                f"{self._owner} adds features of a tower after layers that are not in the first stage, which alone has "
                "them. Give the first stage more layers: use fewer stages (ParallelPlan.pp), or pp=1"
            )

    def _enter(
        self, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._added = []
        given = arguments(self._signature, args, kwargs)
        features = {
            n: value for n, value in given.items() if n not in {*_BEFORE_LAYERS, *self._of_layers} and _has_reals(value)
        }
        if not features:
            return None
        name, mask = _mask(given, [x for value in features.values() for x in tensors_in(value)])
        if mask is None or (self.is_staged and not all(type(value) is list for value in features.values())):
            raise PlanError(
                f"{self._owner} is given {', '.join(features)} beside the embeddings, which it may add between its "
                f"layers. ParallelPlan.{self.axis} > 1 cuts what its layers compute, and a rank would add features of "
                f"other layers or tokens. Use {self.axis}=1"
            )
        places = self._own(mask.flatten().cumsum(0).view(mask.shape) * mask)  # from 1; 0 for tokens without a feature
        own = places[places > 0] - 1
        changed: dict[str, Any] = {name: places > 0}
        for n, value in features.items():
            changed[n] = tree_map_only(Tensor, lambda x: self._of_own_tokens(x, own), value)
            if self.is_staged:
                changed[n] = _Features(changed[n])
                self._added.append(changed[n])
        positional = tuple(changed.get(n, x) for n, x in zip(self._signature.parameters, args, strict=False))
        return positional, {n: changed.get(n, x) for n, x in kwargs.items()}

    def _own(self, places: Tensor) -> Tensor:
        if self.region is not None:
            places = self.region.parts.take(places, 1)
        return places if self.sequence is None else self.sequence.split(places.unsqueeze(-1)).squeeze(-1)

    def _of_own_tokens(self, features: Tensor, own: Tensor) -> Tensor:
        # Each rank of tp has the whole gradient of the embeddings, and so of what a tower adds to them.
        whole = features if self.sequence is None else share(features, self.sequence.axis)
        return whole[own]


class _Features(list[Tensor]):
    """Features for several layers, which remembers those that were read."""

    def __init__(self, features: list[Tensor]):
        super().__init__(features)
        self.read: set[object] = set()

    def __getitem__(self, index: Any) -> Any:
        self.read.add(index)
        return super().__getitem__(index)


def _has_reals(value: object) -> bool:
    # A number, such as a count of labels, is no feature.
    return any(x.is_floating_point() and x.ndim for x in tensors_in(value))


def _mask(given: Mapping[str, object], features: list[Tensor]) -> tuple[str, Tensor | None]:
    """Return the mask of the tokens that have features, and its name; None if it is not known."""
    tokens = next((x for n in ("inputs_embeds", "input_ids") if isinstance(x := given.get(n), Tensor)), None)
    masks = [(n, x) for n, x in given.items() if isinstance(x, Tensor) and x.dtype == torch.bool]
    masks = [(n, x) for n, x in masks if tokens is not None and x.shape == tokens.shape[:2]]
    # The host waits for the number of tokens once, however many features there are.
    if len(masks) == 1 and {(x.ndim, *x.shape[:1]) for x in features} == {(2, int(masks[0][1].sum()))}:
        return masks[0]
    return "", None
