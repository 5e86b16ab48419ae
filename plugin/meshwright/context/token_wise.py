"""Finds weights of layers that may mix tokens outside of attention, which a rank with some of the tokens cannot."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from meshwright.errors import PlanError, UncoveredParameterError
from meshwright.facts import Facts
from meshwright.parallel.tensor_parallel.structure import DecoderStructure
from meshwright.roles import Decoder, Role, ShardingPlan
from meshwright.roles.blocks import Mlp, has_attention, mixers_of
from meshwright.roles.blocks.experts import is_experts, routed_modules
from meshwright.roles.decoder import is_norm
from meshwright.roles.projection import is_projection


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
