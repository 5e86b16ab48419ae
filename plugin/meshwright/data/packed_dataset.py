"""A dataset, a source of shards and an iterator that return packed rows as tensors, and attention masks for them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from meshwright.data.fingerprint import fingerprint
from meshwright.data.packing import DocumentPiece, PackedPlace, Packing, num_tokens
from meshwright.data.shards import ListedShards, ShardedSource
from meshwright.errors import CheckpointError
from meshwright.parallel.batch.mean_over_ranks import IGNORE_INDEX
from meshwright.progress import Progress
from meshwright.schema import anything, integer, record, require, shown

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
