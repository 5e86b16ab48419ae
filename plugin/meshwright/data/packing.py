"""Packs documents of tokens into rows of equal length without losing a token, and returns them as datasets.

Documents are packed one window at a time. Earlier windows determine only where a window begins, so its rows depend only
on the lengths of its documents. A state therefore holds a position among the documents, and no tokens.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass
from itertools import chain, islice
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from meshwright.data.fingerprint import fingerprint
from meshwright.data.shards import ListedShards, ShardedSource
from meshwright.errors import CheckpointError
from meshwright.outside_files import anything, integer, record, require, shown
from meshwright.parallel.batch.mean_over_ranks import IGNORE_INDEX
from meshwright.progress import Progress

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


_STATE = record(
    {
        **dict.fromkeys(("document", "token", "rows"), integer()),
        "packing": record(dict.fromkeys(asdict(Packing(1)), anything)),  # each is compared with the present one
    }
)


class PackedDataset(Dataset[dict[str, Tensor]]):
    """A map-style dataset of rows packed from a map-style dataset of documents.

    Args:
        documents: sequences of tokens, or mappings with ``input_ids`` and optionally ``labels``.
        packing: the packing options.
        lengths: the number of tokens of each document; if omitted, every document is read once to count its tokens.

    Example:
        >>> PackedDataset([[5, 6, 7], [8, 9]], Packing(length=5))[0]["position_ids"]
        tensor([0, 1, 2, 0, 1])
    """

    def __init__(self, documents: Any, packing: Packing, lengths: Iterable[int] | None = None):
        self.documents, self.packing = documents, packing
        if lengths is None:
            lengths = (num_tokens(documents[number]) for number in range(len(documents)))
        self._pieces, self._ends = array("q"), array("q", [0])
        for row in packing.rows(_shown(lengths, len(documents))):
            self._pieces.extend(chain.from_iterable(row))
            self._ends.append(len(self._pieces))

    @property
    def fingerprint(self) -> str:
        """The documents' fingerprint and the packing, as a text that is saved in a loader's state."""
        return f"{fingerprint(self.documents)}, {self.packing}"

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} is out of range for {len(self)} rows")
        row %= len(self)
        numbers = self._pieces[self._ends[row] : self._ends[row + 1]]
        pieces = [DocumentPiece(*numbers[i : i + 3]) for i in range(0, len(numbers), 3)]
        return make_row([(piece, self.documents[piece.document]) for piece in pieces], self.packing)


class PackedShards(IterableDataset[dict[str, Tensor]]):
    """Shards of rows packed from shards of documents. Each shard is packed separately.

    On one device this is an iterable dataset, read shard by shard. On a mesh it is a ``ShardedSource``, read as a
    stream.

    Args:
        source: the shards of documents.
        packing: the packing options.
    """

    def __init__(self, source: ShardedSource, packing: Packing):
        self._source, self._packing = source, packing

    @property
    def num_shards(self) -> int:
        return self._source.num_shards

    @property
    def fingerprint(self) -> str:
        """The source's fingerprint and the packing, which determine row k of a shard. A stream's state has both."""
        inner = getattr(self._source, "fingerprint", "")
        return f"{inner} {self._packing}".strip()

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = get_worker_info()
        shards = range(self.num_shards)
        own = shards[worker.id :: worker.num_workers] if worker else shards
        return chain.from_iterable(self.open(shard, 0) for shard in own)

    def open(self, shard: int, start: int) -> Iterator[dict[str, Tensor]]:
        """Return the rows of one shard from row ``start`` on. Earlier rows are planned, but not made into tensors."""
        rows = self._packing.packed(self._source.open(shard, 0))
        return (make_row(row, self._packing) for row, _ in islice(rows, start, None))


class PackedRows:
    """Iterates over rows packed from documents that are read in order, and resumes from a state.

    Args:
        documents: an iterable that can be read again, or a function that returns an iterable.
        packing: the packing options.

    Example:
        >>> next(iter(PackedRows([[5, 6, 7], [8, 9]], Packing(length=5))))["input_ids"]
        tensor([5, 6, 7, 8, 9])
    """

    def __init__(self, documents: Iterable[Any] | Callable[[], Iterable[Any]], packing: Packing):
        self._documents, self._packing = ListedShards([documents]), packing
        self._place = PackedPlace()

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        at = self._place
        for row, place in self._packing.packed(self._documents.open(0, at.document), at):
            self._place = place
            yield make_row(row, self._packing)
        self._place = PackedPlace()

    def state_dict(self) -> dict[str, Any]:
        """Return the place where the next row begins, and the packing. The state holds no tokens."""
        return {**asdict(self._place), "packing": asdict(self._packing)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state.

        Raises:
            CheckpointError: the state's rows were packed in another way, or a field has a wrong type or range.
        """
        require(dict(state), _STATE, "the state of the packed rows")
        for name, value in asdict(self._packing).items():
            if state["packing"][name] != value:
                raise CheckpointError(
                    f"the state belongs to rows packed with {name}={shown(state['packing'][name])}, but this Packing "
                    f"has {name}={value}; to resume, pass the Packing of the run that saved the state"
                )
        self._place = PackedPlace(state["document"], state["token"], state["rows"])


def make_row(pieces: Sequence[tuple[DocumentPiece, Any]], packing: Packing) -> dict[str, Tensor]:
    """Return the padded ``input_ids``, ``labels`` and ``position_ids`` of a row.

    Positions restart at 0 in each piece (a document or a part of one), so that attention can tell the pieces apart. A
    piece's first token has no label, since the token before it is not in the piece.
    """
    input_ids = torch.full((packing.padded_length,), packing.pad_token_id)
    labels = torch.full((packing.padded_length,), IGNORE_INDEX)
    position_ids = torch.arange(packing.padded_length)
    filled = 0
    for (_, start, stop), document in pieces:
        tokens, targets = _columns(document)
        here = slice(filled, filled + stop - start)
        input_ids[here] = torch.as_tensor(tokens[start:stop])
        labels[here] = torch.as_tensor(targets[start:stop])
        labels[filled] = IGNORE_INDEX
        filled = here.stop
        position_ids[filled:] = torch.arange(packing.padded_length - filled)
        position_ids[here] = torch.arange(stop - start)
    return {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}


def _shown(lengths: Iterable[int], count: int) -> Iterator[int]:
    """Yield the lengths, and show on a progress bar how many of them have been read."""
    with Progress("reading the lengths of documents", "documents") as progress:
        progress.start(count)
        for length in lengths:
            yield length
            progress.add(1)


def _columns(document: object) -> tuple[Any, Any]:
    if not isinstance(document, Mapping):
        return document, document
    if "attention_mask" in document and not all(document["attention_mask"]):
        raise ValueError("a document has padding (attention_mask 0); tokenise with padding=False before packing")
    return document["input_ids"], document.get("labels", document["input_ids"])


def cu_seqlens(position_ids: Tensor) -> tuple[Tensor, int]:
    """Return the document borders in concatenated rows, and the longest document's length, for attention kernels.

    Example:
        >>> cu_seqlens(torch.tensor([[0, 1, 2, 0], [0, 1, 0, 1]]))
        (tensor([0, 3, 4, 6, 8], dtype=torch.int32), 3)
    """
    flat = position_ids.flatten()
    borders = torch.cat([(flat == 0).nonzero().flatten(), flat.new_tensor([len(flat)])])
    return borders.to(torch.int32), int(borders.diff().max())


def block_diagonal_mask(position_ids: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a causal attention mask within each document: True where a token attends.

    Args:
        position_ids: the positions, of shape rows x length. The mask has the shape rows x 1 x length x length.
        dtype: the dtype of an additive mask to return instead: 0 where a token attends, elsewhere the lowest number of
            the dtype.
    """
    documents = (position_ids == 0).cumsum(-1)
    allowed = (documents[:, :, None] == documents[:, None, :]).tril()[:, None]
    if dtype is None:
        return allowed
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)
