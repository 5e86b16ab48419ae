"""A sharding plan read off a decoder's structure, for a family that no file names.

Each module's role follows from its kind, its name and its shape. What stays without a role is left
out, so that the completeness check names it: a guess here would be a wrong gradient later.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from meshwright.errors import PlanError
from meshwright.plans.adapters import projection
from meshwright.plans.base import Role, ShardingPlan

_ATTENTION_NAMES = {
    Role.Q: {"q_proj", "query_proj", "q", "query", "wq", "to_q", "q_lin"},
    Role.K: {"k_proj", "key_proj", "k", "key", "wk", "to_k", "k_lin"},
    Role.V: {"v_proj", "value_proj", "v", "value", "wv", "to_v", "v_lin"},
    Role.O: {"o_proj", "out_proj", "output_proj", "o", "out", "wo", "to_out", "dense", "proj"},
}


def infer_plan(model: nn.Module) -> ShardingPlan:
    """Infer which module of a decoder plays which role.

    Fused projections are not inferred: whether their rows are ordered by kind or by head cannot be
    seen in a shape. Register a plan for those.

    Raises:
        PlanError: if no stack of decoder layers is found.
    """
    layers_name, layers = _decoder_layers(model)
    layer = layers[0]
    outside = {
        name: module
        for name, module in model.named_modules()
        if name and name != layers_name and not name.startswith(f"{layers_name}.")
    }
    embeddings = {n: m for n, m in outside.items() if isinstance(m, nn.Embedding)}
    if not embeddings:
        raise PlanError(f"no token embedding found outside {layers_name!r} in {type(model).__name__}")
    embedding_name, embedding = max(embeddings.items(), key=lambda item: item[1].num_embeddings)
    hidden = embedding.embedding_dim

    roles = {embedding_name: Role.EMBEDDING, f"{layers_name}.*": Role.LAYER}
    for name, module in outside.items():
        if isinstance(module, nn.Linear) and module.weight.shape == (embedding.num_embeddings, hidden):
            roles[name] = Role.HEAD
        elif _is_norm(module, hidden):
            roles[name] = Role.FINAL_NORM
    inside = dict(_attention_roles(model, layer, hidden)) | dict(_mlp_roles(layer, hidden))
    for name, module in layer.named_modules():
        if name and name not in inside and _is_norm(module, hidden):
            inside[name] = Role.NORM
    roles |= {f"{layers_name}.*.{name}": role for name, role in inside.items()}
    return ShardingPlan(roles=roles, source=f"the plan inferred from the structure of {type(model).__name__}")


def _decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    def is_stack(module: nn.Module) -> bool:
        return (
            isinstance(module, nn.ModuleList)
            and len(module) > 0
            and len({type(child) for child in module}) == 1
            and sum(isinstance(m, nn.Linear) for m in module[0].modules()) >= 2
        )

    stacks = [(name, module) for name, module in model.named_modules() if is_stack(module)]
    if not stacks:
        raise PlanError(
            f"{type(model).__name__} has no stack of equal decoder layers (an nn.ModuleList of blocks with "
            "linear layers), so no sharding plan can be inferred; pass ToDistributedConfig(sharding_plan=...)"
        )
    name, module = max(stacks, key=lambda item: len(item[1]))
    assert isinstance(module, nn.ModuleList)
    return name, module


def _is_norm(module: nn.Module, *sizes: int) -> bool:
    parameters = list(module.parameters())
    return (
        bool(parameters)
        and not list(module.children())
        and not isinstance(module, nn.Linear | nn.Embedding)
        and all(p.ndim == 1 and p.shape[0] in sizes for p in parameters)
    )


def _linear_groups(layer: nn.Module) -> Iterator[tuple[str, dict[str, nn.Linear]]]:
    """Linear layers by the submodule that owns them; those that the layer owns itself have no block."""
    for name, module in layer.named_modules():
        children = {n: projection(child) for n, child in module.named_children()}
        linears = {n: child for n, child in children.items() if isinstance(child, nn.Linear)}
        if name and linears:
            yield name, linears


def _attention_roles(model: nn.Module, layer: nn.Module, hidden: int) -> Iterator[tuple[str, Role]]:
    for block_name, linears in _linear_groups(layer):
        roles = {n: r for n in linears for r, names in _ATTENTION_NAMES.items() if n.lower() in names}
        if not {Role.Q, Role.K, Role.V, Role.O} <= set(roles.values()):
            continue
        by_role = {role: linears[name] for name, role in roles.items()}
        q, k, o = by_role[Role.Q], by_role[Role.K], by_role[Role.O]
        if q.in_features != hidden or o.in_features != q.out_features or k.in_features != hidden:
            continue
        yield block_name, Role.ATTENTION
        for name, role in roles.items():
            yield f"{block_name}.{name}", role
        block = layer.get_submodule(block_name)
        head_dim = getattr(block, "head_dim", getattr(getattr(model, "config", None), "head_dim", None))
        for name, module in block.named_children():
            if _is_norm(module, *([head_dim] if head_dim else [])):
                yield f"{block_name}.{name}", Role.HEAD_NORM
            elif _is_norm(module, q.out_features) and "q" in name.lower():
                yield f"{block_name}.{name}", Role.Q_NORM
            elif _is_norm(module, k.out_features) and "k" in name.lower():
                yield f"{block_name}.{name}", Role.K_NORM


def _mlp_roles(layer: nn.Module, hidden: int) -> Iterator[tuple[str, Role]]:
    for block_name, linears in _linear_groups(layer):
        rows = {n: m for n, m in linears.items() if m.out_features == hidden and m.in_features != hidden}
        columns = {n: m for n, m in linears.items() if m.in_features == hidden and n not in rows}
        if len(rows) != 1 or len(columns) not in (1, 2) or len(rows) + len(columns) != len(linears):
            continue
        width = next(iter(rows.values())).in_features
        if any(m.out_features != width for m in columns.values()):
            continue
        yield block_name, Role.MLP
        yield f"{block_name}.{next(iter(rows))}", Role.DOWN
        # Gate and up are cut alike, so which of the two is the gate does not matter.
        for name, role in zip(columns, (Role.UP, Role.GATE), strict=False):
            yield f"{block_name}.{name}", role
