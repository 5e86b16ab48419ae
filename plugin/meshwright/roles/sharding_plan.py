"""The sharding plan: data that says which module plays which role in a decoder."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


class Role(enum.Enum):
    """The role of a module in a Llama-style decoder; the runtime decides how each role is sharded."""

    # Structure: the modules at which activations are gathered and reduced.
    LAYER = "decoder layer"
    ATTENTION = "attention block"
    MLP = "mlp block"
    # Attention.
    Q = "query projection"
    K = "key projection"
    V = "value projection"
    QKV = "fused projection: all queries, then all keys, then all values"
    QKV_BY_GROUP = "fused projection: for each key head its queries, its key, its value"
    QKV_IN_FOUR = "fused projection in four parts, each of queries, then values, then keys"
    O = "attention output projection"  # noqa: E741  the field's own name
    HEAD_NORM = "query or key norm over one head, its weight shared by all heads"
    Q_NORM = "query norm over the whole width"
    K_NORM = "key norm over the whole width"
    PER_HEAD = "rows that belong to the query heads in their order: sinks, gates"
    # MLP.
    GATE = "gate projection"
    UP = "up projection"
    GATE_UP = "fused projection: the gate half, then the up half"
    DOWN = "down projection"
    # Either block.
    INNER_NORM = "norm over the width that the block's output projection reads"
    SHARED = "weight that every rank applies to its part of a block"
    # The rest.
    NORM = "norm over the hidden width, or another weight applied to each token's hidden state"
    FINAL_NORM = "norm after the last layer"
    WHOLE = "module before the first or after the last layer, where each rank has all tokens"
    EMBEDDING = "token embedding"
    HEAD = "language-model head"

    @property
    def is_structural(self) -> bool:
        """Whether modules with this role own no parameters themselves."""
        return self in (Role.LAYER, Role.ATTENTION, Role.MLP)


FUSED_QKV_ROLES = frozenset({Role.QKV, Role.QKV_BY_GROUP, Role.QKV_IN_FOUR})
MLP_COLUMN_ROLES = frozenset({Role.GATE, Role.UP, Role.GATE_UP})
COLUMN_ROLES = frozenset({Role.Q, Role.K, Role.V}) | FUSED_QKV_ROLES | MLP_COLUMN_ROLES
ROW_ROLES = frozenset({Role.O, Role.DOWN})
WIDE_NORM_ROLES = frozenset({Role.Q_NORM, Role.K_NORM, Role.INNER_NORM})
BLOCK_ROLES = frozenset({Role.ATTENTION, Role.MLP})


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """The roles of a model family's modules.

    Args:
        roles: the role of each module, by name; also the role of a parameter that its module's role does not cover. A
            ``*`` stands for exactly one dotted component, so ``model.layers.*.mlp`` is the MLP of every layer. An exact
            name takes precedence over a wildcard.
        source: the plan's origin, for messages.

    Example:
        >>> plan = ShardingPlan(roles={"model.layers.*.mlp.up_proj": Role.UP})
        >>> plan.role_of("model.layers.7.mlp.up_proj")
        <Role.UP: 'up projection'>
        >>> plan.role_of("model.layers.7.mlp.down_proj") is None
        True
    """

    roles: Mapping[str, Role]
    source: str = "the sharding plan"
    _patterns: tuple[tuple[tuple[str, ...], Role], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for pattern, role in self.roles.items():
            if not isinstance(role, Role):
                raise ValueError(f"{self.source}: {pattern!r} has the role {role!r}; use a meshwright.Role")
        object.__setattr__(self, "roles", MappingProxyType(dict(self.roles)))
        patterns = sorted(self.roles.items(), key=lambda item: item[0].count("*"))
        object.__setattr__(self, "_patterns", tuple((tuple(p.split(".")), r) for p, r in patterns))

    def role_of(self, name: str) -> Role | None:
        """Return the role of a module or parameter; None if it has none."""
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
    attention_roles = attention_roles or {
        "q_proj": Role.Q,
        "k_proj": Role.K,
        "v_proj": Role.V,
        "o_proj": Role.O,
    }
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
