"""How attention heads are dealt to the ranks of the TP axis, replicated key/value heads included."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from meshwright.errors import PlanError
from meshwright.parallel.layout import RowLayout, Span


@dataclass(frozen=True, kw_only=True)
class HeadLayout:
    """The heads of one attention block over ``tp`` ranks.

    Query heads are dealt in equal runs. A rank needs the key/value heads of its queries: where those
    do not divide evenly, a head is held by several ranks (even twice by one), in such a way that each
    local key/value head serves the same number of consecutive local queries. The stock attention
    code then runs unchanged on the local heads.

    Args:
        heads: query heads of the full model.
        kv_heads: key/value heads of the full model; it divides ``heads``.
        head_dim: width of a head.
        tp: size of the TP axis; it divides ``heads``.

    Example:
        Six queries in three groups, two ranks. Rank 1 has queries 3, 4, 5 of the groups 1, 2, 2:

        >>> layout = HeadLayout(heads=6, kv_heads=3, head_dim=1, tp=2)
        >>> layout.local_kv_heads(1), layout.queries_per_kv_head
        ((1, 2, 2), 1)
    """

    heads: int
    kv_heads: int
    head_dim: int
    tp: int

    def __post_init__(self) -> None:
        if self.heads % self.tp:
            legal = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise PlanError(
                f"{self.heads} attention heads cannot be divided over tp={self.tp}; "
                f"ParallelPlan.tp must be one of {', '.join(map(str, legal))} for this model"
            )
        if self.heads % self.kv_heads:
            raise PlanError(f"{self.heads} attention heads are not a multiple of {self.kv_heads} key/value heads")

    @property
    def local_heads(self) -> int:
        """Query heads of a rank."""
        return self.heads // self.tp

    @property
    def queries_per_kv_head(self) -> int:
        """Consecutive local queries that one local key/value head serves."""
        return math.gcd(self.heads // self.kv_heads, self.local_heads)

    @property
    def num_local_kv_heads(self) -> int:
        return self.local_heads // self.queries_per_kv_head

    def local_kv_heads(self, rank: int) -> tuple[int, ...]:
        """The key/value heads that a rank holds, by their index in the full model."""
        group = self.heads // self.kv_heads
        first = rank * self.local_heads
        return tuple((first + i * self.queries_per_kv_head) // group for i in range(self.num_local_kv_heads))

    def query_rows(self) -> RowLayout:
        return RowLayout.even(self.heads * self.head_dim, self.tp)

    def kv_rows(self) -> RowLayout:
        spans = tuple(self._kv_spans(rank, offset=0) for rank in range(self.tp))
        return RowLayout(0, self.kv_heads * self.head_dim, spans)

    def fused_rows(self) -> RowLayout:
        """The rows of a projection that stacks all queries, then all keys, then all values."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        spans = tuple(
            (*own, *self._kv_spans(rank, offset=queries), *self._kv_spans(rank, offset=queries + keys))
            for rank, own in enumerate(self.query_rows().spans)
        )
        return RowLayout(0, queries + 2 * keys, spans)

    def _kv_spans(self, rank: int, *, offset: int) -> tuple[Span, ...]:
        return tuple(
            (offset + head * self.head_dim, offset + (head + 1) * self.head_dim) for head in self.local_kv_heads(rank)
        )

    def local_attributes(self, attention: nn.Module) -> dict[str, int]:
        """The attributes of a stock attention module that count heads, with their local values."""
        local = {
            "num_heads": self.local_heads,
            "num_attention_heads": self.local_heads,
            "n_heads": self.local_heads,
            "num_key_value_heads": self.num_local_kv_heads,
            "num_kv_heads": self.num_local_kv_heads,
            "n_kv_heads": self.num_local_kv_heads,
            "num_key_value_groups": self.queries_per_kv_head,
            "n_rep": self.queries_per_kv_head,
        }
        own = vars(attention)
        return {name: value for name, value in local.items() if isinstance(own.get(name), int)}


def head_layout(attention: nn.Module, config: object, *, query_rows: int | None, tp: int) -> HeadLayout:
    """Read the heads of an attention block from the module, else from the model's config.

    Raises:
        PlanError: if neither tells the heads, or they do not match the projection.
    """

    def read(*names: str) -> int | None:
        for owner in (config, attention):
            for name in names:
                value = getattr(owner, name, None)
                if isinstance(value, int) and not isinstance(value, bool):
                    return value
        return None

    heads = read("num_attention_heads", "num_heads", "n_heads", "n_head")
    head_dim = getattr(attention, "head_dim", None) or read("head_dim")
    if head_dim is None and heads and query_rows:
        head_dim = query_rows // heads
    if heads is None and head_dim and query_rows:
        heads = query_rows // head_dim
    if not heads or not head_dim:
        raise PlanError(
            f"cannot tell the attention heads of {type(attention).__name__}: neither it nor the model's config "
            "has num_attention_heads (or num_heads) and head_dim"
        )
    if query_rows is not None and heads * head_dim != query_rows:
        raise PlanError(
            f"{type(attention).__name__}: {heads} heads of width {head_dim} do not make the {query_rows} rows "
            "of its query projection"
        )
    kv_heads = read("num_key_value_heads", "num_kv_heads", "n_kv_heads") or heads
    return HeadLayout(heads=heads, kv_heads=kv_heads, head_dim=head_dim, tp=tp)
