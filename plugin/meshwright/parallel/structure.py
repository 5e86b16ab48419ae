"""From a model and its sharding plan to every parameter's layout; nothing is changed yet.

All that can be wrong with a plan is found here, so that a failing call leaves the model as it was.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from meshwright.errors import PlanError, UncoveredParameterError
from meshwright.parallel.heads import HeadLayout, head_layout
from meshwright.parallel.layout import RowLayout
from meshwright.plans.adapters import check_adapters, is_adapted, projection
from meshwright.plans.base import BLOCK_ROLES, COLUMN_ROLES, ROW_ROLES, Role, ShardingPlan

PROJECTIONS = COLUMN_ROLES | ROW_ROLES


@dataclass(frozen=True, kw_only=True)
class Block:
    """An attention or MLP block: where activations are gathered, projected, and reduced again."""

    name: str
    module: nn.Module
    columns: tuple[nn.Module, ...]
    row: nn.Module
    heads: HeadLayout | None
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
    """A decoder taken apart: its blocks, and the layout of each parameter by name."""

    embedding: nn.Embedding
    head: nn.Linear | None
    first_layer: nn.Module
    final_norm: nn.Module
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
    _check_coverage(model, modules, roles, plan)
    embedding = _only(modules, roles, Role.EMBEDDING, plan, nn.Embedding)
    _check_embedding(embedding)
    head = _only(modules, roles, Role.HEAD, plan, nn.Linear, required=False)
    layers = [modules[name] for name, role in roles.items() if role is Role.LAYER]
    if not layers:
        raise PlanError(f"{plan.source} names no decoder layer of {type(model).__name__}")
    blocks = tuple(_block(model, name, modules, roles, plan, tp) for name, role in roles.items() if role in BLOCK_ROLES)
    layouts: dict[str, ParameterLayout] = {}
    for block in blocks:
        layouts |= _block_layouts(block, modules, roles, tp, sequence_parallel)
    for name, role in roles.items():
        for suffix, parameter in modules[name].named_parameters(recurse=False):
            if role in (Role.EMBEDDING, Role.HEAD):
                layouts[f"{name}.{suffix}"] = ParameterLayout(
                    rows=RowLayout.padded(parameter.shape[0], tp), is_grad_partial=False
                )
            elif role in (Role.NORM, Role.FINAL_NORM):
                layouts[f"{name}.{suffix}"] = ParameterLayout(
                    rows=RowLayout.replicated(parameter.shape[0], tp), is_grad_partial=sequence_parallel
                )
    _check_ties(model, layouts)
    return DecoderStructure(
        embedding=embedding,
        head=head,
        first_layer=layers[0],
        final_norm=_only(modules, roles, Role.FINAL_NORM, plan, nn.Module),
        blocks=blocks,
        parameters=layouts,
        vocab_size=embedding.num_embeddings,
    )


def _check_coverage(
    model: nn.Module, modules: dict[str, nn.Module], roles: dict[str, Role], plan: ShardingPlan
) -> None:
    covered = {
        f"{name}.{suffix}"
        for name, role in roles.items()
        if not role.is_structural
        for suffix, _ in modules[name].named_parameters(recurse=role in PROJECTIONS and is_adapted(modules[name]))
    }
    in_blocks = PROJECTIONS | {Role.HEAD_NORM, Role.Q_NORM, Role.K_NORM}
    homeless = {
        f"{name}.{suffix}"
        for name, role in roles.items()
        if role in in_blocks and _owning_block(name, roles) is None
        for suffix, _ in modules[name].named_parameters(recurse=False)
    }
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    missing = [name for name in names if name not in covered or name in homeless]
    if missing:
        raise UncoveredParameterError(missing, plan.source)
    for name, role in roles.items():
        if role in PROJECTIONS and not isinstance(projection(modules[name]), nn.Linear):
            raise PlanError(
                f"{plan.source} makes {name!r} a {role.value}, but it is a {type(modules[name]).__name__}: "
                "only nn.Linear projections can be sharded, alone or with LoRA (merge quantised layers first)"
            )


def _owning_block(name: str, roles: dict[str, Role]) -> str | None:
    while "." in name:
        name = name.rpartition(".")[0]
        if roles.get(name) in BLOCK_ROLES:
            return name
    return None


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
    if not isinstance(module, kind):
        raise PlanError(f"the {role.value} {names[0]!r} must be a {kind.__name__}, not {type(module).__name__}")
    return module


def _check_embedding(embedding: nn.Embedding) -> None:
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(embedding, option):
            raise PlanError(f"an embedding with {option}={getattr(embedding, option)!r} cannot be sharded over tp")


def _block(
    model: nn.Module,
    block_name: str,
    modules: dict[str, nn.Module],
    roles: dict[str, Role],
    plan: ShardingPlan,
    tp: int,
) -> Block:
    inside = {name: role for name, role in roles.items() if _owning_block(name, roles) == block_name}
    by_role = {role: modules[name] for name, role in inside.items()}
    rows = [modules[name] for name, role in inside.items() if role in ROW_ROLES]
    columns = tuple(modules[name] for name, role in inside.items() if role in COLUMN_ROLES)
    if len(rows) != 1 or not columns:
        raise PlanError(
            f"{plan.source}: the {roles[block_name].value} {block_name!r} needs one output projection and at "
            f"least one input projection, not {len(rows)} and {len(columns)}"
        )
    heads = None
    if roles[block_name] is Role.ATTENTION:
        if not ({Role.Q, Role.K, Role.V} <= by_role.keys() or Role.QKV in by_role):
            raise PlanError(f"{plan.source}: {block_name!r} has no query, key and value projections (or a fused one)")
        query: Any = by_role.get(Role.Q)
        heads = head_layout(
            modules[block_name],
            getattr(model, "config", None),
            query_rows=projection(query).weight.shape[0] if query is not None else None,
            tp=tp,
        )
    wide = {Role.Q_NORM: HeadLayout.query_rows, Role.K_NORM: HeadLayout.kv_rows}
    return Block(
        name=block_name,
        module=modules[block_name],
        columns=columns,
        row=rows[0],
        heads=heads,
        has_fused_qkv=Role.QKV in by_role,
        wide_norms=tuple(
            (modules[name], wide[role](heads)) for name, role in inside.items() if role in wide and heads is not None
        ),
    )


def _block_layouts(
    block: Block, modules: dict[str, nn.Module], roles: dict[str, Role], tp: int, sequence_parallel: bool
) -> dict[str, ParameterLayout]:
    layouts = {}
    for name, role in roles.items():
        if _owning_block(name, roles) != block.name or role.is_structural or role is Role.NORM:
            continue
        module = modules[name]
        for suffix, parameter in module.named_parameters(recurse=is_adapted(module)):
            full_name = f"{name}.{suffix}"
            if _is_replicated_factor(full_name, suffix, role):
                rows = RowLayout.replicated(parameter.shape[0], tp)
                # Each rank's half of the product is of its own rows or columns, and so is what flows back from it.
                layouts[full_name] = ParameterLayout(rows=rows, is_grad_partial=True)
                continue
            rows = _rows(full_name, tuple(parameter.shape), role, block.heads, tp)
            # A shared head norm sees local heads only, and so does a key head that several ranks hold (all of them do
            # where it is the only one); a row bias sees local tokens only.
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
    return suffix.startswith("lora_A." if role in COLUMN_ROLES else "lora_B." if role in ROW_ROLES else "\0")


def _rows(name: str, shape: tuple[int, ...], role: Role, heads: HeadLayout | None, tp: int) -> RowLayout:
    is_matrix = len(shape) == 2
    if role is Role.HEAD_NORM or (role in ROW_ROLES and not is_matrix):
        return RowLayout.replicated(shape[0], tp)
    if role in ROW_ROLES:
        if heads is not None and role is Role.O:
            expected = heads.query_rows()
            rows = RowLayout(1, expected.size, expected.spans)
        else:
            rows = RowLayout.even(_divisible(name, shape[1], tp), tp, dim=1)
    elif role in (Role.Q, Role.Q_NORM):
        assert heads is not None
        rows = heads.query_rows()
    elif role in (Role.K, Role.V, Role.K_NORM):
        assert heads is not None
        rows = heads.kv_rows()
    elif role is Role.QKV:
        assert heads is not None
        rows = heads.fused_rows()
    elif role is Role.GATE_UP:
        half = _divisible(name, shape[0] // 2, tp)
        rows = RowLayout.even(shape[0], tp, parts=(half, half))
    else:
        rows = RowLayout.even(_divisible(name, shape[0], tp), tp)
    if rows.size != shape[rows.dim]:
        raise PlanError(
            f"{name} has {shape[rows.dim]} rows in dim {rows.dim}, but its role ({role.value}) and the model's "
            f"head counts make {rows.size}"
        )
    return rows


def _divisible(name: str, size: int, tp: int) -> int:
    if size % tp:
        raise PlanError(f"{name}: its width {size} cannot be divided over tp={tp}; change ParallelPlan.tp")
    return size


def _check_ties(model: nn.Module, layouts: dict[str, ParameterLayout]) -> None:
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if layouts[other] != layouts[name]:
            raise PlanError(f"{other} and {name} are one tied parameter, but their roles shard it in two ways")
