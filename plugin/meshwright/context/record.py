"""Record, without computing, which arguments of a decoder's layers hold a value for each token, and its attentions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from meshwright.containers import rebuilt
from meshwright.context.attend import AttentionCall
from meshwright.context.attention import AttentionKind, attach_attention, detach_attention
from meshwright.context.masks import ContextMask
from meshwright.context.token_wise import is_token_wise
from meshwright.errors import PlanError
from meshwright.parallel.fake_pass import run_without_values
from meshwright.parallel.region_borders import RegionBorders
from meshwright.roles import Decoder
from meshwright.roles.adapters import is_adapted
from meshwright.roles.blocks import mixers_of
from meshwright.roles.projection import is_projection

_ROWS, _LENGTHS = 2, (11, 13)  # a size that differs between the two lengths counts tokens
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
        arguments: the places of all tensors among the arguments of each layer.
        sites: the attentions, in the order in which they run.
        reshapes: whether the decoder gives the result of its final norm the shape of the whole row, so that the tokens
            must be joined there, and cut again before the head.
        gives_masks: whether each layer is given the mask that its attention uses.
    """

    layers: tuple[nn.Module, ...]
    token_dims: dict[nn.Module, dict[Place, int]]
    arguments: dict[nn.Module, frozenset[Place]]
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
    token_dims: dict[nn.Module, dict[Place, int]] = {}
    mixers = mixers_of(model, decoder)
    for site in first.sites:
        _check_inside(site.module, names)
    for layer in layers:
        if layer not in first.shapes:
            raise PlanError(f"{names[layer]} of {type(model).__name__} does not run in a forward pass. Use {INSTEAD}")
        token_dims[layer] = {}
        for place, shape in first.shapes[layer].items():
            dims = [dim for dim, size in enumerate(shape) if size != second.shapes[layer][place][dim]]
            if len(dims) > 1:
                raise PlanError(
                    f"{names[layer]} of {type(model).__name__} is given {place[-1]!r} with {len(dims)} dims of tokens, "
                    "a mask or bias that transformers' mask functions did not make, so it cannot be cut. "
                    f"Use {INSTEAD}"
                )
            if dims:
                token_dims[layer][place] = dims[0]
        inside = set(layer.modules())
        has_known = any(module in inside for module in (*mixers.values(), *(site.module for site in first.sites)))
        if not has_known and not is_token_wise(layer):
            raise PlanError(
                f"{names[layer]} of {type(model).__name__} does not call transformers' attention interface, and it has "
                f"more than norms, MLPs and experts: it may have an attention of its own. Use {INSTEAD}"
            )
    arguments = {layer: frozenset(shapes) for layer, shapes in first.shapes.items()}
    return ContextRecord(
        layers=tuple(first.ran),
        token_dims=token_dims,
        arguments=arguments,
        sites=tuple(first.sites),
        reshapes=_reshapes(dataclasses.replace(decoder, layers=tuple(first.ran))),
        gives_masks=first.gives_masks,
    )


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
class _Pass:
    """Stands in place of the ContextAttention in a fake pass."""

    ran: list[nn.Module] = field(default_factory=list)
    shapes: dict[nn.Module, dict[Place, tuple[int, ...]]] = field(default_factory=dict)
    sites: list[AttentionSite] = field(default_factory=list)
    gives_masks: bool = True
    mask: ContextMask | None = None  # the mask that the current layer is given

    def attend(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
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
        if all(other.module is not call.module for other in self.sites):  # layers may share an attention
            self.sites.append(site)
        self.gives_masks &= call.mask is self.mask
        return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1])

    def enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.ran.append(layer)
        self.shapes[layer] = {place: tuple(x.shape) for place, x in tensors_in((args, kwargs))}
        self.mask = mask_in(args, kwargs)


def _pass(decoder: Decoder, length: int) -> _Pass:
    found, model = _Pass(), decoder.model
    layers = dict.fromkeys(decoder.layers)
    handles = [layer.register_forward_pre_hook(found.enter, with_kwargs=True) for layer in layers]
    attach_attention(decoder, found)
    try:
        run_without_values(model, rows=_ROWS, length=length, instead=INSTEAD)
    except PlanError as error:
        if ContextMask.__name__ not in str(error.__cause__):
            raise
        raise PlanError(
            f"{type(model).__name__} has an attention of its own, which uses its mask outside of transformers' "
            f"attention interface ({error.__cause__}), so it would not reach the tokens of other ranks. Use {INSTEAD}"
        ) from error
    finally:
        detach_attention(model)
        for handle in handles:
            handle.remove()
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
    attach_attention(decoder, _Pass())
    try:
        output = run_without_values(decoder.model, rows=_ROWS, length=_LENGTHS[0], instead=INSTEAD)
        return bool(output["logits"].shape[1] != some)
    except PlanError:
        return True
    finally:
        detach_attention(decoder.model)
        handle.remove()
        borders.remove()


def mask_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ContextMask | None:
    """Return the mask among the arguments of a layer."""
    return next((x for x in (*args, *kwargs.values()) if isinstance(x, ContextMask)), None)


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
