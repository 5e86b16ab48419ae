"""Gives the rows of a global batch one length over the ranks, with the collate function's own padding.

A collate function pads to the longest of the rows that it gets, which are one rank's. So the ranks compare the lengths
of their batches. Where a batch is longer on another rank, that rank sends one of its longest rows, and this rank
collates its own rows again together with that row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate, default_convert, get_worker_info

from meshwright.data.collation import Collate, longest, padded, row_sizes
from meshwright.data.global_batches import Portion, Share
from meshwright.data.nested import map_tensors, received, sent, tensors_of
from meshwright.data.peers import Peers
from meshwright.data.stream import gather_objects
from meshwright.mesh.axes import Axis
from meshwright.random_states import seeded

logger = logging.getLogger(__name__)

MOST = 60  # how many sizes are compared at most
STACKING: list[Any] = [default_collate, default_convert]  # functions, or classes of them, that never pad


@dataclass(frozen=True)
class Collated:
    """A collated batch with the samples that it was made from, as bytes if a worker sends tensors.

    Args:
        batch: what the user's collate function returned.
        samples: the samples.
    """

    batch: object
    samples: list[Any] | bytes

    def pin_memory(self) -> Collated:
        """Pin the batch's tensors; DataLoader calls this on batches of custom types."""
        return replace(self, batch=map_tensors(self.batch, Tensor.pin_memory))


class KeepingSamples:
    """A collate function that returns the samples, too. It is a class, so that workers can unpickle it."""

    def __init__(self, collate: Collate):
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Collated:
        has_tensors = get_worker_info() is not None and next(tensors_of(samples), None) is not None
        return Collated(self._collate(samples), sent(samples) if has_tensors else list(samples))


def portion_of(share: Share, read: object, total: int) -> Portion:
    """Return the portion for a share whose rows a collate function has collated, keeping their samples or not."""
    if isinstance(read, Collated):
        return Portion.of(share, read.batch, total, read.samples)
    return Portion.of(share, read, total)


def pads_by_rank(loader: object, dp: Axis) -> bool:
    """Return whether a loader has a collate function that may pad to the longest of the rows that it gets."""
    collate = getattr(loader, "collate_fn", None)
    return dp.group is not None and isinstance(loader, DataLoader) and collate is not None and not only_stacks(collate)


def only_stacks(collate: object) -> bool:
    """Return whether a collate function is known to stack rows, so that no row depends on others."""
    return any(collate is known or type(collate) is known for known in STACKING)


class OneLength:
    """Makes the lengths of each batch equal over the ranks; every rank passes each of its batches.

    Args:
        collate: the user's collate function.
        dp: the axis along which ranks take different rows.
        pins: whether batches are in pinned memory.
        gather: a function that gathers a value from all ranks of ``dp``; by default over the process group.
    """

    def __init__(
        self, collate: Collate, dp: Axis, *, pins: bool = False, gather: Callable[[Any], list[Any]] | None = None
    ):
        self._collate, self._dp = collate, dp
        self._pins = pins and torch.accelerator.is_available()
        self._gather = gather
        self._has_no_rows = self._is_off = self._has_warned = False

    def of(self, portion: Portion, seed: int) -> Portion:
        """Return this rank's portion of a batch, padded to the lengths of the whole batch.

        Args:
            portion: the portion as this rank has collated it.
            seed: the seed of what a collate function draws if it runs a second time; the same on all ranks.
        """
        if self._is_off:
            return portion
        kind, own = row_sizes(portion.batch, portion.held)
        own, self._has_no_rows = own[:MOST], self._has_no_rows or not own
        numbers = [int(self._has_no_rows), int(portion.is_blank), kind, len(own), *own, *[0] * (MOST - len(own))]
        ranks = [(numbers[:2], numbers[2:4], numbers[4:]) for numbers in self._numbers(numbers)]
        self._is_off = all(has_no_rows for (has_no_rows, _), *_ in ranks)
        if self._is_off or any(kind != ranks[0][1] for _, kind, _ in ranks):
            return portion
        counted = {rank: sizes for rank, ((_, is_blank), _, sizes) in enumerate(ranks) if not is_blank}
        most = [max(sizes) for sizes in zip(*counted.values(), strict=True)]
        if all(sizes == most for *_, sizes in ranks):
            return portion
        senders = sorted({next(rank for rank in counted if counted[rank][i] == n) for i, n in enumerate(most)})
        with seeded(self._collate, seed):
            return self._lengthened(portion, own, most[: len(own)], senders)

    def _lengthened(self, portion: Portion, own: list[int], most: list[int], senders: list[int]) -> Portion:
        """Collate the portion's samples again with those that ``senders`` send, if the portion is too short."""
        samples = received(portion.samples)
        is_sender = self._dp.rank in senders
        sent = self._objects(longest(self._collate, samples, own) if is_sender and samples is not None else [])
        if own == most:
            return portion
        batch = portion.batch
        if samples is not None:
            others = [sample for rank, part in enumerate(sent) if rank != self._dp.rank for sample in part]
            batch = padded(self._collate, samples, batch, others)
            if self._pins:
                batch = map_tensors(batch, Tensor.pin_memory)
        if batch is None:
            self._has_no_rows = True
            return portion
        if row_sizes(batch, portion.held)[1] != most and not portion.is_blank:
            self._warn(own, most)
        return replace(portion, batch=batch)

    def _warn(self, own: list[int], most: list[int]) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            "rank %d of %s has rows of length %s in a batch whose longest rows have length %s, and its collate "
            "function cannot pad them to that length: what it returns for a row depends on the other rows, or the "
            "dataset yields collated batches. With padding on the left, or positions that begin in the padding, the "
            "loss differs from that of one device. Pad all batches to one length, for example with "
            "tokenizer.pad(rows, padding='max_length', max_length=N)",
            self._dp.rank,
            self._dp.name,
            _said(own),
            _said(most),
        )

    def _numbers(self, own: list[int]) -> list[list[int]]:
        return Peers((self._dp,)).gather(*own) if self._gather is None else self._gather(own)

    def _objects(self, own: object) -> list[Any]:
        return gather_objects(own, self._dp) if self._gather is None else self._gather(own)


def _said(sizes: list[int]) -> str:
    return ", ".join(map(str, dict.fromkeys(sizes)))
