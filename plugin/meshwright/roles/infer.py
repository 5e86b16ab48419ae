"""Infers a sharding plan from a decoder's structure, for a family without a written plan.

Each module's role follows from its kind, its name and its shape. A module whose role is unclear is left out of the
plan, and the completeness check then lists it, since a wrong guess would give wrong gradients.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from meshwright.facts import Facts
from meshwright.roles.adapters import is_adapted
from meshwright.roles.blocks import BLOCKS, KINDS, Experts, keeps_states, recurrences
from meshwright.roles.decoder import Decoder, find_decoder, hidden_size, is_norm, layer_stack, stacks_of
from meshwright.roles.family_hints import hinted_roles, named_in, roles_inside
from meshwright.roles.sharding_plan import BlockPart, Role, ShardingPlan


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
