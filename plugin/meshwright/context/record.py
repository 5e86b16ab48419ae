"""Record, without computing, which arguments of a decoder's layers hold a value for each token, and its attentions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshwright.context.attention import AttentionKind
from meshwright.context.layer_arguments import Place
from meshwright.context.position_bias import lengths_method
from meshwright.context.recorded_pass import (
    INSTEAD,
    ROWS,
    SOME,
    AttentionSite,
    ContextWatcher,
    CutPass,
    RecordedCall,
    run_pass,
)
from meshwright.context.token_wise import is_token_wise
from meshwright.errors import PlanError
from meshwright.parallel.fake_passes.remembered import of_decoder
from meshwright.roles import Decoder
from meshwright.roles.adapters import is_adapted
from meshwright.roles.blocks import mixers_of
from meshwright.roles.projection import is_projection

LENGTHS = 11, 13  # a size that differs between the two lengths counts tokens


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


def record_context(decoder: Decoder, seen: Callable[[], ContextWatcher | None] | None = None) -> ContextRecord:
    """Run a decoder on fake tensors of two lengths, and return the arguments of its layers and attentions.

    Args:
        decoder: the decoder, with or without memory. It is not changed.
        seen: returns one that has seen a pass of the shorter rows also for others; it returns None if this did not
            work.

    Raises:
        PlanError: if tokens meet outside of transformers' attention interface, or a mask does not come from
            transformers' mask functions.
    """
    mixers = mixers_of(decoder.facts, decoder)
    return of_decoder(decoder, "context", lambda: _record(decoder, mixers, seen and seen()), *mixers)


def _record(decoder: Decoder, mixers: Mapping[str, nn.Module], first: ContextWatcher | None) -> ContextRecord:
    """Return what two passes show."""
    model, layers = decoder.model, decoder.layers
    if first is None:
        run_pass(first := ContextWatcher(decoder, LENGTHS[0]))
    # The second pass also shows whether the head gets the tokens that the final norm has returned.
    second = CutPass(dataclasses.replace(decoder, layers=tuple(first.ran) or layers), LENGTHS[1])
    output = run_pass(second)
    logits = output.get("logits") if isinstance(output, Mapping) else None
    facts, names = decoder.facts, decoder.facts.names
    sites = tuple(_site(one, other) for one, other in zip(first.calls, second.calls, strict=True))
    for site in sites:
        for module in facts.inside(site.module):
            own = [child for child in module.children() if is_projection(child)]
            if module is not site.module and len(own) > 1 and not is_adapted(module):
                raise PlanError(
                    f"{names[module]} ({type(module).__name__}) has projections of its own inside of an attention. It "
                    f"may choose which tokens attention sees, among those of one rank alone. Use {INSTEAD}"
                )
    token_dims = {}
    for layer in layers:
        if layer not in first.given:
            raise PlanError(f"{names[layer]} of {type(model).__name__} does not run in a forward pass. Use {INSTEAD}")
        inside = set(facts.inside(layer))
        if layer in first.scans and inside.isdisjoint(mixers.values()):
            raise PlanError(
                f"{names[layer]} of {type(model).__name__} counts along the tokens of a row "
                f"({first.scans[layer]}), as a router with a limit of tokens for each expert does, so what it "
                f"computes of a token depends on those of other ranks. Use {INSTEAD}"
            )
        token_dims[layer] = _token_dims(first, second, layer, f"{names[layer]} of {type(model).__name__}")
        known = (*mixers.values(), *(site.module for site in sites if not site.kind.is_across))
        if inside.isdisjoint(known) and not is_token_wise(facts, layer):
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
        # What else a model of one's own returns shows nothing of the tokens that it is computed from.
        reshapes=not isinstance(logits, Tensor) or logits.shape[1] != SOME,
        gives_masks=first.gives_masks,
    )


def _token_dims(first: ContextWatcher, second: ContextWatcher, layer: nn.Module, name: str) -> dict[Place, int]:
    """Return the dim of the tokens for each argument of a layer that is to be cut, from passes of two lengths.

    What an earlier layer has returned has this rank's tokens already. A bias for pairs of tokens stays whole.
    """
    found = {}
    for place, x in first.given[layer].items():
        other = second.given[layer][place]
        dims = [dim for dim, size in enumerate(x.shape) if size != other.shape[dim]]
        if layer is first.ran[0] and x is first.hidden and (len(dims) != 1 or dims == [0]):
            raise PlanError(
                f"{name} computes hidden states of shape {tuple(x.shape)} for {ROWS} rows of {first.length} tokens, "
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


def _site(first: RecordedCall, second: RecordedCall) -> AttentionSite:
    """Return what an attention computes with, from its calls in passes of two lengths.

    Raises:
        PlanError: if its queries or keys are neither those of the tokens nor those of an encoder.
    """
    name = type(first.site.module).__name__
    queries, keys = (first.queries, second.queries), (first.keys, second.keys)
    if queries != LENGTHS or (keys != LENGTHS and keys[0] != keys[1]):
        raise PlanError(
            f"{name} attends with {queries[0]} queries to {keys[0]} keys in a row of {LENGTHS[0]} tokens. Under "
            "ParallelPlan.cp > 1 an attention has a query for each token, and the keys of all tokens or those of an "
            f"encoder alone. Use {INSTEAD}"
        )
    biases = set()
    for option, x in first.site.options.items():
        if isinstance(x, torch.Size):
            dims = [dim - len(x) for dim, size in enumerate(x) if size != second.site.options[option][dim]]
            if dims == [-2, -1]:
                biases.add(option)
    is_across = keys != LENGTHS
    if biases - first.given_biases and not is_across and lengths_method(first.site.module) is None:
        raise PlanError(
            f"{name} makes {', '.join(sorted(biases))} for pairs of tokens, by no method with the arguments "
            f"query_length and key_length, so a rank would make it for its own tokens alone. Use {INSTEAD}"
        )
    kind = AttentionKind(is_across=is_across, biases=frozenset() if is_across else frozenset(biases))
    return dataclasses.replace(first.site, kind=kind)
