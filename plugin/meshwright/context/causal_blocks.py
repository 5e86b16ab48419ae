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
