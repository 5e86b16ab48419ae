"""Finds a model's sharding plan: the user's, its family's, or one inferred from its structure.

A family's plan is that of its causal LM, and is adapted to models with another head. Heads that score sequences, tokens
or spans are one small layer after the final norm, where each rank has all tokens.

An inferred plan leaves modules whole that tp is not known to cut. This is exact, if a module of a layer is given all
tokens.

Each module's role follows from its kind, its name and its shape. A module whose role is unclear is left out of the
plan, and the completeness check then lists it, since a wrong guess would give wrong gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from meshwright.errors import PlanError
from meshwright.facts import Facts, fact
from meshwright.roles.adapters import is_adapted
from meshwright.roles.blocks import BLOCKS, KINDS, Experts, keeps_states, recurrences
from meshwright.roles.blocks.experts import roles_of_experts
from meshwright.roles.decoder import Decoder, find_decoder, hidden_size, is_norm, layer_stack, stacks_of
from meshwright.roles.family_hints import hinted_roles, hints_of, named_in, roles_inside
from meshwright.roles.linear_kernel import is_projection
from meshwright.roles.roled_model import RoledModel
from meshwright.roles.sharding_plan import BlockPart, Role, ShardingPlan, decoder_roles


def infer_plan(model: nn.Module | Facts, hints: Mapping[str, Role] | None = None) -> ShardingPlan:
    """Infer which module of a decoder plays which role.

    Roles of fused projections are not inferred, since a shape does not show whether the rows are ordered by kind or by
    head. A block with a norm without weights, of which nothing shows what it normalises, stays whole. Give hints for
    both, or register a plan.

    Args:
        model: the decoder, or its facts.
        hints: the roles that the structure does not show: end of a name inside a layer -> role.

    Raises:
        PlanError: if no stack of decoder layers is found.
    """
    facts = Facts.of(model)
    decoder = find_decoder(facts)
    layers_name, layers = layer_stack(facts)
    assert isinstance(decoder.embedding, nn.Embedding)
    hidden = hidden_size(layers, decoder.embedding)
    roles = {f"{layers_name}.*": Role.LAYER} | _outer_roles(decoder)
    of_layers = [(layer, _layer_roles(layer, hidden, hints or {})) for layer in layers]
    if keeps_states(facts.model):
        of_layers = [(layer, _with_recurrences(layer, hidden, hints or {}, own)) for layer, own in of_layers]
    roles |= _common_roles(layers_name, of_layers)
    return ShardingPlan(roles=roles, source=f"the plan inferred from the structure of {type(facts.model).__name__}")


def _outer_roles(decoder: Decoder) -> dict[str, Role]:
    """Return the roles of the modules before and after the layers, without stacks of layers that are in no tower.

    A module with several names gets its role under each.

    Each rank has all tokens before and after the layers, so a module that is not sharded over the vocabulary stays
    whole, and so does a tower.
    """
    facts = decoder.facts
    own: dict[nn.Module | None, Role] = {decoder.final_norm: Role.FINAL_NORM, decoder.head: Role.HEAD}
    own |= dict.fromkeys(_tied_to(decoder.embedding, facts), Role.EMBEDDING)
    named = list(facts.modules.items())
    of_towers = {module for tower in decoder.towers for module in facts.inside(tower)}
    of_layers = stacks_of(facts).keys() - of_towers
    stacks = tuple(f"{name}." for name, module in named if module in of_layers)
    cut = tuple(f"{name}." for name, module in named if module is decoder.head or is_adapted(module))
    roles: dict[str, Role] = {}
    for name, module in named:
        if f"{name}.".startswith(stacks):
            continue
        if module in own:
            roles[name] = own[module]
        elif module in decoder.towers or (not f"{name}.".startswith(cut) and list(module.parameters(recurse=False))):
            roles[name] = Role.WHOLE
    return _with_tied_bias(roles, decoder.head, named)


def _with_tied_bias(
    roles: dict[str, Role], head: nn.Module | None, named: list[tuple[str, nn.Module]]
) -> dict[str, Role]:
    """Return the roles if a module around the head owns the head's bias too, as BERT's predictions do."""
    bias = None if head is None else head._parameters.get("bias")
    for name, module in named:
        own = module._parameters
        if module is not head and bias is not None and any(p is bias for p in own.values()):
            roles.pop(name, None)
            roles |= {f"{name}.{n}": Role.HEAD if p is bias else Role.WHOLE for n, p in own.items() if p is not None}
    return roles


def _tied_to(embedding: nn.Module, facts: Facts) -> list[nn.Module]:
    """Return the embeddings with the weight of ``embedding``, such as those of an encoder and a decoder."""
    weight = embedding._parameters.get("weight")
    tied = (m for m in facts.names if isinstance(m, nn.Embedding) and m._parameters.get("weight") is weight)
    return list(dict.fromkeys((embedding, *tied)))


def _common_roles(layers_name: str, layers: list[tuple[nn.Module, dict[str, Role]]]) -> dict[str, Role]:
    """Merge the layers' roles: a wildcard for a name with the same role in all layers that have it, else all names."""
    named = [(set(named_in(layer)), roles) for layer, roles in layers]
    common: dict[str, Role] = {}
    for name in dict.fromkeys(name for _, roles in layers for name in roles):
        found = {roles.get(name) for names, roles in named if name in names}
        if len(found) == 1 and (role := found.pop()) is not None:
            common[f"{layers_name}.*.{name}"] = role
        else:
            common |= {f"{layers_name}.{i}.{name}": roles[name] for i, (_, roles) in enumerate(layers) if name in roles}
    return common


def _layer_roles(layer: nn.Module, hidden: int, hints: Mapping[str, Role]) -> dict[str, Role]:
    modules = dict(layer.named_modules(remove_duplicate=False))
    hinted = hinted_roles(layer, hints)
    roles: dict[str, Role] = {name: role for name, role in hinted.items() if role is Role.WHOLE}
    for name, module in modules.items():  # an MLP inside of what experts claim comes later, and is an MLP
        if name not in roles and not _is_in(name, roles, Role.WHOLE, Role.MIXER):
            roles |= _block_roles(name, module, hidden, hinted)
    own = [name for name, role in roles.items() if "." not in name and role.part in (BlockPart.COLUMN, BlockPart.ROW)]
    if Role.MLP in roles.values():  # a layer with an MLP beside its own projections combines these with something else
        roles |= dict.fromkeys(own, Role.NORM)
    # A kind of mixer says more of its weights than a hint, whose names may be those of attention in other layers.
    roles |= {
        n: role for n, role in hinted.items() if roles.get(n) is not Role.MIXER and not _is_in(n, roles, Role.MIXER)
    }
    blocks = [name for name, role in roles.items() if role.part is BlockPart.BLOCK]
    for name, module in modules.items():
        # A parametrization is part of the module whose weight it computes.
        if not name or name in roles or "parametrizations" in name.split(".") or _is_in(name, roles, Role.WHOLE):
            continue
        block = next((block for block in blocks if name.startswith(f"{block}.")), None)
        if block is None and is_norm(module, hidden):
            roles[name] = Role.NORM
        # It may norm each head, or the whole width, of which a rank would have a part.
        elif block is not None and "norm" in type(module).__name__.lower() and not list(module.parameters()):
            roles = {n: role for n, role in roles.items() if not n.startswith(f"{block}.")} | {block: Role.WHOLE}
    return roles


def _with_recurrences(
    layer: nn.Module, hidden: int, hints: Mapping[str, Role], roles: dict[str, Role]
) -> dict[str, Role]:
    """Return the roles of a layer's modules, in which those that may be recurrences stay whole."""
    whole = tuple(recurrences(layer, hidden, hints))
    inside = tuple(f"{name}." for name in whole)
    others = {name: role for name, role in roles.items() if not f"{name}.".startswith(inside)}
    return others | dict.fromkeys(whole, Role.WHOLE)


def _block_roles(name: str, module: nn.Module, hidden: int, hinted: Mapping[str, Role]) -> dict[str, Role]:
    """Return the roles of a block and its modules, by name in the layer; empty for a module that is no block.

    Args:
        name: the name of the module in the layer; "" for the layer itself, which may own an MLP or experts.
    """
    prefix = f"{name}." if name else ""
    own_hints = roles_inside(name, hinted)
    roles: dict[str, Role] = {}
    for kind in KINDS if name else (BLOCKS[Role.LAYER], Experts):  # a layer may own both
        claimed = kind.claim(module, hidden, own_hints)
        roles |= {f"{prefix}{n}" if n else name: role for n, role in claimed.items() if n or name}
        if claimed and name:
            break
    return roles


def _is_in(name: str, roles: Mapping[str, Role], *of: Role) -> bool:
    """Return whether a module is inside of one with one of these roles."""
    return any(role in of and name.startswith(f"{owner}.") for owner, role in roles.items())


# An example of a written plan; other families' plans are inferred from structure.
_PLANS = {"llama": ShardingPlan(roles=decoder_roles(), source="the llama plan")}

# What a model's config.json may hold: {"meshwright": {"tp": 2, ..., "roles": {"model.embed": "embedding", ...}}}.
CONFIG_KEY = "meshwright"
ROLES_KEY = "roles"

# The names of such heads in transformers. PEFT keeps the trained copy of such a layer beside the original.
_NAMES = ("score", "classifier", "qa_outputs")
_COPIES = ("", ".original_module", ".modules_to_save.default")


def register_plan(model_type: str, plan: ShardingPlan) -> None:
    """Use ``plan`` for models whose ``config.model_type`` is ``model_type``; the last call wins.

    Raises:
        ValueError: if ``plan`` is not a ShardingPlan.

    Example:
        >>> from meshwright.roles.sharding_plan import ShardingPlan, decoder_roles
        >>> register_plan("my_llama", ShardingPlan(roles=decoder_roles(base="decoder")))
    """
    if not isinstance(plan, ShardingPlan):
        raise ValueError(f"register_plan({model_type!r}) takes a meshwright.ShardingPlan, not {type(plan).__name__}")
    _PLANS[model_type] = plan


@fact
def plan_for(facts: Facts) -> ShardingPlan:
    """Return the sharding plan in a model's config, else its family's, else one inferred with the family's hints.

    In an inferred plan, what has no role stays whole.

    Raises:
        PlanError: if no plan can be inferred, or the config names an unknown role.
    """
    if (written := written_plan(facts)) is not None:
        return written
    return leave_whole(infer_plan(facts, hints_of(facts.model)), facts)


@fact
def written_plan(facts: Facts) -> ShardingPlan | None:
    """Return the sharding plan in a model's config, else the one registered for its family; None without one.

    Raises:
        PlanError: if the config names an unknown role.
    """
    model = facts.model
    config = getattr(model, "config", None)
    saved = getattr(config, CONFIG_KEY, None)
    if isinstance(saved, Mapping) and ROLES_KEY in saved:
        return _from_names(saved[ROLES_KEY], f'"{CONFIG_KEY}" in the config of {type(model).__name__}')
    model_type = getattr(config, "model_type", "")
    plan = fitted(_PLANS[model_type], facts) if model_type in _PLANS else None
    # The layers may be inside of a program's own module, under other names.
    has_layers = plan is not None and any(plan.role_of(name) is Role.LAYER for name in facts.modules)
    return plan if has_layers else None


def _from_names(roles: Any, source: str) -> ShardingPlan:
    if not isinstance(roles, Mapping):
        raise PlanError(f"{source}: {ROLES_KEY!r} must map module names to roles, not {roles!r}")
    known = {role.name.lower(): role for role in Role}
    if unknown := [f"{module}: {name!r}" for module, name in roles.items() if name not in known]:
        raise PlanError(f"{source} has unknown roles: {', '.join(unknown)}; use one of {', '.join(known)}")
    return ShardingPlan(roles={module: known[name] for module, name in roles.items()}, source=source)


def fitted(plan: ShardingPlan, facts: Facts) -> ShardingPlan:
    """Return a family's plan for its causal LM, adapted to a model of that family with another head.

    Args:
        plan: the family's plan; the names of its decoder's modules begin with "model.".
        facts: what the model shows, which keeps the decoder under ``base_model_prefix`` and the head beside it.
    """
    modules = facts.modules
    names = [name + copy for name in _NAMES for copy in _COPIES]
    heads = {name: Role.WHOLE for name in names if name in modules and is_projection(modules[name])}
    prefix: Any = getattr(facts.model, "base_model_prefix", "model")
    moves = prefix != "model" and prefix in modules and "model" not in modules
    if not heads and not moves:
        return plan
    roles = {
        f"{prefix}.{name.removeprefix('model.')}" if moves and name.startswith("model.") else name: role
        for name, role in plan.roles.items()
    }
    return ShardingPlan(roles={**heads, **roles}, source=plan.source)


def leave_whole(plan: ShardingPlan, facts: Facts) -> ShardingPlan:
    """Return a plan in which the weights of layers that have no role stay whole, with the modules around them.

    If that leaves nothing to cut, or if it is not known where tokens meet, all layers stay whole. A module around
    experts is left as it is, since each rank must route its own tokens.

    Args:
        plan: a plan that was inferred.
        facts: what the model shows.
    """
    roled = RoledModel(facts, plan)
    layers = {name: roled.modules[name] for name, role in roled.roles.items() if role is Role.LAYER}
    missing = [name for name in roled.missing if name.startswith(tuple(f"{layer}." for layer in layers))]
    if any("parametrizations" in name.split(".") for name in missing):
        return plan
    whole = {_called_around(name, layers) for name in missing}
    has_experts = any(map(routes_tokens, layers.values()))
    if has_experts and any(name is None or routes_tokens(roled.modules[name]) for name in whole):
        return plan
    roles = _with_whole(roled.roles, [name for name in whole if name is not None])
    inside = {role for name, role in roles.items() if name.startswith(tuple(f"{layer}." for layer in layers))}
    is_cut = any(role.part in (BlockPart.COLUMN, BlockPart.INNER) for role in inside)
    tokens_meet = any(role is Role.WHOLE or (role.part is BlockPart.BLOCK and role is not Role.MLP) for role in inside)
    if not has_experts and (None in whole or not tokens_meet or (whole and not is_cut)):
        return replace(plan, roles=_with_whole(roled.roles, list(_inside(layers))))
    return replace(plan, roles=roles) if whole else plan


def keep_whole(plan: ShardingPlan, facts: Facts, names: Collection[str]) -> ShardingPlan:
    """Return a plan in which each rank has these modules whole.

    Args:
        plan: a sharding plan.
        facts: what the model shows.
        names: the names of modules: of the embedding, the head, the final norm, or modules in layers. A layer's name
            stands for all that is in it.
    """
    roled = RoledModel(facts, plan)
    words = {name for name in names if roled.roles.get(name) in (Role.EMBEDDING, Role.HEAD)}
    layers = {name: roled.modules[name] for name in names if roled.roles.get(name) is Role.LAYER}
    whole = [*_inside(layers), *(name for name in names if name not in words and name not in layers)]
    return replace(plan, roles=_with_whole(roled.roles, whole), uncut=plan.uncut | words)


def routes_tokens(module: nn.Module) -> bool:
    """Return whether experts are in a module, so that it cannot stay whole: each rank must route its own tokens."""
    return any(map(roles_of_experts, module.modules()))


def _with_whole(roles: dict[str, Role], whole: list[str]) -> dict[str, Role]:
    """Return the roles with some modules or parameters whole, instead of the roles that are inside of them."""
    prefixes = tuple(f"{name}." for name in whole)
    return {n: role for n, role in roles.items() if not n.startswith(prefixes)} | dict.fromkeys(whole, Role.WHOLE)


def _called_around(parameter: str, layers: dict[str, nn.Module]) -> str | None:
    """Return the outermost module in a layer that is around a parameter and is called; None if the layer owns it."""
    name = next(layer for layer in layers if parameter.startswith(f"{layer}."))
    module = layers[name]
    for part in parameter.removeprefix(f"{name}.").split(".")[:-1]:
        name, module = f"{name}.{part}", module.get_submodule(part)
        if not isinstance(module, nn.ModuleList | nn.ModuleDict):
            return name
    return None


def _inside(layers: dict[str, nn.Module]) -> Iterator[str]:
    """Yield the names of the modules and parameters that layers own themselves."""
    for name, layer in layers.items():
        yield from (f"{name}.{child}" for child in layer._modules)
        yield from (f"{name}.{own}" for own in layer._parameters)
