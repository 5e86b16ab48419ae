"""Record, without computing, which arguments of a decoder's layers hold a value for each token, and its attentions."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from meshwright.containers import rebuilt
from meshwright.context.attend import AttentionCall
from meshwright.context.attention import AttentionKind, attach_attention, detach_attention
from meshwright.context.masks import ContextMask
from meshwright.context.position_bias import lengths_method
from meshwright.context.token_wise import is_token_wise
from meshwright.errors import PlanError
from meshwright.parallel.fake_passes.fake_pass import run_without_values
from meshwright.parallel.fake_passes.sources import Sources
from meshwright.parallel.method_chain import arguments
from meshwright.parallel.region_borders import RegionBorders
from meshwright.parallel.tensor_parallel.block_boundary import hidden_states
from meshwright.roles import Decoder
from meshwright.roles.adapters import is_adapted
from meshwright.roles.blocks import mixers_of
from meshwright.roles.decoder import owner_of_layers
from meshwright.roles.projection import is_projection

_ROWS, _LENGTHS = 2, (11, 13)  # a size that differs between the two lengths counts tokens
_SOURCE = 7  # the number of tokens of an encoder, which is that of no other size
_SCANS = ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")
INSTEAD = "ParallelPlan(cp=1)"
Place = tuple[Any, ...]  # the keys that lead to a tensor inside a layer's (args, kwargs)


@dataclass(frozen=True, kw_only=True)
class AttentionSite:
    """One attention of a decoder.

    Args:
        module: the attention module.
        heads: the number of its query heads.
        key_heads: the number of its key heads.
        key_size: the number of channels of a key.
        value_size: the number of channels of a value.
        options: the keyword arguments that its attention function gets.
        shared: for each of these that is a parameter of the module: the parameter's name.
        kind: whose keys it sees, and which options are for pairs of tokens.
    """

    module: nn.Module
    heads: int
    key_heads: int
    key_size: int
    value_size: int
    options: dict[str, Any]
    shared: dict[str, str]
    kind: AttentionKind = field(default_factory=AttentionKind)


@dataclass(frozen=True, kw_only=True)
class ContextRecord:
    """The facts about a decoder that context parallelism uses.

    Args:
        layers: the layers in the order in which they run; one that a forward pass runs again is listed at each place.
        token_dims: for each argument of each layer that has a value for each token: the dim of the tokens.
        hidden_dim: the dim of the tokens in the hidden states of the first layer.
        arguments: the places of all tensors among the arguments of each layer.
        of_layers: the names of what the module around the layers is given that reaches the layers as an argument alone.
        sites: the attentions, in the order in which they run.
        reshapes: whether the decoder gives the result of its final norm the shape of the whole row, so that the tokens
            must be joined there, and cut again before the head.
        gives_masks: whether each layer is given the mask that its attention uses.
    """

    layers: tuple[nn.Module, ...]
    token_dims: dict[nn.Module, dict[Place, int]]
    hidden_dim: int
    arguments: dict[nn.Module, frozenset[Place]]
    of_layers: frozenset[str]
    sites: tuple[AttentionSite, ...]
    reshapes: bool
    gives_masks: bool


def record_context(decoder: Decoder) -> ContextRecord:
    """Run a decoder on fake tensors of two lengths, and return the arguments of its layers and attentions.

    Args:
        decoder: the decoder, with or without memory. It is not changed.

    Raises:
        PlanError: if tokens meet outside of transformers' attention interface, or a mask does not come from
            transformers' mask functions.
    """
    model, layers = decoder.model, decoder.layers
    first, second = (_pass(decoder, length) for length in _LENGTHS)
    names = {module: name for name, module in model.named_modules()}
    mixers = mixers_of(model, decoder)
    sites = tuple(_site(one, other) for one, other in zip(first.calls, second.calls, strict=True))
    for site in sites:
        _check_inside(site.module, names)
    token_dims = {}
    for layer in layers:
        if layer not in first.given:
            raise PlanError(f"{names[layer]} of {type(model).__name__} does not run in a forward pass. Use {INSTEAD}")
        inside = set(layer.modules())
        if layer in first.sources.scans and inside.isdisjoint(mixers.values()):
            raise PlanError(
                f"{names[layer]} of {type(model).__name__} counts along the tokens of a row "
                f"({first.sources.scans[layer]}), as a router with a limit of tokens for each expert does, so what it "
                f"computes of a token depends on those of other ranks. Use {INSTEAD}"
            )
        token_dims[layer] = _token_dims(first, second, layer, f"{names[layer]} of {type(model).__name__}")
        known = (*mixers.values(), *(site.module for site in sites if not site.kind.is_across))
        if inside.isdisjoint(known) and not is_token_wise(layer):
            raise PlanError(
                f"{names[layer]} of {type(model).__name__} does not call transformers' attention interface, and it has "
                f"more than norms, MLPs and experts: it may have an attention of its own. Use {INSTEAD}"
            )
    return ContextRecord(
        layers=tuple(first.ran),
        token_dims=token_dims,
        hidden_dim=next(
            dim for place, dim in token_dims[first.ran[0]].items() if first.given[first.ran[0]][place] is first.hidden
        ),
        arguments={layer: frozenset(given) for layer, given in first.given.items()},
        of_layers=frozenset(first.of_layers),
        sites=sites,
        reshapes=_reshapes(dataclasses.replace(decoder, layers=tuple(first.ran))),
        gives_masks=first.gives_masks,
    )


def _token_dims(first: _Pass, second: _Pass, layer: nn.Module, name: str) -> dict[Place, int]:
    """Return the dim of the tokens for each argument of a layer that is to be cut, from passes of two lengths.

    What an earlier layer has returned has this rank's tokens already. A bias for pairs of tokens stays whole.
    """
    found = {}
    for place, x in first.given[layer].items():
        other = second.given[layer][place]
        dims = [dim for dim, size in enumerate(x.shape) if size != other.shape[dim]]
        if layer is first.ran[0] and x is first.hidden and (len(dims) != 1 or dims == [0]):
            raise PlanError(
                f"{name} computes hidden states of shape {tuple(x.shape)} for {_ROWS} rows of {first.length} tokens, "
                f"which have no dim of tokens behind that of rows, so they cannot be cut. Use {INSTEAD}"
            )
        if first.is_handed(x) or (len(dims) == 2 and first.is_bias(x)):
            continue
        if len(dims) > 1:
            raise PlanError(
                f"{name} is given {place[-1]!r} with {len(dims)} dims of tokens, a mask or bias that transformers' "
                f"mask functions did not make, so it cannot be cut. Use {INSTEAD}"
            )
        if dims:
            found[place] = dims[0]
    return found


def _site(first: _Call, second: _Call) -> AttentionSite:
    """Return what an attention computes with, from its calls in passes of two lengths.

    Raises:
        PlanError: if its queries or keys are neither those of the tokens nor those of an encoder.
    """
    name = type(first.site.module).__name__
    queries, keys = (first.queries, second.queries), (first.keys, second.keys)
    if queries != _LENGTHS or (keys != _LENGTHS and keys[0] != keys[1]):
        raise PlanError(
            f"{name} attends with {queries[0]} queries to {keys[0]} keys in a row of {_LENGTHS[0]} tokens. Under "
            "ParallelPlan.cp > 1 an attention has a query for each token, and the keys of all tokens or those of an "
            f"encoder alone. Use {INSTEAD}"
        )
    biases = set()
    for option, x in first.site.options.items():
        if isinstance(x, Tensor):
            dims = [dim - x.ndim for dim, size in enumerate(x.shape) if size != second.site.options[option].shape[dim]]
            if dims == [-2, -1]:
                biases.add(option)
    is_across = keys != _LENGTHS
    if biases - first.given_biases and not is_across and lengths_method(first.site.module) is None:
        raise PlanError(
            f"{name} makes {', '.join(sorted(biases))} for pairs of tokens, by no method with the arguments "
            f"query_length and key_length, so a rank would make it for its own tokens alone. Use {INSTEAD}"
        )
    kind = AttentionKind(is_across=is_across, biases=frozenset() if is_across else frozenset(biases))
    return dataclasses.replace(first.site, kind=kind)


def _check_inside(attention: nn.Module, names: dict[nn.Module, str]) -> None:
    """Raise if an attention has a module with several projections inside, which may choose among one rank's tokens."""
    for module in attention.modules():
        own = [child for child in module.children() if is_projection(child)]
        if module is not attention and len(own) > 1 and not is_adapted(module):
            raise PlanError(
                f"{names[module]} ({type(module).__name__}) has projections of its own inside of an attention. It may "
                f"choose which tokens attention sees, among those of one rank alone. Use {INSTEAD}"
            )


@dataclass
class _Call:
    """A call of an attention in a pass.

    Args:
        site: the attention.
        queries: the number of its queries.
        keys: the number of its keys.
        given_biases: the names of its options that its layer was given.
    """

    site: AttentionSite
    queries: int
    keys: int
    given_biases: frozenset[str]


class _Pass:
    """Stands in place of the ContextAttention in a fake pass.

    Args:
        decoder: the decoder.
        length: the number of tokens of a row.

    Attributes:
        ran: the layers in the order in which they have run.
        given: the tensors that each layer is given, by place.
        calls: the first call of each attention.
        of_layers: the names of what the module around the layers is given that reaches layers as an argument alone.
        gives_masks: whether each layer is given the mask that its attention uses.
    """

    def __init__(self, decoder: Decoder, length: int):
        self.length, self.sources = length, _Scans(length)
        self._layers = dict.fromkeys(decoder.layers)
        self._owner = owner_of_layers(decoder.model, decoder.layers)
        self._last = RegionBorders(decoder).last
        self._begin()

    def _begin(self, *_: object) -> None:
        """Forget a pass that has failed."""
        self.ran: list[nn.Module] = []
        self.given: dict[nn.Module, dict[Place, Tensor]] = {}
        self.calls: list[_Call] = []
        self.of_layers: set[str] = set()
        self.gives_masks, self.has_ended = True, False
        self.hidden: Tensor | None = None  # of the first layer
        self._mask: ContextMask | None = None  # the mask that the current layer is given
        self._names: list[str] = []  # of what the module around the layers is given
        self._handed: list[Tensor] = []  # what layers have returned
        self._biases: list[Tensor] = []  # options of attentions

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        handles = [model.register_forward_pre_hook(self._begin)]
        handles.append(self._owner.register_forward_pre_hook(self._enter_owner, with_kwargs=True))
        for layer in self._layers:
            handles.append(layer.register_forward_pre_hook(self._enter, with_kwargs=True))
            handles.append(layer.register_forward_hook(self._leave))
        handles.append(self._last.register_forward_hook(self._end))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def is_across(self, kind: AttentionKind, q: Tensor, k: Tensor) -> bool:
        return q.shape[2] != k.shape[2]

    def attend_across(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._attended(call, q, k, v)

    def attend(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.gives_masks &= call.mask is self._mask
        return self._attended(call, q, k, v)

    def _attended(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parameters = call.module._parameters.items()
        site = AttentionSite(
            module=call.module,
            heads=q.shape[1],
            key_heads=k.shape[1],
            key_size=k.shape[-1],
            value_size=v.shape[-1],
            options=call.options,
            shared={name: own for name, x in call.options.items() for own, p in parameters if x is p},
        )
        options = {name: x for name, x in call.options.items() if isinstance(x, Tensor)}
        self._biases += options.values()
        known = [*self._handed, *(x for given in self.given.values() for x in given.values())]
        given = frozenset(name for name, x in options.items() if _is_among(x, known))
        if all(other.site.module is not call.module for other in self.calls):  # layers may share an attention
            self.calls.append(_Call(site, q.shape[2], k.shape[2], given))
        return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1])

    def is_handed(self, x: Tensor) -> bool:
        """Return whether an earlier layer has returned a tensor."""
        return x is not self.hidden and _is_among(x, self._handed)

    def is_bias(self, x: Tensor) -> bool:
        """Return whether a tensor has reached an attention as an option."""
        return _is_among(x, self._biases)

    def _enter_owner(self, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = arguments(inspect.signature(owner.forward), args, kwargs)
        for name, value in given.items():
            if any(x.is_floating_point() for _, x in tensors_in(value)):
                self._names.append(name)
                for _, x in tensors_in(value):
                    self.sources.set(x, [len(self._names) - 1])

    def _enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden, _ = hidden_states(args, kwargs)
        if not self.ran:
            self.hidden = hidden
        self.ran.append(layer)
        self.sources.layer = layer
        given = dict(tensors_in((args, kwargs)))
        self.given.setdefault(layer, given)  # a layer that runs again gets other tensors in the same places
        self._mask = mask_in(args, kwargs)
        beside = [x for x in given.values() if x is not hidden]
        self.of_layers |= {self._names[number] for x in beside for number in self.sources.of(x)}
        if hidden is self.hidden:  # computed before the layers, for the whole row
            self.of_layers |= {self._names[number] for number in self.sources.of(hidden)}
        else:
            self.of_layers -= {self._names[number] for number in self.sources.of(hidden)}

    def _leave(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return the result in tensors that are those of this layer alone."""
        self.sources.layer = None
        leaves, spec = tree_flatten(output)
        leaves = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
        self._handed += [x for x in leaves if isinstance(x, Tensor)]
        for x in self._handed:
            self.sources.set(x, [])
        return tree_unflatten(leaves, spec)

    def _end(self, module: nn.Module, *_: object) -> None:
        self.has_ended = self.given.keys() == self._layers.keys()


class _Scans(Sources):
    """Knows the sources of tensors, and the layers that count or sum along the tokens.

    Args:
        length: the number of tokens of a row.

    Attributes:
        layer: the layer that runs.
        scans: for each layer that does so, the operation.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self._sizes = (length, _ROWS * length)
        self.layer: nn.Module | None = None
        self.scans: dict[nn.Module, str] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.rpartition("::")[2]
        if self.layer is not None and name in _SCANS and args[0].ndim and args[0].shape[args[1]] in self._sizes:
            self.scans[self.layer] = name
        return super().__torch_dispatch__(func, types, args, kwargs)


def _is_among(x: Tensor, others: Iterable[Tensor]) -> bool:
    """Return whether a tensor has the memory of one of others."""
    return any(x.untyped_storage()._cdata == other.untyped_storage()._cdata for other in others)


def _pass(decoder: Decoder, length: int, source: int | None = _SOURCE) -> _Pass:
    found, model = _Pass(decoder, length), decoder.model
    attach_attention(decoder, found)
    try:
        with found.watching(model):
            run_without_values(
                model,
                rows=_ROWS,
                length=length,
                source=source,
                instead=INSTEAD,
                watch=found.sources,
                is_done=lambda: found.has_ended,
            )
    except PlanError as error:
        if ContextMask.__name__ not in str(error.__cause__):
            raise
        raise PlanError(
            f"{type(model).__name__} has an attention of its own, which uses its mask outside of transformers' "
            f"attention interface ({error.__cause__}), so it would not reach the tokens of other ranks. Use {INSTEAD}"
        ) from error
    finally:
        detach_attention(model)
    if source is not None and found.calls and all(call.queries == source for call in found.calls):
        return _pass(decoder, length, source=None)  # a forward with decoder_input_ids for other decoders than this one
    return found


def _reshapes(decoder: Decoder) -> bool:
    """Return whether a decoder needs all tokens of the row after its final norm."""
    some = 5
    borders = RegionBorders(decoder)
    borders.begin()

    def cut(module: nn.Module, args: tuple[Any, ...], output: Tensor | tuple[Any, ...]) -> Any:
        if not borders.has_ended():
            return output
        return output[:, :some] if isinstance(output, Tensor) else (output[0][:, :some], *output[1:])

    handle = borders.last.register_forward_hook(cut)
    attach_attention(decoder, _Pass(decoder, _LENGTHS[0]))
    try:
        output = run_without_values(decoder.model, rows=_ROWS, length=_LENGTHS[0], source=_SOURCE, instead=INSTEAD)
        return bool(output["logits"].shape[1] != some)
    except PlanError:
        return True
    finally:
        detach_attention(decoder.model)
        handle.remove()
        borders.remove()


def mask_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ContextMask | None:
    """Return the mask of the sequence among the arguments of a layer."""
    masks = (x for x in (*args, *kwargs.values()) if isinstance(x, ContextMask))
    return next((x for x in masks if not x.is_for_all_queries or x.keys == x.length), None)


def tensors_in(value: object, place: Place = ()) -> Iterator[tuple[Place, Tensor]]:
    """Yield the tensors inside tuples, lists and dicts, each with the keys that lead to it."""
    if isinstance(value, Tensor):
        yield place, value
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from tensors_in(item, (*place, index))
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from tensors_in(item, (*place, name))


def map_tensors(change: Callable[[Tensor, Place], Any], value: object, place: Place = ()) -> Any:
    """Return ``value`` with ``change(tensor, keys that lead to it)`` for each tensor inside tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return change(value, place)
    if isinstance(value, tuple | list):
        return rebuilt(value, [map_tensors(change, item, (*place, index)) for index, item in enumerate(value)])
    if type(value) is dict:
        return {name: map_tensors(change, item, (*place, name)) for name, item in value.items()}
    return value
