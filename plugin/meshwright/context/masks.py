"""The mask of one forward pass as a function of places, and its cut into blocks that need no mask.

Blocks of it are materialised when needed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshwright.errors import PlanError
from meshwright.parallel.sequence_parts import SequenceParts, TokenRun
from meshwright.plan.parts import BLOCK

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


Documents = tuple[tuple[int, ...], ...]  # by row, the place of each document's first token; or one entry for all


@dataclass(frozen=True)
class CausalBlock:
    """Queries and keys of some rows.

    Args:
        rows: the rows of the batch.
        queries: places among this rank's queries.
        keys: places among the keys that are at hand.
        is_causal: whether a query attends to no key after its own place; the last query is at the place of the last
            key. Without a window the block is a square.
        window: the number of keys before its own place to which a query attends; None for all. Places are counted from
            the ends, as if the last query were at the place of the last key.
    """

    rows: slice
    queries: slice
    keys: slice
    is_causal: bool
    window: int | None = None


def causal_blocks(
    documents: Documents, queries: Sequence[TokenRun], keys: Sequence[TokenRun], window: int | None = None
) -> list[CausalBlock]:
    """Return the blocks of some queries and keys, those on the diagonal first.

    Args:
        documents: where documents start, in rising order from 0; the last one also holds the padding at the end.
        queries: where the queries lie in the sequence.
        keys: where the keys lie. A run of keys either contains a whole run of queries, or does not overlap it.
        window: the number of tokens to which a query attends at most, itself included; None for all.

    Example:
        >>> blocks = causal_blocks(((0, 3),), [TokenRun(0, 2), TokenRun(2, 4)], [TokenRun(0, 6)])
        >>> [(b.queries.start, b.queries.stop, b.keys.start, b.keys.stop, b.is_causal) for b in blocks]
        [(0, 2, 0, 2, True), (2, 3, 2, 3, True), (3, 6, 3, 6, True), (2, 3, 0, 2, False)]
    """
    diagonal: list[CausalBlock] = []
    full: list[CausalBlock] = []
    for row, starts in enumerate(documents):
        rows = slice(None) if len(documents) == 1 else slice(row, row + 1)
        for offset, run in _placed(queries):
            for document, own in _documents_in(run, starts):
                for key_offset, held in _placed(keys):
                    for block in _of_runs(document, own, held, window):
                        kept = diagonal if block.is_causal else full
                        kept.append(_moved(block, rows, offset - run.start, key_offset - held.start))
    return diagonal + (_joined(full) if window is None else full)


def _of_runs(document: int, own: TokenRun, held: TokenRun, window: int | None) -> Iterator[CausalBlock]:
    """Yield the blocks of a document's queries and a run of keys, by places in the sequence."""
    queries, is_causal = slice(own.start, own.stop), held.start <= own.start < held.stop
    assert not is_causal or own.stop <= held.stop, (own, held)
    if window is None:
        if is_causal:
            yield CausalBlock(slice(None), queries, queries, True)
        low, high = max(held.start, document), min(held.stop, own.start)
        if low < high:
            yield CausalBlock(slice(None), queries, slice(low, high), False)
        return
    low = max(held.start, document, own.start - window + 1)
    stop = min(own.stop, held.stop + window - 1)  # later queries attend to none of these keys
    if is_causal:
        yield CausalBlock(slice(None), queries, slice(low, own.stop), True, window - 1)
    elif held.start <= own.start < stop and low < held.stop:
        reach = window - 1 + held.stop - stop if stop - low > window else None
        yield CausalBlock(slice(None), slice(own.start, stop), slice(low, held.stop), False, reach)


def _moved(block: CausalBlock, rows: slice, queries: int, keys: int) -> CausalBlock:
    q, k = block.queries, block.keys
    places = slice(q.start + queries, q.stop + queries), slice(k.start + keys, k.stop + keys)
    return replace(block, rows=rows, queries=places[0], keys=places[1])


def _joined(full: list[CausalBlock]) -> list[CausalBlock]:
    """Join neighbouring blocks without a mask, so that fewer kernels run and fewer results are merged."""
    found: list[CausalBlock] = []
    for block in full:  # in the order of their keys, for the same queries
        last = found[-1] if found else None
        if last and (last.rows, last.queries, last.keys.stop) == (block.rows, block.queries, block.keys.start):
            found[-1] = replace(last, keys=slice(last.keys.start, block.keys.stop))
        else:
            found.append(block)
    joined: list[CausalBlock] = []
    for block in found:
        last = joined[-1] if joined else None
        if last and (last.rows, last.keys, last.queries.stop) == (block.rows, block.keys, block.queries.start):
            joined[-1] = replace(last, queries=slice(last.queries.start, block.queries.stop))
        else:
            joined.append(block)
    return joined


def _placed(runs: Sequence[TokenRun]) -> Iterator[tuple[int, TokenRun]]:
    offset = 0
    for run in runs:
        yield offset, run
        offset += run.size


def _documents_in(run: TokenRun, starts: tuple[int, ...]) -> Iterator[tuple[int, TokenRun]]:
    """Yield the documents with tokens in a run: where each starts, and its tokens in the run."""
    for number in range(bisect_right(starts, run.start) - 1, len(starts)):
        start = starts[number]
        if start >= run.stop:
            return
        first = max(start, run.start)
        stop = run.stop if number + 1 == len(starts) else min(starts[number + 1], run.stop)
        yield start, TokenRun(first, stop - first)


_SHORTEST = 64  # mean tokens of a document below which one mask costs less than a block for each document


@dataclass(kw_only=True)
class ContextMask:
    """Which token attends to which, over the whole sequence.

    transformers makes it from its own mask functions, so windows, packed documents and chunks are as on one device.

    Args:
        function: a function of the indices of row, head, query and key; True where the query attends to the key.
        padding: which tokens are not padding, ``[B, S]``; None if all are not.
        rows: the number of rows B.
        length: the length of the sequence S.
        keys: the number of keys, if they are not those of the sequence, such as an encoder's.
        window: the number of tokens to which a query attends at most, if the mask limits it.
        is_plain: whether the mask is that of causal attention, within ``window`` if that is given, and nothing else.
        averages_blind: whether a query that attends to no key gets the average of all values, as an added mask makes
            it; otherwise it gets zeros.
        is_vectorized: whether ``function`` takes tensors that broadcast; otherwise it takes one place at a time.
        device: the device on which blocks are made.
        parts: how the ranks share the sequence; None for zigzag. It is set when the mask enters the first layer.
        of_flex: the masks of FlexAttention made so far, of queries and keys.
    """

    function: Callable[..., Any]
    padding: Tensor | None
    rows: int
    length: int
    keys: int
    window: int | None
    is_plain: bool
    averages_blind: bool
    is_vectorized: bool
    device: torch.device
    parts: SequenceParts | None = None
    of_flex: dict[tuple[TokenRun, TokenRun], BlockMask] = field(default_factory=dict)
    _visible: dict[TokenRun, tuple[int, int]] = field(default_factory=dict)
    _blind: dict[TokenRun, Tensor] = field(default_factory=dict)
    _of_kernel: dict[int, tuple[Tensor | None, Documents]] = field(default_factory=dict)

    @classmethod
    def causal(cls, *, rows: int, length: int) -> ContextMask:
        """Return the mask of causal attention alone, on the CPU."""
        return cls(
            function=lambda row, head, q, k: k <= q,
            padding=None,
            rows=rows,
            length=length,
            keys=length,
            window=None,
            is_plain=True,
            averages_blind=False,
            is_vectorized=True,
            device=torch.device("cpu"),
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the mask would have as a tensor, which transformers asks of a mask that a model is given."""
        return self.rows, 1, self.length, self.keys

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def is_causal_alone(self) -> bool:
        """Whether the mask is that of causal attention without a window."""
        return self.is_plain and (self.window is None or self.length <= self.window)

    @property
    def is_for_all_queries(self) -> bool:
        """Whether all queries of a row attend to the same keys: those that are no padding."""
        return getattr(self.function, "__name__", "") == "bidirectional_mask_function"

    def visible(self, queries: TokenRun) -> tuple[int, int]:
        """Return a range of keys that holds all keys that the queries' attention depends on; never empty.

        For a mask that depends on values, such as packed documents, the host waits for the device, at most once for
        each block of queries in a forward pass.
        """
        if queries not in self._visible:
            self._visible[queries] = self._derived(queries) or self._measured(queries)
        return self._visible[queries]

    def _derived(self, queries: TokenRun) -> tuple[int, int] | None:
        """Return the range as far as the mask's functions show it; None if they show nothing."""
        may_be_blind = self.averages_blind and self.padding is not None
        if not (self.is_plain or self._reach.is_causal) or may_be_blind:
            return None
        first = min(queries.start, self.length - 1)
        low = 0
        if self.is_plain and self.window is not None:
            low = max(0, first - self.window + 1)
        elif (starts := self._earliest_starts) is not None:
            low = starts[first]
        return low, max(low + 1, min(queries.stop, self.length))

    @cached_property
    def _reach(self) -> _Reach:
        return _reach_of(self.function)

    def work(self) -> Tensor | None:
        """Return for each place how many keys its queries see, over all rows, without windows; None if not packed."""
        starts = self._document_starts
        return None if starts is None else (torch.arange(1, starts.shape[1] + 1) - starts).sum(0)

    @cached_property
    def documents(self) -> Documents | None:
        """Where each row's documents start, if the mask is that of causal attention within them and nothing else."""
        if self.is_causal_alone:
            return ((0,),)
        starts = self._document_starts
        if self.padding is not None or starts is None or not self._reach.is_causal_within_documents:
            return None
        found = _places_of(starts)
        if self.length * len(found) < _SHORTEST * sum(map(len, found)):
            return None
        return found

    @cached_property
    def holes(self) -> Tensor | None:
        """Which tokens are padding, ``[B, S]``; None if none is. The host waits for the device once."""
        return None if self.padding is None or bool(self.padding.all()) else ~self.padding.bool()

    def documents_of_kernel(self, borders: Tensor | None) -> Documents:
        """Return the documents between which a flash kernel sees no pair, as transformers gives it.

        A kernel leaves padding out, so each stretch of padding is a document here.

        Args:
            borders: where the documents begin in all rows together, and the end, if the program says so.

        Raises:
            PlanError: if the mask is not that of causal attention within documents and a window.
        """
        if id(borders) not in self._of_kernel:
            self._of_kernel[id(borders)] = borders, self._found_for_kernel(borders)
        return self._of_kernel[id(borders)][1]

    def _found_for_kernel(self, borders: Tensor | None) -> Documents:
        if not (self.is_plain or (self._reach.is_causal and self._reach.is_all)):
            raise PlanError(
                "a mask lets tokens see other tokens than those before them in their document and window, which flash "
                "attention packages leave out. Load the model with attn_implementation='sdpa'"
            )
        if self.holes is not None:
            changes = torch.ones_like(self.holes)
            changes[:, 1:] = self.holes[:, 1:] != self.holes[:, :-1]
            if bool(((changes & ~self.holes).sum(1) > 1).any()):
                raise PlanError(
                    "attention_mask has padding between the tokens of a row, and under ParallelPlan.cp > 1 flash "
                    "attention takes padding at the two ends alone. Move it there, or load the model with "
                    "attn_implementation='sdpa'"
                )
            return tuple(tuple(row.nonzero()[:, 0].tolist()) for row in changes.cpu())
        if borders is not None:
            return self._documents_between(borders.tolist())
        return ((0,),) if self._document_starts is None else _places_of(self._document_starts)

    def _documents_between(self, borders: list[int]) -> Documents:
        firsts = [row * self.length for row in range(self.rows)]
        if borders[-1] != self.rows * self.length or not set(firsts) <= set(borders):
            raise PlanError(
                f"cu_seq_lens_q ends at {borders[-1]} and must hold the first token of each row, but there are "
                f"{self.rows} rows of {self.length} tokens. Give position_ids that begin anew for each document instead"
            )
        starts = sorted(set(borders[:-1]))
        return tuple(tuple(x - first for x in starts if first <= x < first + self.length) for first in firsts)

    @cached_property
    def _earliest_starts(self) -> list[int] | None:
        """Return for each place the earliest start of the documents that hold it, over all rows; None if unknown."""
        starts = self._document_starts
        return None if starts is None else starts.min(0).values.tolist()

    @cached_property
    def _document_starts(self) -> Tensor | None:
        """Return for each token the start of its document, ``[B, S]`` on the host; None if unknown."""
        documents = self._reach.documents
        if documents is None:
            return None
        documents = documents.cpu()
        places = torch.arange(documents.shape[1])
        begins = torch.ones_like(documents, dtype=torch.bool)
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
        return torch.where(begins, places, 0).cummax(1).values

    def _measured(self, queries: TokenRun) -> tuple[int, int]:
        seen = self.block(queries, TokenRun(0, self.length))
        blind = ~seen.any(-1)
        if self.averages_blind and bool(blind.any()):
            self._blind[queries] = blind
            return 0, self.length
        places = seen.flatten(0, 2).any(0).nonzero()
        return (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 1)

    def blind(self, queries: TokenRun) -> Tensor | None:
        """Return which of the queries get the average of all values, ``[B or 1, 1, queries]``; None if none does."""
        self.visible(queries)
        return self._blind.get(queries)

    def block(self, queries: TokenRun, keys: TokenRun) -> Tensor:
        """Return the mask of a block, bool ``[B or 1, 1, queries, keys]``.

        Queries beyond the end of the sequence act as the last one.
        """
        last = self.length - 1
        q = torch.arange(queries.start, queries.stop, device=self.device).clamp(max=last)
        k = torch.arange(keys.start, keys.stop, device=self.device)
        row, head = torch.arange(self.rows, device=self.device), torch.zeros(1, dtype=torch.int64, device=self.device)
        inside = k.clamp(max=last)
        function = self.function
        if self.is_vectorized:
            found = function(row[:, None, None, None], head[None, :, None, None], q[:, None], inside)
        else:
            for place in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
                function = torch.vmap(function, in_dims=place)
            found = function(row, head, q, inside)
        found = found.reshape(-1, 1, *found.shape[-2:]) if found.ndim > 2 else found[None, None]
        found = found.expand(-1, -1, len(q), len(k))  # a function of queries alone, as that of encoders, has one column
        if self.padding is not None:
            found = found & self.padding[:, inside][:, None, None]
        result: Tensor = found if keys.stop <= self.length else found & (k < self.length)
        return result


@dataclass(frozen=True)
class _Reach:
    """The known limits of the pairs that a mask function lets through.

    Args:
        is_causal: whether no query attends to a later key.
        documents: the number of each token's document, ``[B, S]``, if no query attends to another document.
        is_all: whether every pair within these limits is let through.
        has_window: whether they are let through within a window of tokens alone.
    """

    is_causal: bool = False
    documents: Tensor | None = None
    is_all: bool = False
    has_window: bool = False

    @property
    def is_causal_within_documents(self) -> bool:
        return self.is_causal and self.is_all and not self.has_window


def _reach_of(function: object) -> _Reach:
    """Return the limits that a mask function sets, from the functions that transformers has combined in it.

    Its ``and_masks`` lets through what all of its functions let through, so it is enough that one of them shows a
    limit. Nothing is assumed of unknown functions.
    """
    if getattr(function, "__name__", "") == "causal_mask_function":
        return _Reach(is_causal=True, is_all=True)
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    inside = dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=False)) if code else {}
    maker = getattr(function, "__qualname__", "").partition(".")[0]
    if maker == "sliding_window_overlay":
        return _Reach(is_all=True, has_window=True)
    if maker == "packed_sequence_mask_function":
        return _Reach(documents=inside.get("packed_sequence_mask"), is_all=True)
    if maker == "remap_positions_for_packed_sequence":  # positions rise within a document
        return _reach_of(inside.get("mask_function"))
    if maker != "and_masks":
        return _Reach()
    parts = [_reach_of(part) for part in inside.get("mask_functions", ())]
    numbers = [part.documents for part in parts if part.documents is not None]
    documents = numbers[0] if numbers else None
    remaps = any(getattr(f, "__qualname__", "").startswith("remap_") for f in inside.get("mask_functions", ()))
    is_causal = any(part.is_causal for part in parts) and (documents is not None or not remaps)
    is_all = all(part.is_all for part in parts) and len(numbers) <= 1
    has_window = any(part.has_window for part in parts)
    return _Reach(is_causal=is_causal, documents=documents, is_all=is_all, has_window=has_window)


def _places_of(starts: Tensor) -> Documents:
    begins = starts == torch.arange(starts.shape[1])
    found = tuple(tuple(row.nonzero()[:, 0].tolist()) for row in begins)
    return found[:1] if len(set(found)) == 1 else found


def query_blocks(runs: tuple[TokenRun, ...]) -> list[tuple[slice, TokenRun]]:
    """Return the blocks of a rank's queries: where each lies among its own tokens, and in the sequence."""
    blocks, offset = [], 0
    for run in runs:
        for start in range(0, run.size, BLOCK):
            size = min(BLOCK, run.size - start)
            blocks.append((slice(offset + start, offset + start + size), TokenRun(run.start + start, size)))
        offset += run.size
    return blocks
