"""A pass without values that sees what a decoder's layers and attentions are given, wherever it is among their
arguments.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshwright.containers import rebuilt
from meshwright.context.attend import AttentionCall
from meshwright.context.attention import AttentionKind, attach_attention, detach_attention
from meshwright.context.masks import ContextMask
from meshwright.errors import PlanError
from meshwright.parallel.experts.routers import OPTION
from meshwright.parallel.fake_passes.observe import Watcher, hooked, observe
from meshwright.parallel.method_chain import RegionBorders, arguments
from meshwright.parallel.tensor_parallel.block_boundary import hidden_states
from meshwright.roles import Decoder
from meshwright.roles.decoder import owner_of_layers

Place = tuple[Any, ...]  # the keys that lead to a tensor inside a layer's (args, kwargs)


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


ROWS = 2
SOURCE = 7  # the number of tokens of an encoder, which is that of no other size
INSTEAD = "ParallelPlan(cp=1)"
SOME = 5  # tokens that a cut leaves of a row
_SCANS = ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")


@dataclass(frozen=True, kw_only=True)
class AttentionSite:
    """One attention of a decoder.

    Args:
        module: the attention module.
        heads: the number of its query heads.
        key_heads: the number of its key heads.
        key_size: the number of channels of a key.
        value_size: the number of channels of a value.
        options: the keyword arguments that its attention function gets, each tensor as its shape.
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


@dataclass
class RecordedCall:
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


class ContextWatcher(Watcher):
    """Sees what layers and attentions are given, standing in place of the ContextAttention.

    Args:
        decoder: the decoder.
        length: the number of tokens of a row.

    Attributes:
        ran: the layers in the order in which they have run.
        given: the tensors that each layer is given, by place.
        calls: the first call of each attention.
        of_layers: the names of what the module around the layers is given that reaches layers as an argument alone.
        gives_masks: whether each layer is given the mask that its attention uses.
        scans: for each layer that counts or sums along the tokens, the operation.
    """

    def __init__(self, decoder: Decoder, length: int):
        self.decoder, self.length = decoder, length
        self._sizes = (length, ROWS * length)
        self._layers = dict.fromkeys(decoder.layers)
        self._last = decoder.final_norm or decoder.layers[-1]

    def begin(self) -> None:
        """See Watcher."""
        self.ran: list[nn.Module] = []
        self.given: dict[nn.Module, dict[Place, Tensor]] = {}
        self.calls: list[RecordedCall] = []
        self.of_layers: set[str] = set()
        self.scans: dict[nn.Module, str] = {}
        self.gives_masks, self._has_ended = True, False
        self.hidden: Tensor | None = None  # of the first layer
        self._running: nn.Module | None = None  # the layer
        self._mask: ContextMask | None = None  # the mask that the current layer is given
        self._handed: list[Tensor] = []  # what layers have returned
        self._biases: list[Tensor] = []  # options of attentions
        self.sources.listeners.append(self._listen)

    def has_ended(self) -> bool:
        """See Watcher."""
        return self._has_ended

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """See Watcher."""
        owner = owner_of_layers(self.decoder)
        handles = [owner.register_forward_pre_hook(self._enter_owner, with_kwargs=True)]
        for layer in self._layers:
            handles.append(layer.register_forward_pre_hook(self._enter, with_kwargs=True))
            handles.append(layer.register_forward_hook(self._leave))
        handles.append(self._last.register_forward_hook(self._end))
        attach_attention(self.decoder, self)
        try:
            with hooked(handles):
                yield
        finally:
            detach_attention(self.decoder.facts)

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
            options={
                name: x.shape if isinstance(x, Tensor) else x for name, x in call.options.items() if name != OPTION
            },
            shared={name: own for name, x in call.options.items() for own, p in parameters if x is p},
        )
        options = {name: x for name, x in call.options.items() if isinstance(x, Tensor)}
        self._biases += options.values()
        known = [*self._handed, *(x for given in self.given.values() for x in given.values())]
        given = frozenset(name for name, x in options.items() if _is_among(x, known))
        if all(other.site.module is not call.module for other in self.calls):  # layers may share an attention
            self.calls.append(RecordedCall(site, q.shape[2], k.shape[2], given))
        return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1])

    def sees_source(self, source: int) -> bool:
        """Return whether all attentions have had the tokens of an encoder alone.

        The forward has decoder_input_ids for other decoders than this one then, as that of BLIP-2 has.
        """
        return bool(self.calls) and all(call.queries == source for call in self.calls)

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
                for _, x in tensors_in(value):
                    self.sources.add(x, name)

    def _enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden, _ = hidden_states(args, kwargs)
        if not self.ran:
            self.hidden = hidden
        self.ran.append(layer)
        self._running = layer
        given = dict(tensors_in((args, kwargs)))
        self.given.setdefault(layer, given)  # a layer that runs again gets other tensors in the same places
        self._mask = mask_in(args, kwargs)
        for x in given.values():
            if x is not hidden:
                self.of_layers |= self.sources.names(x)
        if hidden is self.hidden:  # computed before the layers, for the whole row
            self.of_layers |= self.sources.names(hidden)
        else:
            self.of_layers -= self.sources.names(hidden)

    def _leave(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._running = None
        self._handed += [x for x in tree_leaves(output) if isinstance(x, Tensor)]

    def _end(self, module: nn.Module, *_: object) -> None:
        self._has_ended = self.given.keys() == self._layers.keys()

    def _listen(self, func: Any, args: tuple[Any, ...]) -> None:
        if self._running is None or (name := func._schema.name.rpartition("::")[2]) not in _SCANS:
            return
        if args[0].ndim and args[0].shape[args[1]] in self._sizes:
            self.scans[self._running] = name


def _is_among(x: Tensor, others: Iterable[Tensor]) -> bool:
    """Return whether a tensor has the memory of one of others."""
    return any(x.untyped_storage()._cdata == other.untyped_storage()._cdata for other in others)


class CutPass(ContextWatcher):
    """Sees a pass in which the result of the final norm has fewer tokens than the row.

    Args:
        decoder: the decoder, whose layers are those that run, in this order.
        length: the number of tokens of a row.
    """

    def begin(self) -> None:
        """See Watcher."""
        super().begin()
        self._borders.begin()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """See Watcher."""
        self._borders = RegionBorders(self.decoder)
        with super().watching(), hooked([self._last.register_forward_hook(self._cut)]):
            try:
                yield
            finally:
                self._borders.remove()

    def _cut(self, module: nn.Module, args: tuple[Any, ...], output: Tensor | tuple[Any, ...]) -> Any:
        if not self._borders.has_ended():
            return output
        return output[:, :SOME] if isinstance(output, Tensor) else (output[0][:, :SOME], *output[1:])


def run_pass(watcher: ContextWatcher, source: int | None = SOURCE) -> Any:
    """Run a decoder on rows of some tokens without values, and return its output.

    Args:
        watcher: what is to see the pass.
        source: the number of tokens of an encoder; None for none.

    Raises:
        PlanError: if the decoder cannot run without values, or uses its masks outside of transformers' interface.
    """
    decoder = watcher.decoder
    try:
        output = observe(decoder, [watcher], rows=ROWS, length=watcher.length, source=source, instead=INSTEAD)
    except PlanError as error:
        if ContextMask.__name__ not in str(error.__cause__):
            raise
        raise PlanError(
            f"{type(decoder.model).__name__} has an attention of its own, which uses its mask outside of transformers' "
            f"attention interface ({error.__cause__}), so it would not reach the tokens of other ranks. Use {INSTEAD}"
        ) from error
    return run_pass(watcher, source=None) if source is not None and watcher.sees_source(source) else output
