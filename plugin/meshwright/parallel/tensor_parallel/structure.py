"""Derive every parameter's layout from a model and its sharding plan, without changing the model.

Modules without a role and sizes that do not fit are found here, so a failing call leaves the model as it was. Faults
that only a forward pass shows, such as a residual connection inside a block, raise PlanError in that pass (see
block_boundary.py and apply.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod

from torch import nn

from meshwright.errors import PlanError
from meshwright.facts import Facts
from meshwright.layout.row_layout import RowLayout
from meshwright.layout.tensor_layout import TensorLayout
from meshwright.parallel.batch.mixed_rows import EMBEDDING_OPTIONS
from meshwright.roles import Decoder, find_decoder, written_plan
from meshwright.roles.blocks import BLOCKS, Block
from meshwright.roles.blocks.block import OVER_TP, cut_over_tp
from meshwright.roles.blocks.mixer import keep_undivided
from meshwright.roles.decoder import embeds_tokens, towers_beside
from meshwright.roles.linear_kernel import weight_of
from meshwright.roles.roled_model import RoledModel
from meshwright.roles.sharding_plan import Role, ShardingPlan


@dataclass(frozen=True, kw_only=True)
class DecoderStructure(Decoder):
    """A decoder, its blocks, and the layout of each parameter by name.

    Args:
        head: the head that tp cuts over the vocabulary; None if there is none.
        embeddings: the embeddings with the weight of the tokens', of which an encoder-decoder has several. None if the
            plan says that they stay whole, or the embedding has further weights: a rank would apply these to the
            tokens of its part of the vocabulary alone. A head with its weight stays whole too.
        blocks: the blocks of the layers, each once.
        routed: the modules that route tokens to experts, and in which each rank routes its own tokens, although it has
            all tokens between the blocks; none under sequence parallelism, where it has only its own there too.
        whole: the outermost modules inside of layers that every rank computes for all tokens, by name.
        whole_outside: those outside of layers and towers, which may run between layers or before the final norm.
        is_sequence_parallel: whether each rank has its own tokens between the blocks; False if there are none.
        roles: the roles that the modules have.
        vocab_size: the number of words of which each rank has a part, as many as the head scores; 0 if all are whole.
            In a few families the embedding has more words.
    """

    embedding: nn.Embedding
    head: nn.Linear | None
    embeddings: tuple[nn.Embedding, ...]
    blocks: tuple[Block, ...]
    routed: tuple[nn.Module, ...]
    whole: dict[str, nn.Module]
    whole_outside: dict[str, nn.Module]
    is_sequence_parallel: bool
    parameters: dict[str, TensorLayout] = field(repr=False)
    roles: ShardingPlan = field(repr=False)
    vocab_size: int

    @property
    def cut_share(self) -> float:
        """The share of the weights' elements of which each rank of tp has a part."""
        layouts = {p: self.parameters[name] for name, p in self.facts.parameters.items()}.values()
        return sum(prod(x.shape) for x in layouts if x.is_sharded) / sum(prod(x.shape) for x in layouts)


def describe(
    model: nn.Module | Facts,
    plan: ShardingPlan,
    *,
    tp: int,
    sequence_parallel: bool,
    shares_towers: bool = False,
    is_part: bool = False,
) -> DecoderStructure:
    """Return a decoder's structure: each module's role and each parameter's layout over ``tp`` ranks.

    Args:
        model: the decoder, or its facts.
        plan: the roles of its modules.
        tp: the number of ranks.
        sequence_parallel: whether each rank has its own tokens between the blocks.
        shares_towers: whether the ranks share the images of each tower, so that the gradients of its weights are
            addends.
        is_part: whether the model is a part of a decoder, whose other layers have blocks.

    Raises:
        UncoveredParameterError: if parameters have no role; the message lists them.
        PlanError: if the model's sizes are not divisible by ``tp``, or its structure is not a decoder's.
    """
    facts = Facts.of(model)
    roled = RoledModel(facts, keep_undivided(facts, plan, tp))
    roled.check_coverage()
    embedding = roled.only(Role.EMBEDDING, nn.Embedding)
    head = roled.only_if_any(Role.HEAD, nn.Linear)
    of_embedding = {id(p) for p in embedding.parameters()}
    uncut = {id(p) for name in roled.plan.uncut for p in roled.modules[name].parameters()}
    if len(of_embedding) > 1 or uncut & of_embedding:
        uncut |= of_embedding
    has_whole_head = head is not None and id(weight_of(head)) in uncut
    if head is not None and has_whole_head:
        uncut |= {id(p) for p in head.parameters()}
        head = None
    is_embedding_cut = not uncut & of_embedding
    parts = _by_roles(roled)
    sequence_parallel = sequence_parallel and (is_part or bool(roled.block_names))
    routed = [] if sequence_parallel or tp == 1 else _owners_of_experts(roled, parts)

    def has_own_tokens(name: str) -> bool:
        return sequence_parallel or any(f"{name}.".startswith(f"{owner}.") for owner in routed)

    layouts: dict[str, TensorLayout] = {}
    blocks: dict[nn.Module, Block] = {}
    for block_name in roled.block_names:
        block = BLOCKS[roled.roles[block_name]](roled, block_name, tp)
        layouts |= block.layouts(sequence_parallel=has_own_tokens(block_name))
        blocks.setdefault(block.module, block)
    for name, role in roled.roles.items():
        for full_name, parameter in roled.parameters(name):
            if role in (Role.EMBEDDING, Role.HEAD) and id(parameter) not in uncut:
                layouts[full_name] = cut_over_tp(parameter, RowLayout.padded(parameter.shape[0], tp), full_name)
            elif role.part is None and role is not Role.LAYER:
                is_partial = role not in (Role.WHOLE, Role.EMBEDDING, Role.HEAD) and has_own_tokens(name)
                layouts[full_name] = TensorLayout.whole(parameter, tp, addends=OVER_TP if is_partial else frozenset())
    # A tower with the embedding of tokens, which is cut, has no images to share.
    shared = [x for x in parts.towers if shares_towers and tp > 1 and not embeds_tokens(x, embedding)]
    of_towers = facts.parameters_inside(*shared)
    first: dict[nn.Parameter, str] = {}
    for name, parameter in facts.parameters.items():
        if parameter in of_towers:
            layouts[name] = replace(layouts[name], addends=OVER_TP)
        other = first.setdefault(parameter, name)
        if layouts[other] != layouts[name]:
            raise PlanError(f"{other} and {name} are one tied parameter, but their roles shard it in two ways")
    is_without = has_whole_head or not is_embedding_cut
    words = weight_of(head).shape[0] if head is not None else 0 if is_without else embedding.num_embeddings
    embeddings = (m for m in roled.modules_with(Role.EMBEDDING) if isinstance(m, nn.Embedding) and is_embedding_cut)
    return DecoderStructure(
        **vars(parts) | {"head": head},
        embeddings=tuple(embeddings),
        blocks=tuple(blocks.values()),
        routed=tuple(dict.fromkeys(roled.modules[name] for name in routed)),
        whole=roled.whole_in_layers,
        whole_outside=roled.whole_beside((*parts.layers, *parts.towers)),
        is_sequence_parallel=sequence_parallel,
        parameters=layouts,
        roles=plan,
        vocab_size=words,
    )


def outline(model: nn.Module | Facts, plan: ShardingPlan | None = None, *, instead: str) -> Decoder:
    """Return the parts of a decoder whose weights stay whole: a pipeline cuts its layers, or cp its tokens.

    Args:
        model: the decoder, or its facts.
        plan: the roles of the embedding, the layers, the final norm and the head; None for those that are written for
            the model's family, or else for the structure itself.
        instead: the plan to use if the decoder cannot be cut, for messages.

    Raises:
        PlanError: if the structure is not a decoder's.
    """
    facts = Facts.of(model)
    plan = written_plan(facts) if plan is None else plan
    if plan is not None:
        return _by_roles(RoledModel(facts, plan, instead=instead))
    try:
        decoder = find_decoder(facts)
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
        facts=roled.facts,
        embedding=roled.only(Role.EMBEDDING, nn.Module),
        layers=layers,
        final_norm=roled.only_if_any(Role.FINAL_NORM, nn.Module),
        head=roled.only_if_any(Role.HEAD, nn.Module),
        towers=tuple(towers_beside(roled.facts, layers)),
    )
    _check_parts(decoder, roled.instead)
    return decoder


def _check_parts(decoder: Decoder, instead: str) -> None:
    """Raise for what no cut of a decoder allows."""
    for option in EMBEDDING_OPTIONS:
        if value := getattr(decoder.embedding, option, None):
            raise PlanError(
                f"an embedding with {option}={value!r} needs all tokens of the batch and all gradients of its weight "
                f"on one rank. Make it without {option}, or use {instead}"
            )
    for module, name in decoder.facts.names.items():
        if (rate := getattr(module, "layerdrop", 0)) and isinstance(rate, float):
            raise PlanError(
                f"{name or type(module).__name__} skips layers at random (layerdrop={rate:g}): the ranks would skip "
                "different layers. Set layerdrop to 0 in the model's config"
            )


def _owners_of_experts(roled: RoledModel, decoder: Decoder) -> list[str]:
    """Return the names of the modules that route tokens to experts.

    Raises:
        PlanError: if a layer does so itself, since its attention needs all tokens.
    """
    experts = [name for name, role in roled.roles.items() if role is Role.EXPERTS]
    owners = list(dict.fromkeys(name.rpartition(".")[0] for name in experts))
    if of_layer := [name for name in owners if roled.modules[name] in decoder.layers]:
        raise PlanError(
            f"under tp every rank would route all tokens of {of_layer[0]!r} to experts, and rounding may send a token "
            "to different experts on two ranks. Add sequence parallelism, so that each rank routes its own tokens: "
            "ParallelPlan(tp=2, sequence_parallel=True), or in words plan='tp2+sp'"
        )
    return owners
