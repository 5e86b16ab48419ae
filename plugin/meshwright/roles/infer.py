"""Infers a sharding plan from a decoder's structure, for a family without a written plan.

Each module's role follows from its kind, its name and its shape. A module whose role is unclear is left out of the
plan, and the completeness check then lists it, since a wrong guess would give wrong gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from meshwright.errors import PlanError
from meshwright.roles.adapters import is_adapted
from meshwright.roles.decoder import Decoder, find_decoder, hidden_size, is_norm, is_stack, layer_stack
from meshwright.roles.projection import in_features, is_projection, out_features
from meshwright.roles.sharding_plan import BLOCK_ROLES, FUSED_QKV_ROLES, Role, ShardingPlan

_ATTENTION_NAMES = {
    Role.Q: {"q_proj", "query_proj", "q", "query", "wq", "to_q", "q_lin"},
    Role.K: {"k_proj", "key_proj", "k", "key", "wk", "to_k", "k_lin"},
    Role.V: {"v_proj", "value_proj", "v", "value", "wv", "to_v", "v_lin"},
    Role.O: {"o_proj", "out_proj", "output_proj", "o", "out", "wo", "to_out", "dense", "proj", "c_proj"},
}
_DOWN_NAMES = {"down_proj", "fc2", "lin2", "linear2", "linear_fc2", "w2", "dense_4h_to_h", "fc_out"}  # of MLPs only


def infer_plan(model: nn.Module, hints: Mapping[str, Role] | None = None) -> ShardingPlan:
    """Infer which module of a decoder plays which role.

    Roles of fused projections are not inferred, since a shape does not show whether the rows are ordered by kind or by
    head. The role of a norm inside a block is not inferred if its name does not say what it normalises. Give hints for
    both, or register a plan.

    Args:
        model: the decoder.
        hints: the roles that the structure does not show: end of a name inside a layer -> role.

    Raises:
        PlanError: if no stack of decoder layers is found, or a block has a norm without weights and without a hint.
    """
    decoder = find_decoder(model)
    layers_name, layers = layer_stack(model)
    if len({type(layer) for layer in layers}) > 1:
        raise PlanError(
            f"{type(model).__name__} has no stack of equal decoder layers (an nn.ModuleList of blocks with "
            "linear layers), so no sharding plan can be inferred; pass ToDistributedConfig(sharding_plan=...)"
        )
    assert isinstance(decoder.embedding, nn.Embedding)
    hidden = hidden_size(layers, decoder.embedding)
    roles = {f"{layers_name}.*": Role.LAYER} | _outer_roles(decoder)
    roles |= _common_roles(layers_name, [_layer_roles(layer, hidden, hints or {}) for layer in layers])
    return ShardingPlan(roles=roles, source=f"the plan inferred from the structure of {type(model).__name__}")


def _outer_roles(decoder: Decoder) -> dict[str, Role]:
    """Return the roles of the modules before and after the layers, without other stacks of layers.

    A module with several names gets its role under each.

    Each rank has all tokens before and after the layers, so a module that is not sharded over the vocabulary stays
    whole.
    """
    model = decoder.model
    own: dict[nn.Module | None, Role] = {
        decoder.final_norm: Role.FINAL_NORM,
        decoder.head: Role.HEAD,
        decoder.embedding: Role.EMBEDDING,
    }
    named = list(model.named_modules(remove_duplicate=False))
    stacks = tuple(f"{name}." for name, module in named if is_stack(module))
    cut = tuple(
        f"{name}." for name, module in named if module in (decoder.embedding, decoder.head) or is_adapted(module)
    )
    roles: dict[str, Role] = {}
    for name, module in named:
        if f"{name}.".startswith(stacks):
            continue
        if module in own:
            roles[name] = own[module]
        elif not f"{name}.".startswith(cut) and list(module.parameters(recurse=False)):
            roles[name] = Role.WHOLE
    return roles


def _common_roles(layers_name: str, layers: list[dict[str, Role]]) -> dict[str, Role]:
    """Merge the layers' roles: a wildcard for a name with the same role in all layers that have it, else all names."""
    common: dict[str, Role] = {}
    for name in dict.fromkeys(name for roles in layers for name in roles):
        found = {roles[name] for roles in layers if name in roles}
        if len(found) == 1:
            common[f"{layers_name}.*.{name}"] = found.pop()
        else:
            common |= {f"{layers_name}.{i}.{name}": roles[name] for i, roles in enumerate(layers) if name in roles}
    return common


def _layer_roles(layer: nn.Module, hidden: int, hints: Mapping[str, Role]) -> dict[str, Role]:
    def hint(name: str) -> Role | None:
        return next((role for end, role in hints.items() if f".{name}".endswith(f".{end}")), None)

    modules = dict(layer.named_modules(remove_duplicate=False))
    names = [*(n for n in modules if n), *(n for n, _ in layer.named_parameters(remove_duplicate=False))]
    hinted = {name: role for name in names if (role := hint(name)) is not None}
    roles: dict[str, Role] = {}
    for block_name, linears in _linear_groups(layer):
        block = _attention_block(layer, block_name, linears, hidden, hinted)
        roles |= block or _mlp_block(block_name, linears, hidden, hinted)
    roles |= hinted
    blocks = [f"{name}." for name, role in roles.items() if role in BLOCK_ROLES]
    for name, module in modules.items():
        # A parametrization is part of the module whose weight it computes.
        if not name or name in roles or "parametrizations" in name.split("."):
            continue
        is_inside = any(name.startswith(block) for block in blocks)
        if is_inside and _is_weightless_norm(module):
            raise PlanError(
                f"{name} of {type(layer).__name__} is a norm without weights inside a block: whether it norms each "
                "head or the whole width, which is sharded, cannot be inferred; pass "
                "ToDistributedConfig(sharding_plan=...)"
            )
        if not is_inside and is_norm(module, hidden):
            roles[name] = Role.NORM
    return roles


def _is_weightless_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and not list(module.parameters())


def _linear_groups(layer: nn.Module) -> Iterator[tuple[str, dict[str, nn.Module]]]:
    """Yield the name and the direct projections of each module that has any; the layer itself is named ''."""
    for name, module in layer.named_modules(remove_duplicate=False):
        # Not named_children(), which leaves out the second name of a projection with two.
        linears = {n: child for n, child in module._modules.items() if child is not None and is_projection(child)}
        if linears:
            yield name, linears


def _attention_block(
    layer: nn.Module, block_name: str, linears: dict[str, nn.Module], hidden: int, hinted: Mapping[str, Role]
) -> dict[str, Role]:
    """Return the roles of an attention block and its modules; empty for any other module."""
    if not block_name:
        return {}
    roles = {n: r for n in linears for r, names in _ATTENTION_NAMES.items() if n.lower() in names}
    roles |= {n: hinted[f"{block_name}.{n}"] for n in linears if f"{block_name}.{n}" in hinted}
    by_role = {role: linears[name] for name, role in roles.items()}
    fused = FUSED_QKV_ROLES & by_role.keys()
    if not (fused or {Role.Q, Role.K, Role.V} <= by_role.keys()) or Role.O not in by_role:
        return {}
    output = by_role[Role.O]
    inputs = [m for role, m in by_role.items() if role is not Role.O]
    if out_features(output) != hidden or any(in_features(m) != hidden for m in inputs):
        return {}
    if not fused and in_features(output) != out_features(by_role[Role.Q]):
        return {}
    block = layer.get_submodule(block_name)
    found = {block_name: Role.ATTENTION} | {f"{block_name}.{name}": role for name, role in roles.items()}
    return found | _query_key_norms(block, block_name, by_role)


def _query_key_norms(block: nn.Module, block_name: str, projections: Mapping[Role, nn.Module]) -> dict[str, Role]:
    roles = {}
    head_dim = getattr(block, "head_dim", getattr(block, "head_size", None))
    for name, module in block._modules.items():
        kind = name.lower()[:1]
        if module is None or kind not in ("q", "k"):
            continue
        if head_dim and is_norm(module, head_dim):
            roles[f"{block_name}.{name}"] = Role.HEAD_NORM
        elif kind == "q" and Role.Q in projections and is_norm(module, out_features(projections[Role.Q])):
            roles[f"{block_name}.{name}"] = Role.Q_NORM
        elif kind == "k" and Role.K in projections and is_norm(module, out_features(projections[Role.K])):
            roles[f"{block_name}.{name}"] = Role.K_NORM
    return roles


def _mlp_block(
    block_name: str, linears: dict[str, nn.Module], hidden: int, hinted: Mapping[str, Role]
) -> dict[str, Role]:
    """Return the roles of an MLP block and its projections; empty for any other module."""
    prefix = f"{block_name}." if block_name else ""
    if all(in_features(m) == out_features(m) == hidden for m in linears.values()):  # shapes do not tell which is "down"
        rows = {n: m for n, m in linears.items() if n.lower() in _DOWN_NAMES}
    else:
        rows = {n: m for n, m in linears.items() if out_features(m) == hidden and in_features(m) != hidden}
    columns = {n: m for n, m in linears.items() if in_features(m) == hidden and n not in rows}
    if len(rows) != 1 or len(columns) not in (1, 2) or len(rows) + len(columns) != len(linears):
        return {}
    width = in_features(next(iter(rows.values())))
    fused = {n for n in columns if hinted.get(f"{prefix}{n}") is Role.GATE_UP}
    if any(out_features(m) != width * (1 + (n in fused)) for n, m in columns.items()):
        return {}
    roles = {block_name: Role.MLP} if block_name else {}
    roles[f"{prefix}{next(iter(rows))}"] = Role.DOWN
    # Gate and up are cut alike, so which of the two is the gate does not matter.
    for name, role in zip(columns, (Role.UP, Role.GATE), strict=False):
        roles[f"{prefix}{name}"] = Role.GATE_UP if name in fused else role
    return roles
