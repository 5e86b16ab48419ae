"""Records in passes without values which arguments of a decoder's layers hold tokens and what its attentions compute
with, and refuses layers that may mix tokens elsewhere.

A rank has some of the tokens, and such a bias is for places in the sequence. So it is made for the whole row on every
rank, ``[..., S, S]``, and each block of attention takes its queries and keys of it (``AttentionCall``).
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from meshwright.context.attention import AttentionKind
from meshwright.context.masks import ContextMask
from meshwright.context.recorded_pass import (
    INSTEAD,
    ROWS,
    SOME,
    AttentionSite,
    ContextWatcher,
    CutPass,
    Place,
    RecordedCall,
    run_pass,
)
from meshwright.errors import PlanError, UncoveredParameterError
from meshwright.facts import Facts
from meshwright.parallel.fake_passes.observe import once
from meshwright.parallel.method_chain import ChainStep, add_step, arguments
from meshwright.parallel.tensor_parallel.structure import DecoderStructure
from meshwright.roles import Decoder, Role, ShardingPlan
from meshwright.roles.adapters import is_adapted
from meshwright.roles.blocks import Mlp, has_attention, mixers_of
from meshwright.roles.blocks.experts import is_experts, routed_modules
from meshwright.roles.decoder import is_norm
from meshwright.roles.linear_kernel import is_projection


def check_token_wise(decoder: Decoder, plan: ShardingPlan | None) -> None:
    """Raise if a weight inside of a layer is of no module that is known to take each token by itself.

    Args:
        decoder: the decoder. Under tp its roles say what the modules of a layer do.
        plan: the user's roles, which say it of other modules too; None for none.

    Raises:
        UncoveredParameterError: if there are such weights; the message lists them.
        PlanError: if a module that stays whole under tp is given hidden states, and is no mixer, or a mixer has an
            attention inside.
    """
    mixers = mixers_of(decoder.facts, decoder)
    for name, mixer in mixers.items():
        if has_attention(mixer):
            raise PlanError(
                f"{name} ({type(mixer).__name__}) has a convolution over tokens inside of an attention, and a rank of "
                "cp has some of the tokens. Use ParallelPlan(cp=1)"
            )
    if isinstance(decoder, DecoderStructure):
        if whole := next(((name, module) for name, module in decoder.whole.items() if name not in mixers), None):
            raise PlanError(
                f"{whole[0]} ({type(whole[1]).__name__}) stays whole under tp, and it is not known whether it takes "
                "each token by itself, as ParallelPlan.cp > 1 needs. Use ParallelPlan(cp=1)"
            )
        return
    facts = decoder.facts
    known = {m for layer in decoder.layers for m in _of_experts_in(facts, layer)}
    known |= {m for mixer in mixers.values() for m in facts.inside(mixer)}
    unknown = {id(p) for layer in decoder.layers for p in _unknown(layer, known)}
    named = [name for name, p in facts.parameters.items() if id(p) in unknown]
    if missing := [name for name in named if plan is None or not _has_role(name, plan)]:
        source = f"the structure of {type(decoder.model).__name__}" if plan is None else plan.source
        raise UncoveredParameterError(
            missing, source, "it is not known whether a module of a layer takes each token by itself"
        )


def is_token_wise(facts: Facts, layer: nn.Module) -> bool:
    """Return whether a layer has only norms, MLPs and modules with experts, each of which takes each token by itself.

    Another MLP inside of what owns experts is a shared expert. A module without weights is known if it is of torch or
    an activation function of transformers; one of the model's code may mix tokens, as a Fourier transform does.
    """
    inside = facts.inside(layer)
    if any(map(_is_own_function, inside)):
        return False
    sizes = {p.shape[0] for p in facts.parameters_inside(layer) if p.ndim == 1}
    known = set(_of_experts_in(facts, layer))
    for module in inside:
        known |= {module.get_submodule(name) for size in sizes for name in Mlp.claim(module, size, {})}
    own = [module for module in inside if list(module.parameters(recurse=False))]
    return bool(known) and all(module in known or is_norm(module, *sizes) for module in own)


def _is_own_function(module: nn.Module) -> bool:
    """Return whether a module has neither weights nor modules inside, and the model's code computes something."""
    is_function = next(module.children(), None) is None and not module._parameters
    return is_function and not type(module).__module__.startswith(("torch.nn.", "transformers.activations"))


def _has_role(name: str, plan: ShardingPlan) -> bool:
    """Return whether a parameter has a role, or a module around it has one that is not structural."""
    while name and ((role := plan.role_of(name)) is None or role.is_structural):
        name = name.rpartition(".")[0]
    return bool(name)


def _of_experts_in(facts: Facts, layer: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a layer with the weights of experts and routers."""
    inside = set(facts.inside(layer))
    for _, module, role in routed_modules(facts):
        if module in inside:
            yield from facts.inside(module) if role is Role.EXPERTS else (module,)


def _unknown(module: nn.Module, known: Collection[nn.Module]) -> Iterator[nn.Parameter]:
    """Yield the weights besides those of known modules, projections and embeddings, and vectors over channels."""
    if is_projection(module) or is_parametrized(module) or is_experts(module) or isinstance(module, nn.Embedding):
        return
    own, children = list(module.parameters(recurse=False)), list(module.children())
    if module not in known:
        # A matrix alone in a module scores experts; a convolution's weight has three dims.
        most = 1 if children else 2
        yield from (p for p in own if p.ndim > most)
    for child in children:
        yield from _unknown(child, known)


_LENGTH_ARGUMENTS = ("query_length", "key_length")


def lengths_method(attention: nn.Module) -> str | None:
    """Return the name of the method of an attention that takes the numbers of queries and keys; None if none does."""
    for name, method in inspect.getmembers(type(attention), inspect.isfunction):
        if set(_LENGTH_ARGUMENTS) <= inspect.signature(method).parameters.keys():
            return name
    return None


def make_whole(attentions: Iterable[nn.Module]) -> None:
    """Make attentions compute their biases for all tokens of the row, which their masks show.

    Args:
        attentions: the attentions, without those over an encoder's keys.
    """
    for attention in attentions:
        if (name := lengths_method(attention)) is not None:
            step = _OfWholeRow(attention, name)
            add_step(attention, step, name)
            attention.register_forward_pre_hook(step.enter, with_kwargs=True)


class _OfWholeRow(ChainStep):
    def __init__(self, attention: nn.Module, name: str):
        self.signature, self.length = inspect.signature(getattr(attention, name)), 0

    def enter(self, attention: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Take the number of tokens of the row, also where backward runs a layer again after other rows."""
        masks = (x for x in (*args, *kwargs.values()) if isinstance(x, ContextMask))
        self.length = next((mask.length for mask in masks), 0)

    def __call__(self, *args: object, **kwargs: object) -> object:
        given = arguments(self.signature, args, kwargs)
        if self.length:
            given |= dict.fromkeys(_LENGTH_ARGUMENTS, self.length)
        return self.method(**given)


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
    return once(decoder, "context", lambda: _record(decoder, mixers, seen and seen()), *mixers)


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
