"""How attention heads are divided over the ranks of the TP axis, replicated key/value heads included."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from meshwright.errors import PlanError
from meshwright.layout.row_layout import RowLayout

HeadRun = tuple[int, int]  # the first of some consecutive heads, and their number


@dataclass(frozen=True, kw_only=True)
class HeadLayout:
    """The heads of one attention block over ``tp`` ranks.

    Each rank gets the same number of consecutive query heads and the key/value heads that these use. If
    the key/value heads are not evenly divisible, several ranks hold the same one (or one rank holds it
    twice). Each local key/value head then serves the same number of consecutive local query heads, and
    the stock attention code runs unchanged on the local heads.

    Args:
        heads: the number of query heads of the full model.
        kv_heads: the number of key/value heads of the full model, a divisor of ``heads``.
        head_dim: the width of a head.
        tp: the size of the TP axis, a divisor of ``heads``.

    Example:
        Six query heads in three groups over two ranks. Rank 1 has heads 3, 4 and 5, which belong to groups 1, 2 and 2:

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
        """The number of query heads per rank."""
        return self.heads // self.tp

    @property
    def queries_per_kv_head(self) -> int:
        """The number of consecutive local query heads that one local key/value head serves."""
        return math.gcd(self.heads // self.kv_heads, self.local_heads)

    @property
    def num_local_kv_heads(self) -> int:
        return self.local_heads // self.queries_per_kv_head

    def local_kv_heads(self, rank: int) -> tuple[int, ...]:
        """Return the key/value heads that a rank holds, by their index in the full model."""
        group = self.heads // self.kv_heads
        first = rank * self.local_heads
        return tuple((first + i * self.queries_per_kv_head) // group for i in range(self.num_local_kv_heads))

    def query_rows(self) -> RowLayout:
        return RowLayout.even(self.heads * self.head_dim, self.tp)

    def kv_rows(self, width: int | None = None) -> RowLayout:
        """Return the layout of the rows of the keys or values: ``width`` rows of each head, by default its own."""
        return self._rows(self.kv_heads, lambda rank: ((head, 1) for head in self.local_kv_heads(rank)), width)

    def rows_per_head(self, size: int) -> RowLayout:
        """Return the layout of ``size`` rows that belong to the query heads in their order, equally many to each."""
        return RowLayout.even(max(size // self.heads, 1) * self.heads, self.tp)

    def fused_rows(self) -> RowLayout:
        """Return the layout of a projection that stacks all queries, then all keys, then all values."""

        def runs(rank: int) -> Iterator[HeadRun]:
            yield rank * self.local_heads, self.local_heads
            for first in (self.heads, self.heads + self.kv_heads):
                yield from ((first + head, 1) for head in self.local_kv_heads(rank))

        return self._rows(self.heads + 2 * self.kv_heads, runs)

    def grouped_rows(self) -> RowLayout:
        """Return the layout of a projection that stacks, for each key head, its queries, its key and its value."""
        group = self.heads // self.kv_heads

        def runs(rank: int) -> Iterator[HeadRun]:
            for i, kv_head in enumerate(self.local_kv_heads(rank)):
                first = rank * self.local_heads + i * self.queries_per_kv_head
                yield kv_head * (group + 2) + first % group, self.queries_per_kv_head
                yield kv_head * (group + 2) + group, 2

        return self._rows(self.heads + 2 * self.kv_heads, runs)

    def rows_in_four(self) -> RowLayout:
        """Return the layout of a projection in four parts, each a quarter of the queries, then values, then keys.

        The model's code splits the local rows in four again, so the heads per rank must be a multiple of four.
        """
        if self.kv_heads != self.heads:
            raise PlanError(
                f"a projection in four parts needs as many key/value heads as query heads, but there are "
                f"{self.kv_heads} key/value heads and {self.heads} query heads. Give the projection another role in "
                "ToDistributedConfig.sharding_plan, or use ParallelPlan(tp=1)"
            )
        if self.local_heads % 4:
            raise PlanError(
                f"a projection in four parts needs a multiple of 4 heads on each rank, but there are "
                f"{self.heads} heads and tp={self.tp}. Change ParallelPlan.tp"
            )
        own, quarter = self.local_heads // 4, self.heads // 4

        def runs(rank: int) -> Iterator[HeadRun]:
            for first in range(rank * self.local_heads, (rank + 1) * self.local_heads, own):
                for kind in range(3):
                    for head in range(first, first + own):
                        yield (head // quarter * 3 + kind) * quarter + head % quarter, 1

        return self._rows(3 * self.heads, runs)

    def _rows(self, heads: int, runs: Callable[[int], Iterable[HeadRun]], width: int | None = None) -> RowLayout:
        """Return the layout of the rows of ``heads`` heads, from the runs of heads that each rank holds."""
        width = width or self.head_dim
        spans = (tuple((n * width, (n + k) * width) for n, k in runs(rank)) for rank in range(self.tp))
        return RowLayout(0, heads * width, tuple(spans))

    def take_heads(self, x: Tensor, rank: int, dim: int = 0) -> Tensor:
        """Return a rank's part of a tensor whose ``dim`` runs over query heads, or over batch times query heads."""
        by_head = x.unflatten(dim, (-1, self.heads))
        result: Tensor = by_head.narrow(dim + 1, rank * self.local_heads, self.local_heads).flatten(dim, dim + 1)
        return result

    def local_attributes(self, attention: nn.Module) -> dict[str, int]:
        """Return the local values of a stock attention module's attributes that count heads or their width, by name.

        Raises:
            PlanError: if a count does not match the projections, since how the module uses the count is then unknown.
        """
        local, own = {}, vars(attention)
        for names, value, local_value in (
            (QUERY_HEADS, self.heads, self.local_heads),
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
                        "tensor parallelism cannot tell what this number counts. Correct it, or use ParallelPlan(tp=1)"
                    )
                local[name] = local_value
        return local


QUERY_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")
_GROUPS = ("num_key_value_groups", "n_rep")
_QUERY_WIDTHS = ("embed_dim", "split_size", "all_head_size")
_KEY_WIDTHS = ("kv_dim",)
_HEAD_WIDTHS = ("v_head_dim", "head_dim", "head_size", "attention_head_size", "dim_head", "depth")


def head_layout(attention: nn.Module, config: object, *, query_width: int, kv_width: int, tp: int) -> HeadLayout:
    """Return the head layout of an attention module.

    The width of a head is read from the module or else from the model's config. The number of heads follows from it and
    from the widths of the projections.

    Args:
        attention: the attention module.
        config: the model's config.
        query_width: the number of columns of the output projection.
        kv_width: the number of weight rows that compute the keys.
        tp: the size of the TP axis.

    Raises:
        PlanError: if the head width is unknown, or the projections' widths are not multiples of it.
    """
    head_dim = _read(attention, _HEAD_WIDTHS)
    for owner in (attention, config):
        if head_dim is None and (heads := _read(owner, QUERY_HEADS)):
            head_dim = query_width // heads
        head_dim = head_dim or _read(owner, _HEAD_WIDTHS)
    if not head_dim:
        raise PlanError(
            f"cannot tell the number of attention heads of {type(attention).__name__}: neither the module nor the "
            "model's config has num_attention_heads (or num_heads) or head_dim. Set config.num_attention_heads"
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
