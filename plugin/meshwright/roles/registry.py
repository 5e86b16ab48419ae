"""Finds a model's sharding plan: the user's, its family's, or one inferred from its structure.

A family's plan is that of its causal LM, and is adapted to models with another head. Heads that score sequences, tokens
or spans are one small layer after the final norm, where each rank has all tokens.

An inferred plan leaves modules whole that tp is not known to cut. This is exact, if a module of a layer is given all
tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from meshwright.errors import PlanError
from meshwright.facts import Facts, fact
from meshwright.roles.blocks.experts import roles_of_experts
from meshwright.roles.family_hints import hints_of
from meshwright.roles.infer import infer_plan
from meshwright.roles.projection import is_projection
from meshwright.roles.roled_model import RoledModel
from meshwright.roles.sharding_plan import BlockPart, Role, ShardingPlan, decoder_roles

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
