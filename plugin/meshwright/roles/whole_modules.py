"""Leaves modules whole that tp is not known to cut: exact, if a module of a layer is given all tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from torch import nn

from meshwright.roles.blocks.experts import roles_of_experts
from meshwright.roles.roled_model import RoledModel
from meshwright.roles.sharding_plan import BlockPart, Role, ShardingPlan


def leave_whole(plan: ShardingPlan, model: nn.Module) -> ShardingPlan:
    """Return a plan in which the weights of layers that have no role stay whole, with the modules around them.

    If that leaves nothing to cut, or if it is not known where tokens meet, all layers stay whole. A module around
    experts is left as it is, since each rank must route its own tokens.

    Args:
        plan: a plan that was inferred.
        model: the model.
    """
    roled = RoledModel(model, plan)
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


def keep_whole(plan: ShardingPlan, model: nn.Module, names: Collection[str]) -> ShardingPlan:
    """Return a plan in which each rank has these modules whole.

    Args:
        plan: a sharding plan.
        model: the model.
        names: the names of modules: of the embedding, the head, the final norm, or modules in layers. A layer's name
            stands for all that is in it.
    """
    roled = RoledModel(model, plan)
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
