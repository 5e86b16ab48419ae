"""The sharding plan: data that says which module plays which role in a decoder."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


class BlockPart(enum.Enum):
    """What a module is in a block, which decides what each rank of tp holds of its weights."""

    BLOCK = "the block itself"
    COLUMN = "input projection: each rank computes some of its channels"
    ROW = "output projection: each rank reads the channels that it has computed"
    INNER = "weights that belong to the channels between the projections"
    WIDE_NORM = "norm over all channels between the projections, of which each rank has some"
    COPY = "weights that every rank has whole and applies to its channels"


class Role(enum.Enum):
    """The role of a module in a Llama-style decoder; the kinds of blocks decide how each role is sharded."""

    part: BlockPart | None
    """What a module with this role is in a block; None outside of blocks."""

    def __new__(cls, description: str, part: BlockPart | None = None) -> Role:
        role = object.__new__(cls)
        role._value_, role.part = description, part
        return role

    # Structure: the modules at which activations are gathered and reduced.
    LAYER = "decoder layer"
    ATTENTION = "attention block", BlockPart.BLOCK
    MLP = "mlp block", BlockPart.BLOCK
    # Attention.
    Q = "query projection", BlockPart.COLUMN
    K = "key projection", BlockPart.COLUMN
    V = "value projection", BlockPart.COLUMN
    QKV = "fused projection: all queries, then all keys, then all values", BlockPart.COLUMN
    QKV_BY_GROUP = "fused projection: for each key head its queries, its key, its value", BlockPart.COLUMN
    QKV_IN_FOUR = "fused projection in four parts, each of queries, then values, then keys", BlockPart.COLUMN
    O = "attention output projection", BlockPart.ROW  # noqa: E741  the field's own name
    HEAD_NORM = "query or key norm over one head, its weight shared by all heads", BlockPart.COPY
    Q_NORM = "query norm over the whole width", BlockPart.WIDE_NORM
    K_NORM = "key norm over the whole width", BlockPart.WIDE_NORM
    PER_HEAD = "rows that belong to the query heads in their order: sinks, gates", BlockPart.INNER
    # MLP.
    GATE = "gate projection", BlockPart.COLUMN
    UP = "up projection", BlockPart.COLUMN
    GATE_UP = "fused projection: the gate half, then the up half", BlockPart.COLUMN
    DOWN = "down projection", BlockPart.ROW
    # Mixers: convolutions and recurrences over tokens.
    MIXER = "mixer block", BlockPart.BLOCK
    MIXER_INPUT = "input projection of a mixer, of parts that are each cut", BlockPart.COLUMN
    MIXER_INNER = "weights of a mixer that belong to its heads or channels", BlockPart.INNER
    MIXER_OUTPUT = "mixer output projection", BlockPart.ROW
    # Any block.
    INNER_NORM = "norm over the width that the block's output projection reads", BlockPart.WIDE_NORM
    SHARED = "weight that every rank applies to its part of a block", BlockPart.COPY
    # The rest.
    EXPERTS = "experts, each of which takes the tokens that a router sends to it"
    ROUTER = "router of experts, or another weight beside them that is applied to each token"
    NORM = "norm over the hidden width, or another weight applied to each token's hidden state"
    FINAL_NORM = "norm after the last layer"
    WHOLE = "module that every rank computes for all tokens, with the modules inside of it"
    EMBEDDING = "token embedding"
    HEAD = "language-model head"

    @property
    def is_structural(self) -> bool:
        """Whether modules with this role own no parameters themselves."""
        return self is Role.LAYER or self.part is BlockPart.BLOCK


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """The roles of a model family's modules.

    Args:
        roles: the role of each module, by name; also the role of a parameter that its module's role does not cover. A
            ``*`` stands for exactly one dotted component, so ``model.layers.*.mlp`` is the MLP of every layer. An exact
            name takes precedence over a wildcard.
        source: the plan's origin, for messages.
        uncut: the names of the embedding and the head, if each rank has their weights whole.

    Example:
        >>> plan = ShardingPlan(roles={"model.layers.*.mlp.up_proj": Role.UP})
        >>> plan.role_of("model.layers.7.mlp.up_proj")
        <Role.UP: 'up projection'>
        >>> plan.role_of("model.layers.7.mlp.down_proj") is None
        True
    """

    roles: Mapping[str, Role]
    source: str = "the sharding plan"
    uncut: frozenset[str] = frozenset()
    _patterns: tuple[tuple[tuple[str, ...], Role], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for pattern, role in self.roles.items():
            if not isinstance(role, Role):
                raise ValueError(f"{self.source}: {pattern!r} has the role {role!r}; use a meshwright.Role")
        object.__setattr__(self, "roles", MappingProxyType(dict(self.roles)))
        patterns = sorted(((p, r) for p, r in self.roles.items() if "*" in p), key=lambda item: item[0].count("*"))
        object.__setattr__(self, "_patterns", tuple((tuple(p.split(".")), r) for p, r in patterns))

    def role_of(self, name: str) -> Role | None:
        """Return the role of a module or parameter; None if it has none."""
        if name in self.roles:
            return self.roles[name]
        parts = name.split(".")
        for pattern, role in self._patterns:
            if len(pattern) == len(parts) and all(p in ("*", part) for p, part in zip(pattern, parts, strict=True)):
                return role
        return None


def decoder_roles(
    *,
    base: str = "model",
    layers: str = "layers",
    attention: str = "self_attn",
    attention_roles: Mapping[str, Role] | None = None,
    mlp: str = "mlp",
    mlp_roles: Mapping[str, Role] | None = None,
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm"),
    embedding: str = "embed_tokens",
    final_norm: str = "norm",
    head: str = "lm_head",
) -> dict[str, Role]:
    """Return the roles of a Llama-shaped decoder; the names default to Llama's."""
    layer = f"{base}.{layers}.*"
    attention_roles = attention_roles or {"q_proj": Role.Q, "k_proj": Role.K, "v_proj": Role.V, "o_proj": Role.O}
    mlp_roles = mlp_roles or {"gate_proj": Role.GATE, "up_proj": Role.UP, "down_proj": Role.DOWN}
    return {
        f"{base}.{embedding}": Role.EMBEDDING,
        layer: Role.LAYER,
        f"{layer}.{attention}": Role.ATTENTION,
        **{f"{layer}.{attention}.{name}": role for name, role in attention_roles.items()},
        f"{layer}.{mlp}": Role.MLP,
        **{f"{layer}.{mlp}.{name}": role for name, role in mlp_roles.items()},
        **{f"{layer}.{name}": Role.NORM for name in norms},
        f"{base}.{final_norm}": Role.FINAL_NORM,
        head: Role.HEAD,
    }
