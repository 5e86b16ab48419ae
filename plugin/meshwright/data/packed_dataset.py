"""Packed rows as tensors: a dataset of them, shards of them, and what attention needs to know of them."""

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
from meshwright.data.packing import Packing, Piece, Place, num_tokens
from meshwright.data.shards import ListedShards, ShardedSource
from meshwright.parallel.mean_over_ranks import IGNORE_INDEX
from meshwright.progress import Progress


class PackedDataset(Dataset[dict[str, Tensor]]):
    """A map-style dataset of rows packed from a map-style dataset of documents.

    Args:
        documents: sequences of tokens, or mappings with ``input_ids`` and perhaps ``labels``.
        packing: how.
        lengths: of the documents, where they are known; else every document is read once.

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
        """The documents' and how they are packed: a loader's state holds it."""
        return f"{fingerprint(self.documents)}, {self.packing}"

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        row %= len(self)
        numbers = self._pieces[self._ends[row] : self._ends[row + 1]]
        pieces = [Piece(*numbers[i : i + 3]) for i in range(0, len(numbers), 3)]
        return make_row([(piece, self.documents[piece.document]) for piece in pieces], self.packing)


class PackedShards(IterableDataset[dict[str, Tensor]]):
    """Shards of rows packed from shards of documents, each shard for itself.

    An iterable dataset, which one device reads shard by shard, and a ``ShardedSource``, which a mesh reads as a stream.

    Args:
        source: shards of documents.
        packing: how.
    """

    def __init__(self, source: ShardedSource, packing: Packing):
        self._source, self._packing = source, packing

    @property
    def num_shards(self) -> int:
        return self._source.num_shards

    @property
    def fingerprint(self) -> str:
        """What makes row k of a shard another one: a stream's state holds it."""
        inner = getattr(self._source, "fingerprint", "")
        return f"{inner} {self._packing}".strip()

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = get_worker_info()
        shards = range(self.num_shards)
        own = shards[worker.id :: worker.num_workers] if worker else shards
        return chain.from_iterable(self.open(shard, 0) for shard in own)

    def open(self, shard: int, start: int) -> Iterator[dict[str, Tensor]]:
        """The rows of one shard from row ``start`` on; those before are planned, but not made."""
        rows = self._packing.packed(self._source.open(shard, 0))
        return (make_row(row, self._packing) for row, _ in islice(rows, start, None))


class PackedRows:
    """Iterates rows packed from documents that are read in order, from where a state says.

    Args:
        documents: an iterable that can be read again, or a function that returns one.
        packing: how.

    Example:
        >>> next(iter(PackedRows([[5, 6, 7], [8, 9]], Packing(length=5))))["input_ids"]
        tensor([5, 6, 7, 8, 9])
    """

    def __init__(self, documents: Iterable[Any] | Callable[[], Iterable[Any]], packing: Packing):
        self._documents, self._packing = ListedShards([documents]), packing
        self._place = Place()

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        at = self._place
        for row, place in self._packing.packed(self._documents.open(0, at.document), at):
            self._place = place
            yield make_row(row, self._packing)
        self._place = Place()

    def state_dict(self) -> dict[str, Any]:
        """Where the next row begins, and how rows are made: numbers of documents, no tokens."""
        return {**asdict(self._place), "packing": asdict(self._packing)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
            ValueError: its rows were made in another way.
        """
        for name, value in asdict(self._packing).items():
            if state["packing"][name] != value:
                raise ValueError(
                    f"the state is of rows packed with {name}={state['packing'][name]}, and these have {name}={value}"
                )
        self._place = Place(state["document"], state["token"], state["rows"])


def make_row(pieces: Sequence[tuple[Piece, Any]], packing: Packing) -> dict[str, Tensor]:
    """A row's ``input_ids``, ``labels`` and ``position_ids``, padded.

    Positions begin anew with each document, by which attention knows the borders. A document's first token has no
    label: the token before it is another document's last.
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
    """The lengths, with a bar that shows how many have been read."""
    with Progress("reading the lengths of documents", "documents") as progress:
        progress.start(count)
        for length in lengths:
            yield length
            progress.add(1)


def _columns(document: Any) -> tuple[Any, Any]:
    if not isinstance(document, Mapping):
        return document, document
    if "attention_mask" in document and not all(document["attention_mask"]):
        raise ValueError("a document has padding (attention_mask 0); tokenise with padding=False before packing")
    return document["input_ids"], document.get("labels", document["input_ids"])


def cu_seqlens(position_ids: Tensor) -> tuple[Tensor, int]:
    """The borders of the documents in rows laid end to end, and the longest document, for attention kernels.

    Example:
        >>> cu_seqlens(torch.tensor([[0, 1, 2, 0], [0, 1, 0, 1]]))
        (tensor([0, 3, 4, 6, 8], dtype=torch.int32), 3)
    """
    flat = position_ids.flatten()
    borders = torch.cat([(flat == 0).nonzero().flatten(), flat.new_tensor([len(flat)])])
    return borders.to(torch.int32), int(borders.diff().max())


def block_diagonal_mask(position_ids: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Causal attention within each document, rows x 1 x length x length: True where a token attends.

    Args:
        position_ids: rows x length.
        dtype: give 0 and the lowest number of this type instead, to be added to the scores.
    """
    documents = (position_ids == 0).cumsum(-1)
    allowed = (documents[:, :, None] == documents[:, None, :]).tril()[:, None]
    if dtype is None:
        return allowed
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)
