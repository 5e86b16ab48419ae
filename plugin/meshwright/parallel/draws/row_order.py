"""Whether a dim with several entries for each row has one row after the other, as operations of a pass show it.

Passes without values run the same operations on batches of several sizes. A dim is known in them by its sizes: that of
56, 112 and 52 entries has 4, 8 and 4 rows of 14, 14 and 13 tokens. A view that makes it of dims shows their order, or
that makes dims of it. What indexes, joins or repeats entries may change it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_aten = torch.ops.aten
_VIEWS = frozenset({_aten.view.default, _aten._unsafe_view.default, _aten._reshape_alias.default})
# What has entries that are all equal, or none of its argument's.
_EQUAL = frozenset(
    {_aten.expand.default, _aten.new_empty.default, _aten.new_zeros.default, _aten.new_ones.default}
    | {_aten.new_full.default, _aten.new_empty_strided.default}
)
# What may have the entries of its argument in another order, along the dim that it is given, or along any.
_MOVING_ALONG = frozenset(
    {_aten.gather.default, _aten.index_select.default, _aten.sort.default, _aten.sort.stable, _aten.argsort.default}
)
_MOVING = frozenset({_aten.index.Tensor, _aten.flip.default, _aten.roll.default})

Shape = tuple[int, ...]
Sizes = tuple[int, ...]  # of a dim in each of the passes


class SeenOperation(NamedTuple):
    """An operation of a pass, with the shapes of its arguments and of its first result.

    Args:
        function: what ran.
        given: the shapes of its tensors.
        made: the shape of its first result.
        along: the dim along which it moves entries; None if it is not of those that move them along one.
    """

    function: Any
    given: tuple[Shape, ...]
    made: Shape
    along: int | None = None

    @classmethod
    def of(cls, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> SeenOperation:
        """Return what is kept of an operation."""
        given = []
        for x in args:
            given += [tuple(y.shape) for y in (x if isinstance(x, list | tuple) else (x,)) if isinstance(y, Tensor)]
        first = result[0] if isinstance(result, list | tuple) and result else result
        made = tuple(first.shape) if isinstance(first, Tensor) else ()
        along = kwargs.get("dim", args[1] if len(args) > 1 else -1) if function in _MOVING_ALONG and made else None
        return cls(function, tuple(given), made, along)


def has_rows_first(sizes: Sizes, rows: Sizes, passes: Sequence[Sequence[SeenOperation]]) -> bool:
    """Return whether all entries of a row come before those of the next one, as far as operations show it.

    Args:
        sizes: the sizes of the dim in each pass.
        rows: the number of rows in each pass.
        passes: the operations of each pass.
    """
    if len({len(operations) for operations in passes}) > 1:
        return False
    is_shown = False
    for of_passes in zip(*passes, strict=True):
        function, given, _, along = of_passes[0]
        if any(other.function is not function or len(other.given) != len(given) for other in of_passes):
            return False
        made = _dims(tuple(operation.made for operation in of_passes))
        before = [_dims(tuple(operation.given[i] for operation in of_passes)) for i in range(len(given))]
        is_given = any(sizes in dims for dims in before)
        if function in _VIEWS:
            for pair in _groups(before[0], made):
                single, several = sorted(pair, key=len)
                if single == [sizes] and len(several) > 1:
                    if several[0] != rows:
                        return False
                    is_shown = True
        elif sizes in made:
            is_born = bool(given) and not is_given and function not in _EQUAL
            if is_born or function in _MOVING or (along is not None and made[along] == sizes):
                return False
    return is_shown


def _dims(shapes: tuple[Shape, ...]) -> list[Sizes]:
    """Return the sizes of each dim; none if the numbers of dims differ."""
    return list(zip(*shapes, strict=True)) if len({len(shape) for shape in shapes}) == 1 else []


def _groups(before: list[Sizes], after: list[Sizes]) -> Iterator[tuple[list[Sizes], list[Sizes]]]:
    """Yield the dims of a view that become others, the fewest at a time, without those of one entry."""
    left, right = ([dim for dim in dims if any(size != 1 for size in dim)] for dims in (before, after))
    while left and right:
        one, other = [left.pop(0)], [right.pop(0)]
        while (sizes := _product(one)) != (wanted := _product(other)):
            source, group = (left, one) if sizes < wanted else (right, other)
            if not source:
                return
            group.append(source.pop(0))
        yield one, other


def _product(dims: list[Sizes]) -> Sizes:
    return tuple(math.prod(sizes) for sizes in zip(*dims, strict=True))
