"""What the arguments of a forward call hold: which dim of each has the rows of the batch, and what a row has there."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import mode
from typing import Any

import torch
from torch import Tensor

from meshwright.containers import rebuilt
from meshwright.errors import PlanError
from meshwright.parallel.batch.items import BatchFormat, Items, RowDim, is_size, kind_of, says_of_items
from meshwright.parallel.batch.mean_over_ranks import TARGETS, without_targets

Batch = Mapping[str, object]  # the arguments by name

DECODED = "decoder_input_ids"  # the tokens of an encoder-decoder's decoder; the others are its encoder's
TOKENS = ("input_ids", "inputs_embeds")
PER_TOKEN = ("input_ids", "attention_mask", "position_ids", "token_type_ids", "special_tokens_mask")
# Arguments with the keys and values of earlier tokens; transformers 5.24 has the second name for the first.
CACHES = ("past_key_values", "cache")
# Arguments by which a program tells kernels where documents begin, in the row as it was.
BORDERS = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_LEFT_OUT = object()  # in place of an argument of rows without images


class BatchSchema:
    """Says of each argument of a forward call along which dim it has the batch's rows.

    ::

        [rows, ...]               tokens, labels, one image per row
        [3 or 4, rows, tokens]    positions in time, height and width
        [images, ...]             any number of images per row, which the rows' tokens tell; see ``Items``
        [patches, ...]            patches of these images, beside the images' sizes [images, 2 or 3] in patches
        [1, ..., patches]         these patches side by side in one wide image

    A list has a value for each row or for each image. Numbers, texts and tensors with one entry belong to each row.

    Args:
        batch: the arguments by name, which may be nested.
        format: what the arguments mean, as far as they do not show it.
    """

    def __init__(self, batch: Batch, format: BatchFormat | None = None):
        self.batch, self.format = batch, format or BatchFormat()
        tensors = {name: x for name, x in leaves(batch) if isinstance(x, Tensor) and x.ndim}
        dense = {name: x for name, x in tensors.items() if x.layout is torch.strided and not x.is_nested}
        self.tensors = dense or tensors  # a sparse tensor beside dense ones may describe the whole batch
        self.targets = next((tensors[name] for name in TARGETS if name in tensors), None)

    @property
    def tokens(self) -> Tensor:
        """The argument that has a token in each place, ``[rows, tokens, ...]``.

        Raises:
            PlanError: if the call has none.
        """
        for name in TOKENS:
            if name in self.tensors:
                return self.tensors[name]
        raise PlanError("the model was called without input_ids or inputs_embeds")

    @property
    def first(self) -> Tensor:
        """The tokens, or else another tensor of the call, such as the sound that an encoder hears."""
        return self.tokens if self.has_tokens or not self.tensors else next(iter(self.tensors.values()))

    @property
    def has_tokens(self) -> bool:
        return not self.tensors.keys().isdisjoint(TOKENS)

    @functools.cached_property
    def rows(self) -> int:
        """The number of rows: that of the targets, else of the tokens, else of most tensors."""
        if self.targets is not None or self.has_tokens:
            return (self.tokens if self.targets is None else self.targets).shape[0]
        return mode(x.shape[0] for x in self.tensors.values()) if self.tensors else 0

    @property
    def per_token(self) -> tuple[Tensor, ...]:
        """The tensors with a value for each token, ``[rows, tokens, ...]``."""
        if not self.has_tokens:
            return ()
        shape = self.tokens.shape[:2]
        return tuple(x for x in self.tensors.values() if x.shape[:2] == shape)

    @property
    def of_towers(self) -> list[str]:
        """The names of the inputs of towers, such as pixels: the real numbers that are not of tokens."""
        others = (*TOKENS, *TARGETS, *PER_TOKEN)
        return sorted(name for name, x in self.tensors.items() if x.is_floating_point() and name not in others)

    def towers_of_rows(self) -> str:
        """Return, for each kind of items, a digit for each row that says whether the row has some."""
        present = {kind: [int(x.has_some(i, i + 1)) for i in range(self.rows)] for kind, x in self.items.items()}
        return ", ".join(f"{kind} {''.join(map(str, rows))}" for kind, rows in present.items())

    @functools.cached_property
    def items(self) -> dict[str, Items]:
        """The images, videos and sounds of the batch, by kind."""
        inputs: dict[str, dict[str, Any]] = {}
        for name, x in self.batch.items():
            if (kind := kind_of(name)) is not None and self._may_be_of_items(name, x):
                inputs.setdefault(kind, {})[name] = x
        places = {kind: self._places(kind, inputs) for kind in inputs}
        for name, x in self.batch.items():  # sizes whose name does not say of what kind of items they are
            if kind_of(name) is None and says_of_items(name) and is_size(x) and self._may_be_of_items(name, x):
                measured = [kind for kind in inputs if Items(inputs[kind], places[kind], self.rows).measured_by(x)]
                for kind in measured if len(measured) == 1 else ():
                    inputs[kind][name] = x
        return {kind: Items(given, places[kind], self.rows) for kind, given in inputs.items()}

    def row_dim(self, name: str, x: Any) -> RowDim | None:
        """Return along which dim an argument has the rows, and where each begins; None if it has none, or is unknown.

        Args:
            name: the name of the argument.
            x: its value, a tensor or a list.
        """
        rows, length = self.rows, len(x)
        if name in self.format.dims:
            return self._described(name, x)
        if isinstance(x, Tensor) and self._is_of_tokens(x) and (length != rows or name == "position_ids"):
            return 1, range(rows + 1)
        if self._may_be_of_items(name, x):
            own = kind_of(name)
            if own in self.items and isinstance(x, Tensor) and (packed := self.items[own].packed(x)) is not None:
                return packed
            kinds = [kind for kind in self.items if own in (None, kind)]
            # An argument without the name of a kind may have a value for each row instead.
            kinds = kinds if own or length != rows or says_of_items(name) else []
            found = [starts for kind in kinds if (starts := self.items[kind].starts(length)) is not None]
            if found and all(list(starts) == list(found[0]) for starts in found):
                return 0, found[0]
            if found or (own in self.items and length == rows == self.items[own].count):
                return None
        return (0, range(rows + 1)) if length == rows else None

    def part(self, own: slice, take: Callable[[Tensor, slice], Tensor] | None = None) -> dict[str, Any]:
        """Return the arguments of some rows, without those of images that these rows do not have.

        Args:
            own: the rows.
            take: a function that returns these rows of a tensor that is not dense; None if there must be none.

        Raises:
            PlanError: if an argument has something else than rows, so that its part is unknown.
        """
        if (own.start, own.stop) == (0, self.rows):
            return dict(self.batch)
        parts = {name: self._part(name, x, own, take) for name, x in self.batch.items()}
        return {name: x for name, x in parts.items() if x is not _LEFT_OUT}

    def without_rows(self) -> list[str]:
        """Return the names of the tensors whose parts do not have the rows along their first dim."""
        dims = {name: self.row_dim(name, x) for name, x in self.tensors.items()}
        rows = (0, list(range(self.rows + 1)))
        return [name for name, dim in dims.items() if dim is not None and (dim[0], list(dim[1])) != rows]

    def row_counts(self, count: int) -> list[int]:
        """Return the number of rows of each of ``count`` micro-batches."""
        rows = self.rows
        return [(i + 1) * rows // count - i * rows // count for i in range(count)]

    def split(self, count: int) -> list[dict[str, object]]:
        """Return the arguments of each micro-batch. One without rows gets a row that no loss counts.

        Args:
            count: the number of micro-batches.

        Raises:
            PlanError: if an argument has something else than rows, so that its part of each micro-batch is unknown.
        """
        rows = self.rows
        if count == 1 and rows:
            return [dict(self.batch)]
        pieces = []
        for low, high in pairwise([0, *accumulate(self.row_counts(count))]):
            piece = self.part(slice(low, min(max(high, low + 1), rows)))
            pieces.append(without_targets(piece) if low == high else piece)
        return pieces

    def twice(self) -> dict[str, Any]:
        """Return the arguments of the rows, each twice; those that do not show their rows stay as they are."""
        return {name: self._twice(name, x) for name, x in self.batch.items()}

    def _twice(self, name: str, x: Any) -> Any:
        if isinstance(x, Mapping) and name not in self.format.dims:
            return {key: self._twice(f"{name}.{key}", item) for key, item in x.items()}
        if isinstance(x, list | tuple) and name not in self.format.dims and self._is_nested(name, x):
            return rebuilt(x, [self._twice(f"{name}.{i}", item) for i, item in enumerate(x)])
        if not isinstance(x, list | tuple) and not (isinstance(x, Tensor) and x.ndim):
            return x
        dim = self.row_dim(name, x) if len(x) else None
        if dim is None:
            return x
        return torch.cat([x, x], dim=dim[0]) if isinstance(x, Tensor) else [*x, *x]

    def _part(self, name: str, x: Any, own: slice, take: Callable[[Tensor, slice], Tensor] | None) -> Any:
        is_described = name in self.format.dims
        if isinstance(x, Mapping) and not is_described:
            return {key: self._part(f"{name}.{key}", item, own, take) for key, item in x.items()}
        if isinstance(x, list | tuple) and not is_described and self._is_nested(name, x):
            return rebuilt(x, [self._part(f"{name}.{i}", item, own, take) for i, item in enumerate(x)])
        is_tensor = isinstance(x, Tensor)
        if not ((is_tensor and x.ndim) or isinstance(x, list | tuple)) or not len(x):
            return x
        is_dense = not is_tensor or name in self.tensors
        if not is_dense and take is not None:
            return take(x, own) if len(x) == self.rows else x
        if name in BORDERS and is_tensor and x.ndim == 1:
            raise PlanError(
                f"{name} counts the documents of all {self.rows} rows of a batch, which are cut into parts here. Leave "
                "it out, and give position_ids that begin anew for each document"
            )
        dim = self.row_dim(name, x) if is_dense else None
        if dim is None:
            if self._is_of_every_row(name, x):
                return x
            raise PlanError(self._refusal(name, x))
        along, starts = dim
        first, last = starts[own.start], starts[own.stop]
        kind, is_empty = kind_of(name), own.start == own.stop
        has_some = kind not in self.items or self.items[kind].has_some(own.start, own.stop)
        if name in self.batch and not is_empty and (first == last or not has_some):
            return _LEFT_OUT
        return x.narrow(along, first, last - first) if is_tensor else x[first:last]

    def _is_of_every_row(self, name: str, x: Any) -> bool:
        """Return whether an argument without rows is known to be one that each row needs."""
        if name in self.format.dims:
            return self.format.dims[name] is None
        if isinstance(x, Tensor):
            is_of_positions = x.ndim == 1 and self.has_tokens and len(x) == self.tokens.shape[1]
            items = self.items.get(kind_of(name) or "")
            is_of_several = items is not None and x.is_floating_point() and items.are_several
            return (len(x) == 1 and not is_of_several) or is_of_positions
        return kind_of(name) is None and next(tensors_of(x), None) is None  # a plain list may be anything

    def _is_nested(self, name: str, x: Sequence[Any]) -> bool:
        """Return whether a list holds tensors that have the rows, rather than a value for each row."""
        inner = list(tensors_of(x))
        return bool(inner) and kind_of(name) is None and all(leaf.ndim and len(leaf) == self.rows for leaf in inner)

    def _may_be_of_items(self, name: str, x: Any) -> bool:
        if name in self.format.dims or name in (*TOKENS, *TARGETS, *PER_TOKEN):
            return False
        if isinstance(x, Tensor):
            is_dense = x.layout is torch.strided and not x.is_nested
            is_per_token = self.has_tokens and x.ndim < 4 and x.shape[:2] == self.tokens.shape[:2]
            is_per_token &= not says_of_items(name)
            return is_dense and x.ndim > 0 and len(x) > 0 and not is_per_token
        return isinstance(x, list | tuple) and len(x) > 0

    def _is_of_tokens(self, x: Tensor) -> bool:
        return self.has_tokens and not x.is_floating_point() and x.shape[1:] == self.tokens.shape[:2]

    def _places(self, kind: str, inputs: Mapping[str, object]) -> Tensor | None:
        """Return the places of a kind's placeholders, or those of kinds without inputs if there are none of its own."""
        own = self.format.places(self.batch, kind)
        if own is not None and bool(own.any()):
            return own
        others = [other for other in self.format.placeholders if other != kind and other not in inputs]
        found = [places for other in others if (places := self.format.places(self.batch, other)) is not None]
        return functools.reduce(torch.logical_or, found) if found else own

    def _described(self, name: str, x: Any) -> RowDim | None:
        """Return where the rows begin in an argument that the program has described."""
        dim, rows = self.format.dims[name], self.rows
        if dim is None:
            return None
        if isinstance(dim, int):
            sizes = x.shape if isinstance(x, Tensor) else (len(x),)
            if not -len(sizes) <= dim < len(sizes) or sizes[dim] != rows:
                raise PlanError(
                    f"ToDistributedConfig(batch_dims={{{name!r}: {dim}}}) names the dim of {name} that has the rows, "
                    f"but its shape is {tuple(sizes)} in a batch of {rows} rows"
                )
            return dim % len(sizes), range(rows + 1)
        counts = [int(n) for n in dim(self.batch)]
        if len(counts) != rows or sum(counts) != len(x) or min(counts, default=0) < 0:
            raise PlanError(
                f"the function of ToDistributedConfig(batch_dims={{{name!r}: ...}}) must return how many entries of "
                f"{name} each row has, {rows} numbers with the sum {len(x)}, but it returned {counts}"
            )
        return 0, [0, *accumulate(counts)]

    def _refusal(self, name: str, x: Any) -> str:
        if isinstance(x, Tensor):
            form = "rows of several lengths" if x.is_nested else f"shape {tuple(x.shape)}"
        else:
            form = f"{len(x)} values"
        return (
            f"{name} has {form} in a batch of {self.rows} rows, so it is not known which part of it belongs to which "
            "row. Give each row one image, or placeholder tokens for each of its images; or say it: "
            f"ToDistributedConfig(batch_dims={{{name!r}: lambda batch: [...]}}) with the number of its entries of each "
            "row, or in place of the function the dim that has the rows, or None for what belongs to every row"
        )


def leaves(value: object, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of everything in a structure that is not a container."""
    if isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from leaves(item, f"{name}.{key}".lstrip("."))
    else:
        yield name or "batch", value


def tensors_of(value: object) -> Iterator[Tensor]:
    """Yield the tensors of a structure."""
    return (leaf for _, leaf in leaves(value) if isinstance(leaf, Tensor))


def example(signature: inspect.Signature, *, rows: int, length: int, source: int | None = None) -> dict[str, object]:
    """Return a batch of tokens alone, with the masks, positions and labels that a forward requires and without a cache.

    Args:
        signature: the signature of forward.
        rows: the number of rows.
        length: the number of tokens in each row.
        source: for an encoder-decoder, the number of tokens that its encoder gets; ``length`` are then its decoder's.
            None to give its encoder ``length`` tokens and its decoder none.
    """
    required = [
        name
        for name, x in signature.parameters.items()
        if x.default is x.empty and (name in (*PER_TOKEN, "labels") or name.endswith("_input_ids"))
    ]
    optional: dict[str, object] = {"use_cache": False}
    if source is not None and DECODED in signature.parameters:
        optional[DECODED], length = torch.zeros(rows, length, dtype=torch.int64), source
    optional["input_ids"] = torch.zeros(rows, length, dtype=torch.int64)
    batch: dict[str, object] = {name: torch.full((rows, length), int("mask" in name)) for name in required}
    return {**batch, **{name: x for name, x in optional.items() if name in signature.parameters}}
