"""The user's loader on a mesh: ranks along the sharded axis get different rows, the others the same.

The user's batch is the global batch. A loader reads by one of four readers, checks that peers have the same rows, and
hands over what it has read on its device or, by a Placer, as DTensors on their meshes.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from meshwright.config import LoaderOptions
from meshwright.data.batches import Portion, Sharing, even_share
from meshwright.data.inputs import Placer
from meshwright.data.peers import Peers, communication_device, first_ranks
from meshwright.data.read_map import MapReader
from meshwright.data.read_split import SplitReader
from meshwright.data.read_stream import StreamReader, has_shards, is_shuffled
from meshwright.data.read_whole import WholeReader
from meshwright.data.reading import Reader
from meshwright.data.sampling import split_by
from meshwright.data.stream import gather_objects
from meshwright.data.tree import digest, signature, to_device
from meshwright.parallel.collectives import Axis, all_gather

logger = logging.getLogger(__name__)

IGNORE_INDEX = -100


class DistributedLoader:
    """Iterates this rank's rows of the user's batches; each ``iter`` is an epoch, and so is each call.

    In an epoch every sample is in one batch, all ranks take the same number of steps, and nobody gets an empty batch.
    What one device would read in a step, the ranks read together. Everything else that the user's loader has, such
    as ``dataset`` or ``batch_size``, is found here too.

    Args:
        loader: a DataLoader, or any iterable of batches.
        dp: this rank's place among those that take different rows.
        peers: the ranks that take the same.
        everyone: all of them, who agree on an epoch's random numbers; by default dp and peers.
        device: where tensors go.
        share: which rows of a batch a rank takes.
        placer: puts each input on its mesh.
        is_dataset_splitted: whether the user's loader reads this rank's part only.
        is_weighted: the user multiplies a loss by ``weight``, so that no batch is too short.
        options: how it reads.

    Raises:
        ValueError: an empty dataset, or one that is split already.
    """

    _is_accelerate_prepared = True  # accelerate's own mark for "leave this loader as it is"

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        dp: Axis,
        peers: Peers | None = None,
        everyone: tuple[Axis, ...] | None = None,
        device: torch.device | None = None,
        share: Sharing = even_share,
        placer: Placer | None = None,
        is_dataset_splitted: bool = False,
        is_weighted: bool = False,
        options: LoaderOptions | None = None,
    ):
        self.user_loader = loader
        self._dp, self._peers = dp, peers or Peers()
        self._everyone = everyone if everyone is not None else (*self._peers.axes, dp)
        self._device, self._placer = device or torch.device("cpu"), placer
        self._options = options or LoaderOptions()
        self._is_weighted, self._has_dtensors = is_weighted, placer is not None and placer.as_dtensors
        self._reader = make_reader(
            loader,
            dp,
            share,
            is_dataset_splitted=is_dataset_splitted,
            has_dtensors=self._has_dtensors,
            options=self._options,
        )
        self._steps = self._iterations = 0
        self._sizes: str | None = None  # what the ranks of dp have agreed the inputs look like
        self._weight = 1.0
        self._state: dict[str, Any] | None = None  # as the leader said, where it reads for this rank
        self._has_warned = False

    def __iter__(self) -> Iterator[Any]:
        self._iterations += 1
        iteration = self._iterations
        position = self._reader.position
        position.begin()
        start, self._steps = position.samples, 0
        for portion in self._portions():
            self._check_rows(portion)
            self._weight = 1.0 if self._has_dtensors else portion.counted * self._dp.size / portion.total
            batch = self._delivered(portion)
            self._check_sizes(portion)
            self._steps += 1
            yield batch
            if iteration != self._iterations:
                raise RuntimeError(
                    "this loader was started anew while an older iteration was going on, and has one position only; "
                    "end a loop before the next one begins"
                )
        if self.dropped:
            logger.info("drop_last left out the last %d samples of epoch %d", self.dropped, position.epoch - 1)
        elif self._steps == start == 0:
            raise ValueError("the loader gave no batch: its dataset is empty, or drop_last left out all of it")

    def __call__(self) -> Iterator[Any]:
        return iter(self)

    def __len__(self) -> int:
        return len(self._reader)

    def __getattr__(self, name: str) -> Any:
        if name in ("user_loader", "_reader"):  # not yet set: half-built or being unpickled
            raise AttributeError(name)
        return getattr(self.user_loader, name)

    @property
    def weight(self) -> float:
        """By what to multiply a mean over the rows of the batch last given, before gradients are averaged over ranks.

        It is 1 but for batches whose rows do not divide: then it makes the average that of all rows alike. A loss
        that is a sum over tokens divided by their global count, as ``to_distributed`` has it, needs no weight.
        """
        return self._weight

    @property
    def dropped(self) -> int:
        """Samples at the end of this epoch that ``drop_last`` leaves out."""
        return self._reader.dropped

    def set_epoch(self, epoch: int) -> None:
        """Choose what the next ``iter`` reads; without it, epochs follow each other."""
        self._reader.set_epoch(epoch)
        self._state = None

    def state_dict(self) -> dict[str, Any]:
        """Where the batch last given out ends: small, JSON, the same on all ranks; talks to nobody."""
        return self._reader.state_dict() if self._state is None else self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next ``iter`` go on from a state, which any mesh with any batch size or workers may have saved.

        Raises:
            ValueError: the state is of another dataset or order; names what differs.
        """
        self._reader.load_state_dict(state)
        self._state = None

    def describe(self) -> dict[str, str]:
        """What must be the same on all ranks, by name."""
        return self._reader.describe()

    def _portions(self) -> Iterator[Portion]:
        """What there is to read, by this rank or by its leader."""
        draws = first_rank_draws(self._reader.draw(), self._everyone)
        if self._options.source == "each" or self._peers.count == 1:
            yield from self._reader.read(draws)
        elif self._peers.is_leader:
            yield from self._read_for_peers(draws)
        else:
            yield from self._receive()

    def _read_for_peers(self, draws: list[Any]) -> Iterator[Portion]:
        portions = self._reader.read(draws)
        while True:
            try:
                portion = next(portions, None)
            except Exception as error:
                self._peers.broadcast(error)
            state = self._reader.state_dict()
            if portion is None:
                self._peers.broadcast((state, None))
                return
            self._peers.broadcast((state, (portion.batch, portion.total, portion.held, portion.counted)))
            yield portion

    def _receive(self) -> Iterator[Portion]:
        position = self._reader.position
        while True:
            self._state, read = self._peers.broadcast(None)
            position.epoch, position.samples = self._state["epoch"], self._state.get("samples", 0)
            if read is None:
                position.is_fresh = True
                return
            yield Portion(*read)

    def _is_time_to_check(self) -> bool:
        every = self._options.check_every
        return every > 0 and self._steps % every == 0

    def _where(self) -> str:
        return f"epoch {self._reader.position.epoch}, step {self._steps}"

    def _check_rows(self, portion: Portion) -> None:
        """Compare the rows of peers."""
        if self._options.source == "each" and self._peers.count > 1 and self._is_time_to_check():
            self._peers.check_same(digest(portion.batch), self._where())

    def _check_sizes(self, portion: Portion) -> None:
        """Compare the sizes of the inputs of a DTensor over all ranks."""
        if not self._has_dtensors or self._dp.group is None:
            return
        own = signature(portion.batch)
        if self._is_time_to_check() or self._sizes is None:
            check_sizes(own, self._dp, self._where())
            self._sizes = own
        elif own != self._sizes:
            raise ValueError(
                f"{self._where()}: the inputs were {{{self._sizes}}} and are {{{own}}} now. The rows of a DTensor must "
                "be equally long on all ranks: pad all batches to one length, set check_every=1 if the lengths of all "
                "ranks change alike, or use output='local'"
            )

    def _delivered(self, portion: Portion) -> Any:
        """The batch that the user gets."""
        batch = portion.batch
        if portion.total % self._dp.size and not (self._has_dtensors or self._is_weighted or _has_labels(batch)):
            self._object_to(portion)
        if portion.is_blank and _has_labels(batch):
            batch = _without_labels(batch)
        batch = to_device(batch, self._device)
        return self._placer.place(batch, portion) if self._placer else batch

    def _object_to(self, portion: Portion) -> None:
        """Rows that do not divide need labels, which say what counts, or a user who weighs the loss."""
        if portion.is_blank:
            raise ValueError(
                f"the last batch has {portion.total} rows, fewer than the {self._dp.size} data-parallel ranks, and "
                "a batch without 'labels' cannot be padded with a row that does not count; set drop_last=True on the "
                "loader"
            )
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "a batch of %d rows is spread unevenly over %d ranks and has no 'labels': multiply a mean over a "
                "rank's rows by loader.weight, or set drop_last=True",
                portion.total,
                self._dp.size,
            )


def make_reader(
    loader: Any, dp: Axis, share: Sharing, *, is_dataset_splitted: bool, has_dtensors: bool, options: LoaderOptions
) -> Reader:
    """The reader that fits a loader.

    Raises:
        ValueError: an empty dataset, one that is split without ``is_dataset_splitted``, or options that do not fit it.
    """
    if is_dataset_splitted:
        one = Axis(dp.name)
        own = _reader_of_whole(loader, one, share, options, may_stream=False)
        drop_last = bool(getattr(loader, "drop_last", False))
        return SplitReader(own, dp, drop_last=drop_last, needs_equal_rows=has_dtensors)
    if what := split_by(loader):
        raise ValueError(
            f"the loader is split already, by {what}, and would be split a second time; pass the whole dataset in a "
            "plain DataLoader, or set is_dataset_splitted=True of shard_dataloader"
        )
    return _reader_of_whole(loader, dp, share, options, may_stream=True)


def _reader_of_whole(loader: Any, dp: Axis, share: Sharing, options: LoaderOptions, *, may_stream: bool) -> Reader:
    is_loader = isinstance(loader, DataLoader)
    if may_stream and has_shards(loader):
        return StreamReader(loader, dp, share, options.of_stream)
    if options.shuffle:
        raise ValueError(
            "shuffle=True shuffles an iterable dataset with several numbered shards, and this loader has none; set "
            "shuffle=True of its DataLoader, or shuffle the dataset itself"
        )
    if is_loader and not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler is not None:
        return MapReader(loader, dp, share, seed=options.seed, name=options.fingerprint)
    if is_loader and dp.size > 1 and is_shuffled(loader.dataset):
        logger.warning(
            "the dataset is shuffled by dataset.shuffle(), so that every rank reads all of it and resuming reads it "
            "again up to there; leave that out and shuffle by LoaderOptions(shuffle=True) to read each shard once"
        )
    return WholeReader(loader, dp, share)


def first_rank_draws(draws: list[Any], everyone: tuple[Axis, ...]) -> list[Any]:
    """The random numbers of the rank that comes first on all axes."""
    for axis in everyone:
        draws = first_ranks(draws, axis)
    return draws


def check_sizes(own: str, dp: Axis, where: str) -> None:
    """Raise on all ranks of the axis alike unless their inputs look the same.

    Raises:
        ValueError: with what each rank has.
    """
    code = torch.tensor([zlib.crc32(own.encode())], device=communication_device())
    if len(set(all_gather(code, dp).tolist())) > 1:
        signatures = gather_objects(own, dp)
        said = "; ".join(f"{{{text}}} on rank {rank} of {dp.name}" for rank, text in enumerate(signatures))
        raise ValueError(
            f"{where}: the inputs differ in dtype or size between ranks: {said}. The rows of a DTensor must be equally "
            "long: pad all batches to one length, or use output='local'"
        )


def _has_labels(batch: Any) -> bool:
    return isinstance(batch, Mapping) and isinstance(batch.get("labels"), Tensor)


def _without_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The same rows, which no loss counts."""
    out = dict(batch)
    for name in ("labels", "shift_labels"):
        if isinstance(out.get(name), Tensor):
            out[name] = torch.full_like(out[name], IGNORE_INDEX)
    return out
