"""Cut causal attention within documents into blocks that need no mask: squares on the diagonal, and full rectangles."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from meshwright.parallel.sequence_parts import TokenRun

Documents = tuple[tuple[int, ...], ...]  # by row, the place of each document's first token; or one entry for all


@dataclass(frozen=True)
class CausalBlock:
    """Queries and keys of some rows.

    Args:
        rows: the rows of the batch.
        queries: places among this rank's queries.
        keys: places among the keys that are at hand.
        is_causal: whether it is a square on the diagonal, where a query attends to the keys up to its own place.
            Otherwise every query attends to every key.
    """

    rows: slice
    queries: slice
    keys: slice
    is_causal: bool


def causal_blocks(documents: Documents, queries: Sequence[TokenRun], keys: Sequence[TokenRun]) -> list[CausalBlock]:
    """Return the blocks of some queries and keys, those on the diagonal first.

    Args:
        documents: where documents start, in rising order from 0; the last one also holds the padding at the end.
        queries: where the queries lie in the sequence.
        keys: where the keys lie. A run of keys either contains a whole run of queries, or does not overlap it.

    Example:
        >>> blocks = causal_blocks(((0, 3),), [TokenRun(0, 2), TokenRun(2, 4)], [TokenRun(0, 6)])
        >>> [(b.queries.start, b.queries.stop, b.keys.start, b.keys.stop, b.is_causal) for b in blocks]
        [(0, 2, 0, 2, True), (2, 3, 2, 3, True), (3, 6, 3, 6, True), (2, 3, 0, 2, False)]
    """
    diagonal, full = [], []
    for row, starts in enumerate(documents):
        rows = slice(None) if len(documents) == 1 else slice(row, row + 1)
        for offset, run in _placed(queries):
            for document, own in _documents_in(run, starts):
                places = slice(offset + own.start - run.start, offset + own.stop - run.start)
                for key_offset, held in _placed(keys):
                    if held.start <= own.start < held.stop:
                        assert own.stop <= held.stop, (own, held)
                        at = slice(key_offset + own.start - held.start, key_offset + own.stop - held.start)
                        diagonal.append(CausalBlock(rows, places, at, True))
                    low, high = max(held.start, document), min(held.stop, own.start)
                    if low < high:
                        at = slice(key_offset + low - held.start, key_offset + high - held.start)
                        full.append(CausalBlock(rows, places, at, False))
    return diagonal + _joined(full)


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
