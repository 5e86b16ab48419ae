"""From a model and its sharding plan to every parameter's layout; nothing is changed yet.

All that can be wrong with a plan is found here, so that a failing call leaves the model as it was.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from meshwright.errors import PlanError, UncoveredParameterError
from meshwright.parallel.head_layout import HeadLayout, head_layout
from meshwright.parallel.role_rows import rows_of, wide_rows
from meshwright.parallel.row_layout import RowLayout
from meshwright.roles.adapters import check_adapters, is_adapted
from meshwright.roles.projection import in_features, is_projection, is_transposed, out_features
from meshwright.roles.sharding_plan import (
    BLOCK_ROLES,
    COLUMN_ROLES,
    FUSED_QKV_ROLES,
    MLP_COLUMN_ROLES,
    ROW_ROLES,
    WIDE_NORM_ROLES,
    Role,
    ShardingPlan,
)

PROJECTIONS = COLUMN_ROLES | ROW_ROLES
_MLP_ROLES = MLP_COLUMN_ROLES | {Role.DOWN}
_INSIDE_BLOCKS = PROJECTIONS | WIDE_NORM_ROLES | {Role.HEAD_NORM, Role.PER_HEAD, Role.SHARED}


@dataclass(frozen=True, kw_only=True)
class Block:
    """An attention or MLP block: where activations are gathered, projected, and reduced again.

    Args:
        name: of the module that owns the block, which for an MLP may be the decoder layer itself.
        entries: where activations are gathered: the block, or the column projections of a layer's own MLP.
        local_attributes: what the module's counts of heads become on a rank.
    """

    name: str
    module: nn.Module
    entries: tuple[nn.Module, ...]
    columns: tuple[nn.Module, ...]
    row: nn.Module
    heads: HeadLayout | None
    local_attributes: dict[str, int]
    has_fused_qkv: bool
    wide_norms: tuple[tuple[nn.Module, RowLayout], ...]

    @property
    def shared_dropouts(self) -> list[nn.Module]:
        """Dropout of adapters on the block's input, of which every rank has all."""
        adapted: list[Any] = [module for module in self.columns if is_adapted(module)]
        return [module for column in adapted for module in column.lora_dropout.values()]


@dataclass(frozen=True, kw_only=True)
class ParameterLayout:
    """How one parameter is cut, and whether its holders get partial gradients."""

    rows: RowLayout
    is_grad_partial: bool


@dataclass(frozen=True, kw_only=True)
class DecoderStructure:
    """A decoder taken apart: its blocks, and the layout of each parameter by name.

    Args:
        vocab_size: words that the head scores; a few families embed more.
    """

    model: nn.Module
    embedding: nn.Embedding
    head: nn.Linear | None
    layers: tuple[nn.Module, ...]
    final_norm: nn.Module | None
    blocks: tuple[Block, ...]
    parameters: dict[str, ParameterLayout] = field(repr=False)
    vocab_size: int


def describe(model: nn.Module, plan: ShardingPlan, *, tp: int, sequence_parallel: bool) -> DecoderStructure:
    """Give every module its role and every parameter its layout over ``tp`` ranks.

    Raises:
        UncoveredParameterError: naming every parameter whose module has no role.
        PlanError: where the model's sizes do not divide, or its structure is not a decoder's.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    check_adapters(modules)
    roles = {name: role for name in modules if (role := plan.role_of(name)) is not None}
    roles |= _roles_of_parameters(model, roles, plan)
    _check_coverage(model, modules, roles, plan)
    embedding = _only(modules, roles, Role.EMBEDDING, plan, nn.Embedding)
    _check_embedding(embedding)
    _check_layerdrop(modules)
    head: nn.Linear | None = _only(modules, roles, Role.HEAD, plan, nn.Linear, required=False)
    layers = tuple(modules[name] for name, role in roles.items() if role is Role.LAYER)
    if not layers:
        raise PlanError(f"{plan.source} names no decoder layer of {type(model).__name__}")
    owners = {name: owner for name in roles if (owner := _owning_block(name, roles)) is not None}
    names = [name for name in roles if roles[name] in BLOCK_ROLES or name in owners.values()]
    blocks = tuple(_block(model, name, owners, modules, roles, plan, tp) for name in names)
    layouts: dict[str, ParameterLayout] = {}
    for block in blocks:
        layouts |= _block_layouts(model, block, owners, modules, roles, tp, sequence_parallel)
    for name, role in roles.items():
        for full_name, parameter in _parameters(model, modules, name):
            if role in (Role.EMBEDDING, Role.HEAD):
                layouts[full_name] = ParameterLayout(
                    rows=RowLayout.padded(parameter.shape[0], tp), is_grad_partial=False
                )
            elif role in (Role.NORM, Role.FINAL_NORM, Role.WHOLE):
                layouts[full_name] = ParameterLayout(
                    rows=RowLayout.replicated(parameter.shape[0] if parameter.ndim else 1, tp),
                    is_grad_partial=sequence_parallel and role is not Role.WHOLE,
                )
    _check_ties(model, layouts)
    return DecoderStructure(
        model=model,
        embedding=embedding,
        head=head,
        layers=layers,
        final_norm=_only(modules, roles, Role.FINAL_NORM, plan, nn.Module, required=False),
        blocks=blocks,
        parameters=layouts,
        vocab_size=embedding.num_embeddings if head is None else head.weight.shape[0],
    )


def _roles_of_parameters(model: nn.Module, roles: dict[str, Role], plan: ShardingPlan) -> dict[str, Role]:
    """The roles of parameters that the plan names themselves, since the module that owns them has none."""

    def owner_has_one(name: str) -> bool:
        owner = roles.get(name.rpartition(".")[0])
        return owner is not None and not owner.is_structural

    named = (name for name, _ in model.named_parameters(remove_duplicate=False) if not owner_has_one(name))
    return {name: role for name in named if (role := plan.role_of(name)) is not None}


def _parameters(model: nn.Module, modules: dict[str, nn.Module], name: str) -> list[tuple[str, nn.Parameter]]:
    """The parameters, by full name, that the role of ``name`` is about."""
    if name not in modules:
        return [(name, model.get_parameter(name))]
    module = modules[name]
    return [(f"{name}.{suffix}".lstrip("."), p) for suffix, p in module.named_parameters(recurse=is_adapted(module))]


def _check_coverage(
    model: nn.Module, modules: dict[str, nn.Module], roles: dict[str, Role], plan: ShardingPlan
) -> None:
    covered = {
        full_name
        for name, role in roles.items()
        if not (role.is_structural or (role in _INSIDE_BLOCKS and _owning_block(name, roles) is None))
        for full_name, _ in _parameters(model, modules, name)
    }
    missing = [name for name, _ in model.named_parameters(remove_duplicate=False) if name not in covered]
    if missing:
        raise UncoveredParameterError(missing, plan.source)
    for name, role in roles.items():
        if role in PROJECTIONS and not is_projection(modules[name]):
            raise PlanError(
                f"{plan.source} makes {name!r} a {role.value}, but it is a {type(modules[name]).__name__}: "
                "only nn.Linear projections can be sharded, alone or with LoRA (merge quantised layers first)"
            )
        if role in WIDE_NORM_ROLES and isinstance(modules[name], nn.LayerNorm):
            raise PlanError(
                f"{plan.source} makes {name!r} a {role.value}, but it is a LayerNorm: only the mean square of an RMS "
                "norm is taken over all ranks"
            )


def _owning_block(name: str, roles: dict[str, Role]) -> str | None:
    """The block around a module or parameter; a layer is the block of an MLP whose projections it owns itself."""
    owner = name.rpartition(".")[0]
    if roles[name] in _MLP_ROLES and roles.get(owner) is Role.LAYER:
        return owner
    while owner and roles.get(owner) not in BLOCK_ROLES:
        owner = owner.rpartition(".")[0]
    return owner or None


def _only(
    modules: dict[str, nn.Module],
    roles: dict[str, Role],
    role: Role,
    plan: ShardingPlan,
    kind: type,
    *,
    required: bool = True,
) -> Any:
    names = [name for name, r in roles.items() if r is role]
    if len(names) > 1:
        raise PlanError(f"{plan.source} names {len(names)} modules as the {role.value}: {', '.join(names)}")
    if not names:
        if required:
            raise PlanError(f"{plan.source} names no module of this model as the {role.value}")
        return None
    module = modules[names[0]]
    if is_adapted(module):
        raise PlanError(
            f"the {role.value} {names[0]!r} has adapters, which cannot be sharded over tp there; leave it out of "
            "LoraConfig.target_modules, or use ParallelPlan(tp=1)"
        )
    if not isinstance(module, kind):
        raise PlanError(f"the {role.value} {names[0]!r} must be a {kind.__name__}, not {type(module).__name__}")
    return module


def _check_layerdrop(modules: dict[str, nn.Module]) -> None:
    for name, module in modules.items():
        if (rate := getattr(module, "layerdrop", 0)) and isinstance(rate, float):
            raise PlanError(
                f"{name or type(module).__name__} skips layers at random (layerdrop={rate:g}): the ranks would skip "
                "different ones. Set layerdrop to 0 in the model's config"
            )


def _check_embedding(embedding: nn.Embedding) -> None:
    if others := [name for name, _ in embedding.named_parameters() if name != "weight"]:
        raise PlanError(
            f"{type(embedding).__name__} has parameters beside its table ({', '.join(others)}): each rank would apply "
            "them to its own words only, so it cannot be sharded over tp"
        )
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(embedding, option):
            raise PlanError(f"an embedding with {option}={getattr(embedding, option)!r} cannot be sharded over tp")


def _block(
    model: nn.Module,
    block_name: str,
    owners: dict[str, str],
    modules: dict[str, nn.Module],
    roles: dict[str, Role],
    plan: ShardingPlan,
    tp: int,
) -> Block:
    inside = {name: roles[name] for name, owner in owners.items() if owner == block_name}
    rows = [modules[name] for name, role in inside.items() if role in ROW_ROLES]
    columns = tuple(modules[name] for name, role in inside.items() if role in COLUMN_ROLES)
    others = (
        modules[name] for name, role in inside.items() if role in (Role.PER_HEAD, Role.SHARED) and name in modules
    )
    readers = (*columns, *(module for module in others if is_projection(module)))
    if len(rows) != 1 or not readers:
        raise PlanError(
            f"{plan.source}: the {roles[block_name].value} {block_name!r} needs one output projection and at "
            f"least one input projection, not {len(rows)} and {len(readers)}"
        )
    heads = None
    if roles[block_name] is Role.ATTENTION:
        heads = _heads(model, block_name, inside, modules, plan, tp)
    module = modules[block_name]
    return Block(
        name=block_name,
        module=module,
        entries=columns if roles[block_name] is Role.LAYER else (module,),
        columns=readers,
        row=rows[0],
        heads=heads,
        local_attributes=heads.local_attributes(module) if heads else {},
        has_fused_qkv=not FUSED_QKV_ROLES.isdisjoint(inside.values()),
        wide_norms=tuple(
            (modules[name], wide_rows(name, role, heads, in_features(rows[0]), tp))
            for name, role in inside.items()
            if role in WIDE_NORM_ROLES
        ),
    )


def _heads(
    model: nn.Module,
    block_name: str,
    inside: dict[str, Role],
    modules: dict[str, nn.Module],
    plan: ShardingPlan,
    tp: int,
) -> HeadLayout:
    by_role = {role: modules[name] for name, role in inside.items() if name in modules}
    query_width = in_features(by_role[Role.O])
    if {Role.Q, Role.K, Role.V} <= by_role.keys():
        kv_width = out_features(by_role[Role.K])
    elif Role.PER_HEAD in by_role:  # latent attention, whose keys and values are made for each query head
        kv_width = query_width
    elif fused := [module for role, module in by_role.items() if role in FUSED_QKV_ROLES]:
        kv_width = (out_features(fused[0]) - query_width) // 2
    else:
        raise PlanError(f"{plan.source}: {block_name!r} has no query, key and value projections (or a fused one)")
    config = getattr(model, "config", None)
    return head_layout(modules[block_name], config, query_width=query_width, kv_width=kv_width, tp=tp)


def _block_layouts(
    model: nn.Module,
    block: Block,
    owners: dict[str, str],
    modules: dict[str, nn.Module],
    roles: dict[str, Role],
    tp: int,
    sequence_parallel: bool,
) -> dict[str, ParameterLayout]:
    layouts = {}
    for name in (name for name, owner in owners.items() if owner == block.name):
        role = roles[name]
        if role.is_structural or role is Role.NORM:
            continue
        for full_name, parameter in _parameters(model, modules, name):
            if _is_replicated_factor(full_name, full_name.removeprefix(f"{name}."), role):
                whole = RowLayout.replicated(parameter.shape[0], tp)
                # Each rank's half of the product is of its own rows or columns, and so is what flows back from it.
                layouts[full_name] = ParameterLayout(rows=whole, is_grad_partial=True)
                continue
            rows = rows_of(full_name, tuple(parameter.shape), role, block.heads, in_features(block.row), tp)
            if name in modules and is_transposed(modules[name]) and parameter.ndim == 2:
                rows = RowLayout(1 - rows.dim, rows.size, rows.spans)
            if rows.size != (parameter.shape[rows.dim] if parameter.ndim else 1):
                raise PlanError(
                    f"{full_name} has {parameter.shape[rows.dim]} rows in dim {rows.dim}, but its role ({role.value}) "
                    f"and the model's head counts make {rows.size}"
                )
            # What several ranks hold sees each rank's heads or channels only, also where all of them hold all of it (a
            # shared head norm, the only key head); a row bias sees local tokens only.
            is_partial = sequence_parallel if role in ROW_ROLES and rows.is_replicated else rows.has_copies
            layouts[full_name] = ParameterLayout(rows=rows, is_grad_partial=is_partial)
    return layouts


def _is_replicated_factor(name: str, suffix: str, role: Role) -> bool:
    """Whether a parameter is the factor of an adapter that has no dim in common with the weight's sharded one."""
    if role in ROW_ROLES and suffix.startswith("lora_B.") and suffix.endswith(".bias"):
        raise PlanError(
            f"{name}: every rank would add the bias of an adapter on an output projection; use lora_bias=False, or "
            "ParallelPlan(tp=1)"
        )
    return suffix.startswith(
        "lora_A." if role in COLUMN_ROLES | {Role.PER_HEAD} else "lora_B." if role in ROW_ROLES else "\0"
    )


def _check_ties(model: nn.Module, layouts: dict[str, ParameterLayout]) -> None:
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if layouts[other] != layouts[name]:
            raise PlanError(f"{other} and {name} are one tied parameter, but their roles shard it in two ways")
