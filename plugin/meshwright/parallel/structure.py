"""Derive every parameter's layout from a model and its sharding plan, without changing the model.

Modules without a role and sizes that do not fit are found here, so a failing call leaves the model as it was. Faults
that only a forward pass shows, such as a residual connection inside a block, raise PlanError in that pass (see
block_boundary.py and tensor_parallel.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from meshwright.errors import PlanError
from meshwright.layout.row_layout import RowLayout
from meshwright.layout.tensor_layout import TensorLayout
from meshwright.parallel.head_layout import HeadLayout, head_layout
from meshwright.parallel.mixed_rows import EMBEDDING_OPTIONS
from meshwright.parallel.role_rows import rows_of, wide_rows
from meshwright.parallel.roled_model import RoledModel
from meshwright.roles import Decoder, find_decoder, written_plan
from meshwright.roles.adapters import is_adapted
from meshwright.roles.decoder import towers_beside
from meshwright.roles.projection import in_features, is_projection, out_features, output_dim, weight_of
from meshwright.roles.sharding_plan import (
    COLUMN_ROLES,
    FUSED_QKV_ROLES,
    ROW_ROLES,
    WIDE_NORM_ROLES,
    Role,
    ShardingPlan,
)

_OVER_TP = frozenset(("tp",))


@dataclass(frozen=True, kw_only=True)
class Block:
    """An attention or MLP block, which gathers activations, projects them, and reduces the result.

    Args:
        name: the name of the module that owns the block; for an MLP this may be the decoder layer itself.
        entries: the modules that gather their input: the block, or the column projections if a layer owns the MLP.
        local_attributes: the values, on one rank, of the module's attributes that count heads or their width.
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
        """The adapters' dropouts on the block's input, which every rank has whole."""
        adapted: list[Any] = [module for module in self.columns if is_adapted(module)]
        return [module for column in adapted for module in column.lora_dropout.values()]


@dataclass(frozen=True, kw_only=True)
class DecoderStructure(Decoder):
    """A decoder, its blocks, and the layout of each parameter by name.

    Args:
        blocks: the blocks of the layers, each once.
        vocab_size: the number of words that the head scores; in a few families the embedding has more words.
    """

    embedding: nn.Embedding
    head: nn.Linear | None
    blocks: tuple[Block, ...]
    parameters: dict[str, TensorLayout] = field(repr=False)
    vocab_size: int


def describe(model: nn.Module, plan: ShardingPlan, *, tp: int, sequence_parallel: bool) -> DecoderStructure:
    """Return a decoder's structure: each module's role and each parameter's layout over ``tp`` ranks.

    Raises:
        UncoveredParameterError: if parameters have no role; the message lists them.
        PlanError: if the model's sizes are not divisible by ``tp``, or its structure is not a decoder's.
    """
    roled = RoledModel(model, plan)
    roled.check_coverage()
    embedding: nn.Embedding = roled.only(Role.EMBEDDING, nn.Embedding)
    head: nn.Linear | None = roled.only(Role.HEAD, nn.Linear, required=False)
    _check_whole_embedding(embedding)
    parts = _by_roles(roled)
    layouts: dict[str, TensorLayout] = {}
    blocks: dict[nn.Module, Block] = {}
    for block_name in roled.block_names:
        block = _block(roled, block_name, tp)
        layouts |= _block_layouts(roled, block, tp, sequence_parallel)
        blocks.setdefault(block.module, block)
    for name, role in roled.roles.items():
        for full_name, parameter in roled.parameters(name):
            if role in (Role.EMBEDDING, Role.HEAD):
                layouts[full_name] = _cut_over_tp(parameter, RowLayout.padded(parameter.shape[0], tp))
            elif role in (Role.NORM, Role.FINAL_NORM, Role.WHOLE):
                is_partial = sequence_parallel and role is not Role.WHOLE
                layouts[full_name] = TensorLayout.whole(parameter, tp, addends=_OVER_TP if is_partial else frozenset())
    _check_ties(model, layouts)
    words = embedding.num_embeddings if head is None else weight_of(head).shape[0]
    return DecoderStructure(**vars(parts), blocks=tuple(blocks.values()), parameters=layouts, vocab_size=words)


def outline(model: nn.Module, plan: ShardingPlan | None = None, *, instead: str) -> Decoder:
    """Return the parts of a decoder whose weights stay whole: a pipeline cuts its layers, or cp its tokens.

    Args:
        model: the decoder.
        plan: the roles of the embedding, the layers, the final norm and the head; None for those that are written for
            the model's family, or else for the structure itself.
        instead: the plan to use if the decoder cannot be cut, for messages.

    Raises:
        PlanError: if the structure is not a decoder's.
    """
    plan = written_plan(model) if plan is None else plan
    if plan is not None:
        return _by_roles(RoledModel(model, plan, instead=instead))
    try:
        decoder = find_decoder(model)
    except PlanError as error:
        raise PlanError(f"{error}, or use {instead}") from None
    _check_parts(decoder, instead)
    return decoder


def _by_roles(roled: RoledModel) -> Decoder:
    """Return the parts of a decoder that have the roles."""
    layers = tuple(roled.modules[name] for name, role in roled.roles.items() if role is Role.LAYER)
    if not layers:
        raise PlanError(
            f"{roled.plan.source} names no decoder layer of {type(roled.model).__name__}. Give the layers Role.LAYER "
            f"in ToDistributedConfig.sharding_plan, or use {roled.instead}"
        )
    decoder = Decoder(
        model=roled.model,
        embedding=roled.only(Role.EMBEDDING),
        layers=layers,
        final_norm=roled.only(Role.FINAL_NORM, required=False),
        head=roled.only(Role.HEAD, required=False),
        towers=tuple(towers_beside(roled.model, layers)),
    )
    _check_parts(decoder, roled.instead)
    return decoder


def _cut_over_tp(parameter: nn.Parameter, rows: RowLayout, *, has_addends: bool = False) -> TensorLayout:
    """Return the layout of a parameter of which each rank of tp holds some rows."""
    return TensorLayout(shape=parameter.shape, cuts=(("tp", rows),), addends=_OVER_TP if has_addends else frozenset())


def _check_parts(decoder: Decoder, instead: str) -> None:
    """Raise for what no cut of a decoder allows."""
    for option in EMBEDDING_OPTIONS:
        if value := getattr(decoder.embedding, option, None):
            raise PlanError(
                f"an embedding with {option}={value!r} needs all tokens of the batch and all gradients of its weight "
                f"on one rank. Make it without {option}, or use {instead}"
            )
    for name, module in decoder.model.named_modules():
        if (rate := getattr(module, "layerdrop", 0)) and isinstance(rate, float):
            raise PlanError(
                f"{name or type(module).__name__} skips layers at random (layerdrop={rate:g}): the ranks would skip "
                "different layers. Set layerdrop to 0 in the model's config"
            )


def _check_whole_embedding(embedding: nn.Embedding) -> None:
    if others := [name for name, _ in embedding.named_parameters() if name != "weight"]:
        raise PlanError(
            f"{type(embedding).__name__} has parameters besides its weight ({', '.join(others)}): each rank would "
            "apply them only to the tokens of its part of the vocabulary, so the embedding cannot be sharded over tp. "
            "Use ParallelPlan(tp=1)"
        )


def _block(roled: RoledModel, block_name: str, tp: int) -> Block:
    modules, role_of_block = roled.modules, roled.roles[block_name]
    inside = roled.inside(block_name)
    # A module with two names, such as a key projection that is the value projection too, gets its hooks once.
    rows = list(dict.fromkeys(modules[name] for name, role in inside.items() if role in ROW_ROLES))
    columns = tuple(dict.fromkeys(modules[name] for name, role in inside.items() if role in COLUMN_ROLES))
    others = (
        modules[name] for name, role in inside.items() if role in (Role.PER_HEAD, Role.SHARED) and name in modules
    )
    readers = tuple(dict.fromkeys((*columns, *(module for module in others if is_projection(module)))))
    if len(rows) != 1 or not readers:
        raise PlanError(
            f"{roled.plan.source}: the {role_of_block.value} {block_name!r} has {len(rows)} output projections and "
            f"{len(readers)} input projections, but needs one output projection and at least one input projection"
        )
    heads = _heads(roled, block_name, tp) if role_of_block is Role.ATTENTION else None
    module = modules[block_name]
    return Block(
        name=block_name,
        module=module,
        entries=columns if role_of_block is Role.LAYER else (module,),
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


def _heads(roled: RoledModel, block_name: str, tp: int) -> HeadLayout:
    by_role = {role: roled.modules[name] for name, role in roled.inside(block_name).items() if name in roled.modules}
    query_width = in_features(by_role[Role.O])
    if {Role.Q, Role.K, Role.V} <= by_role.keys():
        kv_width = out_features(by_role[Role.K])
    elif Role.PER_HEAD in by_role:  # latent attention makes keys and values for each query head
        kv_width = query_width
    elif fused := [module for role, module in by_role.items() if role in FUSED_QKV_ROLES]:
        kv_width = (out_features(fused[0]) - query_width) // 2
    else:
        raise PlanError(
            f"{roled.plan.source}: {block_name!r} has neither query, key and value projections nor a fused one"
        )
    config = getattr(roled.model, "config", None)
    return head_layout(roled.modules[block_name], config, query_width=query_width, kv_width=kv_width, tp=tp)


def _block_layouts(roled: RoledModel, block: Block, tp: int, sequence_parallel: bool) -> dict[str, TensorLayout]:
    layouts = {}
    for name, role in roled.inside(block.name).items():
        if role.is_structural or role is Role.NORM:
            continue
        for full_name, parameter in roled.parameters(name):
            if _is_replicated_factor(full_name, full_name.removeprefix(f"{name}."), role):
                whole = RowLayout.replicated(parameter.shape[0], tp)
                # The adapter's other factor is sharded, so the gradient of this whole factor is partial.
                layouts[full_name] = _cut_over_tp(parameter, whole, has_addends=True)
                continue
            rows = rows_of(full_name, tuple(parameter.shape), role, block.heads, in_features(block.row), tp)
            if name in roled.modules and output_dim(roled.modules[name]) == 1 and parameter.ndim == 2:
                rows = RowLayout(1 - rows.dim, rows.size, rows.spans)
            if rows.size != (parameter.shape[rows.dim] if parameter.ndim else 1):
                raise PlanError(
                    f"{full_name} has {parameter.shape[rows.dim]} rows in dim {rows.dim}, but its role ({role.value}) "
                    f"and the model's head counts imply {rows.size}. Remove what gives the module weights of other "
                    "shapes before to_distributed, or use ParallelPlan(tp=1)"
                )
            # A copied row gets a gradient from its rank's heads or channels only, even if every rank holds all rows
            # (a shared head norm, the only key head). An output projection's bias gets it from local tokens only.
            is_partial = sequence_parallel if role in ROW_ROLES and rows.is_replicated else rows.has_copies
            layouts[full_name] = _cut_over_tp(parameter, rows, has_addends=is_partial)
    return layouts


def _is_replicated_factor(name: str, suffix: str, role: Role) -> bool:
    """Return whether a parameter is an adapter's factor without the weight's sharded dim."""
    if role in ROW_ROLES and suffix.startswith("lora_B.") and suffix.endswith(".bias"):
        raise PlanError(
            f"{name} is the bias of an adapter on an output projection, and every rank would add it. Use "
            "lora_bias=False, or ParallelPlan(tp=1)"
        )
    if role in ROW_ROLES:
        return suffix.startswith("lora_B.")
    return role in COLUMN_ROLES | {Role.PER_HEAD} and suffix.startswith("lora_A.")


def _check_ties(model: nn.Module, layouts: dict[str, TensorLayout]) -> None:
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if layouts[other] != layouts[name]:
            raise PlanError(f"{other} and {name} are one tied parameter, but their roles shard it in two ways")
