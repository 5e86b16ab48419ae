"""How attention heads are divided over the ranks of the TP axis, replicated key/value heads included."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from meshwright.errors import PlanError
from meshwright.parallel.row_layout import RowLayout, Span


@dataclass(frozen=True, kw_only=True)
class HeadLayout:
    """The heads of one attention block over ``tp`` ranks.

    Each rank gets an equal run of query heads and the key/value heads that they use. If those do not
    divide evenly, several ranks hold the same head (or one rank holds it twice), so that each local
    key/value head serves the same number of consecutive local query heads. The stock attention code
    then runs unchanged on the local heads.

    Args:
        heads: the number of query heads of the full model.
        kv_heads: the number of key/value heads of the full model; it divides ``heads``.
        head_dim: the width of a head.
        tp: the size of the TP axis; it divides ``heads``.

    Example:
        Six query heads in three groups over two ranks. Rank 1 has heads 3, 4 and 5, of groups 1, 2 and 2:

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
        """The number of query heads of a rank."""
        return self.heads // self.tp

    @property
    def queries_per_kv_head(self) -> int:
        """The number of consecutive local query heads that one local key/value head serves."""
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

    def grouped_rows(self) -> RowLayout:
        """The rows of a projection that stacks, for each key head, its queries, its key and its value."""
        group = self.heads // self.kv_heads

        def spans(rank: int) -> Iterator[Span]:
            for i, kv_head in enumerate(self.local_kv_heads(rank)):
                first = rank * self.local_heads + i * self.queries_per_kv_head
                query = kv_head * (group + 2) + first % group
                yield self._span(query, self.queries_per_kv_head)
                yield self._span(kv_head * (group + 2) + group, 2)

        size = (self.heads + 2 * self.kv_heads) * self.head_dim
        return RowLayout(0, size, tuple(tuple(spans(rank)) for rank in range(self.tp)))

    def rows_in_four(self) -> RowLayout:
        """The rows of a projection of four parts; each stacks a quarter of the queries, of the values, of the keys.

        The model's code splits the local rows in four again, so each rank's number of heads must divide by four.
        """
        if self.kv_heads != self.heads:
            raise PlanError(
                f"a projection in four parts needs as many key/value heads as query heads, not {self.kv_heads} for "
                f"{self.heads}; give it another role in ToDistributedConfig.sharding_plan, or use ParallelPlan(tp=1)"
            )
        if self.local_heads % 4:
            raise PlanError(
                f"a projection in four parts needs a multiple of 4 heads on each rank, not {self.heads} heads over "
                f"tp={self.tp}; change ParallelPlan.tp"
            )
        own, quarter = self.local_heads // 4, self.heads // 4

        def spans(rank: int) -> Iterator[Span]:
            for first in range(rank * self.local_heads, (rank + 1) * self.local_heads, own):
                for kind in range(3):
                    for head in range(first, first + own):
                        yield self._span((head // quarter * 3 + kind) * quarter + head % quarter, 1)

        return RowLayout(0, 3 * self.heads * self.head_dim, tuple(tuple(spans(rank)) for rank in range(self.tp)))

    def _kv_spans(self, rank: int, *, offset: int) -> tuple[Span, ...]:
        return tuple(
            (offset + head * self.head_dim, offset + (head + 1) * self.head_dim) for head in self.local_kv_heads(rank)
        )

    def _span(self, first_head: int, count: int) -> Span:
        return first_head * self.head_dim, (first_head + count) * self.head_dim

    def take_heads(self, x: Tensor, rank: int, dim: int = 0) -> Tensor:
        """Return a rank's part of a tensor whose ``dim`` runs over query heads, or over batch times query heads."""
        by_head = x.unflatten(dim, (-1, self.heads))
        result: Tensor = by_head.narrow(dim + 1, rank * self.local_heads, self.local_heads).flatten(dim, dim + 1)
        return result

    def local_attributes(self, attention: nn.Module) -> dict[str, int]:
        """The attributes of a stock attention module that count heads or their width, with their local values.

        Raises:
            PlanError: if a count does not match the projections, since what the module does with it is unknown.
        """
        local, own = {}, vars(attention)
        for names, value, local_value in (
            (_QUERY_HEADS, self.heads, self.local_heads),
            (_KEY_HEADS, self.kv_heads, self.num_local_kv_heads),
            (_GROUPS, self.heads // self.kv_heads, self.queries_per_kv_head),
            (_QUERY_WIDTHS, self.heads * self.head_dim, self.local_heads * self.head_dim),
            (_KEY_WIDTHS, self.kv_heads * self.head_dim, self.num_local_kv_heads * self.head_dim),
        ):
            for name in names:
                if not _is_count(own.get(name)):
                    continue
                if own[name] != value:
                    raise PlanError(
                        f"{type(attention).__name__}.{name} is {own[name]}, but its projections imply {value}, so "
                        "tensor parallelism cannot tell what it counts. Correct it, or use ParallelPlan(tp=1)"
                    )
                local[name] = local_value
        return local


_QUERY_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")
_GROUPS = ("num_key_value_groups", "n_rep")
_QUERY_WIDTHS = ("embed_dim", "split_size", "all_head_size")
_KEY_WIDTHS = ("kv_dim",)
_HEAD_WIDTHS = ("v_head_dim", "head_dim", "head_size", "attention_head_size", "dim_head", "depth")


def head_layout(attention: nn.Module, config: object, *, query_width: int, kv_width: int, tp: int) -> HeadLayout:
    """Read the width of a head from the module, else from the model's config, and count the heads in the widths.

    Args:
        attention: the attention module.
        config: the model's config.
        query_width: the number of columns of the output projection.
        kv_width: the number of rows that make the keys.
        tp: the size of the TP axis.

    Raises:
        PlanError: if neither gives the number or width of the heads, or they do not match the projections.
    """
    head_dim = _read(attention, _HEAD_WIDTHS)
    for owner in (attention, config):
        if head_dim is None and (heads := _read(owner, _QUERY_HEADS)):
            head_dim = query_width // heads
        head_dim = head_dim or _read(owner, _HEAD_WIDTHS)
    if not head_dim:
        raise PlanError(
            f"cannot tell the attention heads of {type(attention).__name__}: neither it nor the model's config "
            "has num_attention_heads (or num_heads) or head_dim. Set config.num_attention_heads"
        )
    if query_width % head_dim or kv_width % head_dim:
        raise PlanError(
            f"{type(attention).__name__}: the head width {head_dim} must divide the {query_width} columns of its "
            f"output projection and the {kv_width} rows of its keys"
        )
    return HeadLayout(heads=query_width // head_dim, kv_heads=kv_width // head_dim, head_dim=head_dim, tp=tp)


def _read(owner: object, names: tuple[str, ...]) -> int | None:
    return next((value for name in names if _is_count(value := getattr(owner, name, None))), None)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
