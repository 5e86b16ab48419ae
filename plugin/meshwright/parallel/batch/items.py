"""Tells which images, videos and sounds of a batch belong to which row, by the tokens that their features replace.

A processor lists the items of all rows one after the other, and a tensor has an entry for each item or for each of its
patches. The rows have a placeholder token for each feature of their items::

    placeholders of the rows    8, 0, 4
    sizes [3, 3] in patches     1 x 4 x 4, 1 x 4 x 4, 1 x 4 x 4: 48 patches for 12 tokens, so a token has 4
    the rows' items             2, 0, 1; and of the patches [48, ...] 32, 0, 16
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeGuard

import torch
from torch import Tensor

from meshwright.plan.config import RowsOf

RowDim = tuple[int, Sequence[int]]  # a dim, and where each row begins along it, and the last one ends

_WORDS = {"video": ("video",), "image": ("image", "pixel"), "audio": ("audio", "feature", "speech")}
_TYPES = {"image": 1, "video": 2, "audio": 3}  # of tokens, in ``mm_token_type_ids``
# Parts of names of what is said of items, of their patches or of their frames, and not of tokens or rows.
_OF_ITEMS = ("grid", "patch", "tile", "crop", "frame", "vision", "size", "shape", "pixel", "feature")


def kind_of(name: str) -> str | None:
    """Return which kind of items an argument describes by its name: images, videos or sounds; None if none."""
    return next((kind for kind, words in _WORDS.items() if any(word in name for word in words)), None)


@dataclass(frozen=True, kw_only=True)
class BatchFormat:
    """What the arguments of a model's forward mean, as far as they do not show it.

    Args:
        placeholders: the token in whose places the features of an item go, for each kind of items.
        dims: what the program says of its arguments; see ``ToDistributedConfig.batch_dims``.
    """

    placeholders: Mapping[str, int] = field(default_factory=dict)
    dims: Mapping[str, RowsOf] = field(default_factory=dict)

    @staticmethod
    def of(config: object, dims: Mapping[str, RowsOf] | None = None) -> BatchFormat:
        """Return the format of a model's arguments.

        Args:
            config: the model's configuration, which names its placeholders.
            dims: what the program says of its arguments.
        """
        found = {}
        for kind in _WORDS:
            named = [getattr(config, f"{kind}_token_{end}", None) for end in ("id", "index")]
            if tokens := [token for token in named if isinstance(token, int)]:
                found[kind] = tokens[0]
        return BatchFormat(placeholders=found, dims=dims or {})

    def places(self, batch: Mapping[str, object], kind: str) -> Tensor | None:
        """Return where the rows have placeholders of a kind, ``[rows, tokens]``; None if that is unknown."""
        ids, types = batch.get("input_ids"), batch.get("mm_token_type_ids")
        if kind in self.placeholders and isinstance(ids, Tensor):
            return ids == self.placeholders[kind]
        return types == _TYPES[kind] if isinstance(types, Tensor) else None


class Items:
    """The items of one kind in a batch.

    Args:
        inputs: the arguments that describe the items, each with an entry along its first dim for each item, for each
            of their patches, or for each row.
        places: where the rows have placeholders, ``[rows, tokens]``; None if that is unknown.
        rows: the number of rows.
    """

    def __init__(self, inputs: Mapping[str, Any], places: Tensor | None, rows: int):
        self.inputs, self.places, self.rows = inputs, places, rows
        self._sizes = [x for x in inputs.values() if is_size(x)]
        self._values = [x for x in inputs.values() if not isinstance(x, Tensor) or x.is_floating_point()]
        self.count = len(next(iter([*self._sizes, *self._values, *inputs.values()])))

    @functools.cached_property
    def of_row(self) -> list[int] | None:
        """The number of placeholders of each row; None if that is unknown, or no row has any."""
        found: list[int] = [] if self.places is None else self.places.sum(1).tolist()
        return found if any(found) else None

    @functools.cached_property
    def _ends(self) -> list[list[int]]:
        """For each input with sizes: where each item begins in the patches of all, and the last one ends."""
        return [[0, *accumulate(sizes.prod(-1).tolist())] for sizes in self._sizes if len(sizes) == self.count]

    def measured_by(self, sizes: Tensor) -> bool:
        """Return whether sizes in patches are those of the items: an input has as many patches, or as many items."""
        patches = int(sizes.prod(-1).sum())
        of_items = (x for x in self.inputs.values() if isinstance(x, Tensor) and x.is_floating_point())
        return not self._sizes and any(len(x) in (len(sizes), patches) or _row_of(x, patches) for x in of_items)

    def packed(self, x: Tensor) -> RowDim | None:
        """Return where each row begins in the patches of all items, side by side in one entry; None if it has none.

        ::

            sizes [2, 2] in patches of 14    pixel_values [1, 3, 14, 14 * patches]
        """
        if len(x) != 1 or (items := self.of_items) is None:
            return None
        found = next((ends for ends in self._ends if _row_of(x, ends[-1])), None)
        return None if found is None else (x.ndim - 1, [found[item] * x.shape[-2] for item in items])

    def starts(self, length: int) -> Sequence[int] | None:
        """Return where each row begins in an argument with ``length`` entries; None if that is unknown."""
        items = self.of_items
        if items is None or length == self.count:
            return items
        found = next((ends for ends in self._ends if ends[-1] == length), None)
        return None if found is None else [found[item] for item in items]

    @functools.cached_property
    def of_items(self) -> Sequence[int] | None:
        """Where each row begins in the list of items, and the last one ends; None if that is unknown."""
        if self.count == self.rows and self._is_by_row():
            return range(self.rows + 1)
        return next(filter(None, self._guesses()), None)

    @property
    def are_several(self) -> bool:
        """Return whether there are several items, or several rows with placeholders, in one entry or more."""
        return self.count > 1 or (self.of_row is not None and sum(map(bool, self.of_row)) > 1)

    def has_some(self, low: int, high: int) -> bool:
        """Return whether the rows from ``low`` to ``high - 1`` have items."""
        if self.of_row is not None:
            return any(self.of_row[low:high])
        return self.of_items is None or self.of_items[low] < self.of_items[high]

    def _is_by_row(self) -> bool:
        """Return whether as many items as rows are one in each row, or blank in the rows that have none."""
        if self.of_row is None or all(self.of_row):
            return True
        without = [row for row, tokens in enumerate(self.of_row) if not tokens]
        values = [x for x in self._values if len(x) == self.rows]
        return bool(values) and all(_is_blank(x[row]) for x in values for row in without)

    def _guesses(self) -> Iterator[list[int] | None]:
        """Yield what the arguments show; a guess counts if no row begins inside of an item."""
        if self.of_row is None:
            return
        for x in self.inputs.values():  # how many items each row has
            is_count = isinstance(x, Tensor) and x.ndim == 1 and not x.is_floating_point() and len(x) == self.rows
            if is_count and int(x.sum()) == self.count:
                ends = [0, *accumulate(x.tolist())]
                yield ends if all((n > 0) == (t > 0) for n, t in zip(x.tolist(), self.of_row, strict=True)) else None
        yield from map(self._in_proportion, self._ends)
        if self._are_alike():
            yield self._in_proportion(range(self.count + 1))
        assert self.places is not None
        begins = self.places & ~torch.nn.functional.pad(self.places, (1, 0))[:, :-1]
        runs = [0, *accumulate(begins.sum(1).tolist())]
        yield runs if runs[-1] == self.count else None

    def _in_proportion(self, ends: Sequence[int]) -> list[int] | None:
        """Return where each row begins if items have tokens in proportion to their patches, which end at ``ends``."""
        assert self.of_row is not None
        total, tokens = ends[-1], sum(self.of_row)
        items = {end * tokens: item for item, end in enumerate(ends)}
        found = [items.get(end * total) for end in [0, *accumulate(self.of_row)]]
        return None if None in found else [item for item in found if item is not None]

    def _are_alike(self) -> bool:
        """Return whether nothing tells the items apart, such as sizes or masks, so that all have as many features."""
        others = [x for x in self.inputs.values() if isinstance(x, Tensor) and not x.is_floating_point()]
        return all(bool((x == x[:1]).all()) for x in others if len(x) == self.count)


def says_of_items(name: str) -> bool:
    """Return whether the name of an argument says that it has a value for each item, rather than each token or row."""
    return any(word in name for word in _OF_ITEMS)


def is_size(x: object) -> TypeGuard[Tensor]:
    """Return whether an argument may be the sizes of items in patches, ``[items, 2 or 3]``."""
    if not isinstance(x, Tensor) or x.ndim != 2:
        return False
    return x.shape[1] in (2, 3) and x.dtype in (torch.int32, torch.int64)


def _row_of(x: Tensor, patches: int) -> bool:
    """Return whether a tensor with one entry is this number of square patches in a row."""
    return x.ndim > 3 and len(x) == 1 and patches > 0 and x.shape[-1] == patches * x.shape[-2]


def _is_blank(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not bool(value.any())
    return value is None or (isinstance(value, Sequence) and all(map(_is_blank, value)))
