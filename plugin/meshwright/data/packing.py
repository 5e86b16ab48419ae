"""Packs documents of tokens into rows of equal length, without losing a token.

Documents are packed one window at a time. Earlier windows determine only where a window begins, so its rows depend only
on the lengths of its documents. A state therefore holds a position among the documents, and no tokens.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple

Strategy = Literal["best_fit", "concatenate"]


class DocumentPiece(NamedTuple):
    """Tokens ``start`` to ``stop - 1`` of one document."""

    document: int
    start: int
    stop: int


@dataclass(frozen=True)
class Packing:
    """The options for packing documents into rows.

    Args:
        length: the maximum number of tokens per row.
        strategy: "best_fit" splits only documents longer than a row; "concatenate" fills every row and splits the
            document at the row's end.
        window: the number of documents per window of best_fit.
        multiple_of: the number that the padded row length is a multiple of, for sequence and context parallelism.
        pad_token_id: the token id of the padding. No document attends to the padding, and it has no labels.

    Raises:
        ValueError: a size below 1, or an unknown strategy.

    Example:
        >>> Packing(length=8).rows([5, 2, 3, 4])
        [[DocumentPiece(document=0, start=0, stop=5), DocumentPiece(document=2, start=0, stop=3)], \
[DocumentPiece(document=1, start=0, stop=2), DocumentPiece(document=3, start=0, stop=4)]]
    """

    length: int
    strategy: Strategy = "best_fit"
    window: int = 1024
    multiple_of: int = 1
    pad_token_id: int = 0

    def __post_init__(self) -> None:
        for name in ("length", "window", "multiple_of"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.strategy not in ("best_fit", "concatenate"):
            raise ValueError(f"strategy={self.strategy!r} must be 'best_fit' or 'concatenate'")

    @property
    def padded_length(self) -> int:
        """The number of tokens per row, padding included."""
        return math.ceil(self.length / self.multiple_of) * self.multiple_of

    def rows(self, lengths: Iterable[int]) -> list[list[DocumentPiece]]:
        """Return the pieces of every row, for documents of the given lengths."""
        documents = map(range, lengths)  # a range replaces each document, since only lengths matter
        return [[piece for piece, _ in row] for row, _ in self.packed(documents)]

    def packed(self, documents: Iterator[Any], at: PackedPlace | None = None) -> Iterator[_Packed]:
        """Yield the pieces of each row with their documents, and the place where the next row begins.

        Args:
            documents: the documents from document ``at.document`` on.
            at: the place where the first row begins; None for the start.
        """
        at = at or PackedPlace()
        pack = self._best_fit if self.strategy == "best_fit" else self._concatenated
        return pack(documents, at)

    def _best_fit(self, documents: Iterator[Any], at: PackedPlace) -> Iterator[_Packed]:
        first, skip = at.document, at.rows
        while window := list(islice(documents, self.window)):
            rows = best_fit([num_tokens(document) for document in window], self.length)
            for number, row in enumerate(rows[skip:], skip + 1):
                pieces = [(piece._replace(document=first + piece.document), window[piece.document]) for piece in row]
                is_last = number == len(rows)
                yield pieces, PackedPlace(first + len(window)) if is_last else PackedPlace(first, rows=number)
            first, skip = first + len(window), 0

    def _concatenated(self, documents: Iterator[Any], at: PackedPlace) -> Iterator[_Packed]:
        row: list[tuple[DocumentPiece, Any]] = []
        room, start = self.length, at.token
        for number, document in enumerate(documents, at.document):
            stop = num_tokens(document)
            while start < stop:
                piece = DocumentPiece(number, start, min(stop, start + room))
                row.append((piece, document))
                room -= piece.stop - start
                start = piece.stop
                if not room:
                    yield row, PackedPlace(number, token=start)
                    row, room = [], self.length
            start = 0
        if row:
            yield row, PackedPlace(row[-1][0].document, token=row[-1][0].stop)


@dataclass(frozen=True)
class PackedPlace:
    """The place where the next row begins.

    Args:
        document: the first document of the row's window, or under "concatenate" the document that begins the row.
        token: the first token of this document that is not packed yet.
        rows: the number of the window's rows that come before the next row.
    """

    document: int = 0
    token: int = 0
    rows: int = 0


_Packed = tuple[list[tuple[DocumentPiece, Any]], PackedPlace]  # the documents of a row, and where the next row begins


def best_fit(lengths: Sequence[int], length: int) -> list[list[DocumentPiece]]:
    """Return rows of at most ``length`` tokens, packed by best fit with the longest documents first.

    A document goes into the row where it leaves the least room. Documents longer than a row are split, and the
    remainder is packed like other documents. The result is sorted by the rows' first documents. In the order of
    packing, training would see the long documents first.
    """
    pieces = [
        DocumentPiece(document, start, min(start + length, tokens))
        for document, tokens in enumerate(lengths)
        for start in range(0, tokens, length)
    ]
    rows: list[list[DocumentPiece]] = []
    room: list[tuple[int, int]] = []  # the tokens left in each row, and the row's number
    for piece in sorted(pieces, key=lambda piece: piece.start - piece.stop):
        tokens = piece.stop - piece.start
        place = bisect_left(room, (tokens, 0))
        if place < len(room):
            left, row = room.pop(place)
        else:
            left, row = length, len(rows)
            rows.append([])
        rows[row].append(piece)
        if left > tokens:
            insort(room, (left - tokens, row))
    return sorted(map(sorted, rows))


def num_tokens(document: Sized) -> int:
    """Return the number of tokens of a document."""
    return len(document["input_ids"] if isinstance(document, Mapping) else document)
