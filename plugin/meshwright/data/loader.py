"""The user's loader on a mesh, and the parts of it that other libraries may build a loader from.

Ranks along the sharded axis get different rows, and ranks along other axes the same.

The user's batch is the global batch. A DistributedLoader reads through one of four readers and checks that peers have
the same rows. It returns its rows on its device or, through a Placer, with each input on its mesh.

Such a loader knows no plan: each rank reads all rows, in batches of the user's loader, from a place that is in no
state. accelerate's function ``skip_first_batches`` builds one, as do wrappers of loaders.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset

from meshwright.data.global_batches import Portion, even_share
from meshwright.data.input_placement import Placer, check_dtensors, warn_without_labels
from meshwright.data.nested import digest, is_batch, map_tensors, signature, tensors_of, to_device
from meshwright.data.one_length import OneLength, pads_by_rank
from meshwright.data.peers import LoaderMesh, Peers, check_same_rows, timed
from meshwright.data.readers.base import Position, Reader
from meshwright.data.readers.choose import make_reader, split_reader
from meshwright.data.readers.map_style import MapReader
from meshwright.data.readers.split import SplitReader
from meshwright.data.readers.stream_shards import LANE_READER
from meshwright.data.readers.whole_stream import WholeReader
from meshwright.data.shuffling import GENERATOR, Draws, decoded, encoded
from meshwright.errors import CheckpointError, PlanError
from meshwright.faults.every_rank import EPOCH
from meshwright.faults.guard import active_guard
from meshwright.faults.together import Claim, agreed
from meshwright.outside_files import require, shown
from meshwright.parallel.batch.items import BatchFormat
from meshwright.parallel.batch.mean_over_ranks import TARGETS, without_targets
from meshwright.parallel.batch.share import BatchShare, yield_next
from meshwright.plan.loader_options import LoaderOptions


def part_of(loader: object, name: str) -> Any:
    """Return an attribute of a user's loader, to be read by the program.

    With several processes, iterating a sampler or an iterable dataset raises. In all else the object that is returned
    is the user's: it has the same class and shares its attributes, so ``set_epoch``, ``len`` and ``isinstance`` work.

    Args:
        loader: the loader as the user made it.
        name: the name of the attribute.
    """
    value = getattr(loader, name)
    is_read_in_order = name in ("batch_sampler", "sampler") or isinstance(value, IterableDataset)
    if not (is_read_in_order and dist.is_initialized() and dist.get_world_size() > 1):
        return value
    try:
        part: Any = object.__new__(_not_iterated(type(value)))
        part.__dict__ = value.__dict__
    except (TypeError, AttributeError):  # None, a list of indices, or another class without attributes
        return value
    return part


def _not_iterated(kind: type) -> type:
    """Return a subclass of a class whose objects raise where they are iterated."""

    def refuse(_: object) -> Any:
        raise PlanError(
            f"the {kind.__name__} of a loader that a plan distributes is iterated outside of the loader, as by a "
            f"loader that is rebuilt from it: each of the {dist.get_world_size()} processes would read all rows, in "
            "other batches. Iterate the loader. To begin in mid-epoch, write accelerator.skip_first_batches(loader, "
            "n) in place of accelerate's function, or loader.load_state_dict(state). For other batches, make a "
            "DataLoader of your own dataset, and pass it to to_distributed, shard_dataloader or accelerator.prepare"
        )

    return type(kind.__name__, (kind,), {"__iter__": refuse, "__module__": kind.__module__})


logger = logging.getLogger(__name__)

PLACES = 2**31  # larger than any number of ranks
DATASET = (
    "dataset (if each rank has a part of it, set shard_dataloader(..., is_dataset_splitted=True); if not, set "
    "LoaderOptions(fingerprint='a name'))"
)


class DistributedLoader:
    """Iterates over this rank's rows of the user's batches. Each ``iter(loader)`` or ``loader()`` reads one epoch.

    In an epoch every sample is in one batch, all ranks take the same number of steps, and every batch has rows on
    every rank. In each step the rows of all ranks are those that one device would read. The other attributes of the
    user's loader, such as ``dataset`` or ``batch_size``, are attributes of this object too.

    Args:
        loader: a DataLoader, or any iterable of batches.
        mesh: which ranks take different rows and which take the same rows, and this rank's device.
        placer: the Placer that puts each input on its mesh, if any.
        is_dataset_splitted: whether the user's loader reads only this rank's part.
        blanks: how a row that only keeps a rank in step is marked: "masked" by labels that no loss counts, so that a
            batch without labels cannot hold one; "weighted" by ``weight`` alone; or "either", by labels if there are
            any. The user applies ``weight`` to what is not masked.
        options: the options of reading.
        format: what the inputs of batches mean that come ready from the user's loader.

    Raises:
        ValueError: the dataset is empty or split already.
    """

    _is_accelerate_prepared = True  # accelerate's own mark for "leave this loader as it is"

    def __init__(
        self,
        loader: Iterable[Any],
        mesh: LoaderMesh,
        *,
        placer: Placer | None = None,
        is_dataset_splitted: bool = False,
        blanks: Literal["masked", "weighted", "either"] = "masked",
        options: LoaderOptions | None = None,
        format: BatchFormat | None = None,
    ):
        self.user_loader = loader
        self._dp, self._peers, self._device = mesh.dp, mesh.peers, mesh.device or torch.device("cpu")
        self._everyone = Peers((*mesh.peers.axes, mesh.dp)) if mesh.everyone is None else mesh.everyone
        self._placer, self._has_dtensors = placer, placer is not None and placer.as_dtensors
        self._options = options or LoaderOptions()
        self._blanks = blanks
        self._is_led = self._options.source == "leader" and self._peers.count > 1
        share = even_share if placer is None else placer.share
        pads = not self._has_dtensors and pads_by_rank(loader, mesh.dp)
        collate: Any = getattr(loader, "collate_fn", None)
        self._lengths = OneLength(collate, mesh.dp, pins=bool(getattr(loader, "pin_memory", False))) if pads else None
        if is_dataset_splitted:
            self._reader = split_reader(
                loader, mesh.dp, share, self._options, needs_equal_rows=self._has_dtensors, keeps_samples=pads
            )
        else:
            self._make_reader = partial(
                make_reader,
                loader,
                mesh.dp,
                share,
                Peers((mesh.dp,)) if self._is_led else self._everyone,
                keeps_samples=pads,
                format=format,
                needs_rows=self._has_dtensors,
            )
            self._reader = self._make_reader(self._options)
        self._steps = self._iterations = self._dropped = 0
        self._sizes: str | None = None  # the inputs' sizes and dtypes, which the ranks of dp compared last
        self._weight = 1.0
        self._share: BatchShare | None = None
        self._state: dict[str, Any] | None = None  # the leader's state, if the leader reads for this rank
        self._has_warned = False
        self.feeds_causal_lm = False  # a causal LM's loss is None without labels

    def agree(self) -> DistributedLoader:
        """Copy the first rank's generator state to all ranks, and return this loader. This is a collective call."""
        generator = self._reader.generator if isinstance(self._reader, MapReader) else None
        if generator is not None:
            generator.set_state(self._everyone.broadcast(generator.get_state()))
        return self

    def __iter__(self) -> Iterator[Any]:
        self._iterations += 1
        iteration, position = self._iterations, self._reader.position
        position.begin()
        start, self._steps, self._dropped = position.samples, 0, 0
        for portion in timed(self._portions()):
            if iteration != self._iterations:
                raise RuntimeError(
                    "this loader was restarted, or moved to another position, during an older iteration. A loader has "
                    "only one position, so end each loop before the next begins"
                )
            self._weight = 1.0 if self._has_dtensors else portion.counted * self._dp.size / portion.total
            batch = self._delivered(portion)
            self._compare(portion)
            self._steps += 1
            batch = map_tensors(batch, _own_object)
            tensors = tensors_of(batch)
            counts = portion.total, portion.held, portion.counted
            self._share = BatchShare.keep(batch, tensors, *counts, self._steps)
            yield_next(None if self._has_dtensors else self._share)
            yield batch
        yield_next(None)
        if self.dropped:
            level = logging.INFO if self._steps else logging.WARNING
            logger.log(level, "drop_last left out the last %d samples of epoch %d", self.dropped, position.epoch - 1)
        elif self._steps == start == 0:
            raise ValueError("the loader gave no batch: its dataset is empty, or drop_last left out all of it")

    def __call__(self) -> Iterator[Any]:
        return iter(self)

    def __len__(self) -> int:
        return len(self._reader)

    def __getattr__(self, name: str) -> Any:
        if name in ("user_loader", "_reader"):  # not set yet, while this object is built or unpickled
            raise AttributeError(name)
        return part_of(self.user_loader, name)

    @property
    def weight(self) -> float:
        """The factor for a rank's mean over its rows of the last batch, before gradients are averaged over ranks.

        The factor gives all rows the same weight in the average. It is 1 for DTensors, and if all ranks have the same
        number of rows. A loss that is a sum over tokens divided by their global count, as under ``to_distributed``,
        needs no weight.
        """
        return self._weight

    @property
    def share(self) -> BatchShare | None:
        """What the last batch is of the global batch; None before the first."""
        return self._share

    @property
    def dropped(self) -> int:
        """The number of samples at the end of this epoch that ``drop_last`` leaves out."""
        return self._dropped or self._reader.dropped

    @property
    def position(self) -> Position:
        """The current position. If a loop left an epoch early, the next ``iter`` starts the next epoch."""
        return self._reader.position

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next ``iter`` reads. By default each ``iter`` reads the epoch after the last."""
        self._reader.set_epoch(epoch)
        self._state = None
        self._iterations += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch, as a small JSON dict that is the same on all ranks.

        This needs no communication. If torch's random state decides the orders of later epochs, the dict also holds
        this rank's random state. In this case save the dict of rank 0.
        """
        torch_state = {"torch": encoded(torch.get_rng_state())} if self._reader.follows_torch else {}
        return {**self.place(), **torch_state}

    def place(self) -> dict[str, Any]:
        """Return the state without torch's random state, for a caller that saves the random state itself."""
        return self._reader.state_dict() if self._state is None else self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next ``iter`` resume from a state.

        The state may come from another mesh, batch size or number of workers. For datasets that are split already, or
        that every rank reads whole, docs/data.md lists what may change. If the state holds torch's random state, this
        call restores it, so that later epochs are those of the run that saved the state.

        Raises:
            CheckpointError: see :meth:`check_state_dict`.
        """
        self.check_state_dict(state)
        rng = decoded(state["torch"]) if "torch" in state else None
        self._reader = self._reader_of(state)
        self._reader.load_state_dict(state)
        if rng is not None:
            torch.set_rng_state(rng)
        self._state = None
        self._iterations += 1

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check a state, without changing the position.

        Raises:
            CheckpointError: the state belongs to another dataset or order, or a field has a wrong type or range. The
                message says what differs.
        """
        if not isinstance(state, Mapping):
            raise CheckpointError(f"the state of a loader is {shown(state)}, and must be a table")
        if "torch" in state:
            require(state["torch"], GENERATOR, "the torch state of the loader")
        self._reader_of(state).check_state({name: value for name, value in state.items() if name != "torch"})

    def _reader_of(self, state: Mapping[str, Any]) -> Reader:
        """Return the reader that goes on from a state. A run that has read in lanes stays in them."""
        if state.get("reader") == LANE_READER and isinstance(self._reader, WholeReader):
            return self._make_reader(replace(self._options, order="lanes"))
        return self._reader

    def skip(self, samples: int) -> bool:
        """Start the next ``iter`` after this many samples of its epoch. Return False if this requires reading them."""
        if not isinstance(self._reader, MapReader):
            return False
        self._reader.skip(samples)
        self._state = None
        self._iterations += 1
        return True

    def claim(self) -> Claim[DistributedLoader]:
        """Return the claim of this loader, with the dataset's identity if this rank reads the dataset by index."""
        reads = not self._is_led or self._peers.is_leader
        if not reads or not isinstance(self._reader, MapReader):
            return Claim(self, self._reader.describe())
        identity = self._reader.identity
        return Claim(self, self._reader.describe(), {DATASET: identity}, number=zlib.crc32(identity.encode()))

    def _portions(self) -> Iterator[Portion]:
        """Yield this rank's portions of the rest of the epoch, read by this rank or by its leader."""
        draws = self._agreed_draws()
        if not self._is_led:
            yield from self._read(draws)
        elif self._peers.is_leader:
            yield from self._read_for_peers(draws)
        else:
            yield from self._receive()

    def _read(self, draws: Draws) -> Iterator[Portion]:
        """Yield this rank's portions of the rest of the epoch, with one length over the ranks of dp."""
        is_same = not isinstance(self._reader, SplitReader)  # whether the ranks have drawn the same numbers
        for portion in self._reader.read(draws):
            if self._lengths is not None:
                place = (
                    draws.worker_seed if is_same else 0,
                    self._reader.position.epoch,
                    self._reader.position.samples,
                )
                portion = self._lengths.of(portion, zlib.crc32(repr(place).encode()))
            yield portion

    def _agreed_draws(self) -> Draws:
        """Return the first rank's random numbers, after checking that all ranks are at the same position."""
        position = self._reader.position
        own = self._reader.draw()
        if self._everyone.count == 1:
            return own
        if (guard := active_guard()) is not None:
            for axis in self._everyone.axes:  # other ranks may still be in a pass, whose loop has skipped no batch
                guard.meet(EPOCH, axis.group)
        places = self._everyone.gather(dist.get_rank(), position.epoch, position.samples)
        if len({(epoch, samples) for _, epoch, samples in places}) > 1:
            said = "; ".join(f"epoch {epoch}, sample {samples} on rank {rank}" for rank, epoch, samples in places)
            raise ValueError(
                f"the ranks are at different positions in the dataset: {said}. Make the same calls of load_state_dict "
                "and set_epoch on every rank, and iterate equally far on every rank"
            )
        if isinstance(self._reader, SplitReader):
            return own
        worker_seed, *order = self._everyone.broadcast([own.worker_seed, *own.order])
        return Draws(worker_seed=worker_seed, order=order)

    def _read_for_peers(self, draws: Draws) -> Iterator[Portion]:
        portions = self._read(draws)
        while True:
            try:
                portion = next(portions, None)
            except Exception as error:
                self._peers.broadcast(error)
                raise
            state, dropped = self._reader.state_dict(), self._reader.dropped
            if portion is None:
                self._peers.broadcast((state, dropped, None))
                return
            self._peers.broadcast((state, dropped, (portion.batch, portion.total, portion.held, portion.counted)))
            yield portion

    def _receive(self) -> Iterator[Portion]:
        position = self._reader.position
        while True:
            self._state, self._dropped, read = self._peers.broadcast(None)
            assert self._state is not None
            position.epoch, position.samples = self._state["epoch"], self._state["samples"]
            if read is None:
                position.is_fresh = True
                return
            batch, total, held, counted = read
            yield Portion(batch, total, held, counted, is_whole=held == total)

    def _where(self) -> str:
        return f"epoch {self._reader.position.epoch}, step {self._steps}"

    def _compare(self, portion: Portion) -> None:
        """Compare what must be equal: the rows of ranks of other meshes too, and the sizes of what becomes DTensors."""
        every = self._options.check_every
        is_time = every > 0 and self._steps % every == 0
        if is_time and self._everyone.count > (self._peers.count if self._is_led else 1) * self._dp.size:
            place = self._dp.rank * PLACES + self._dp.size
            check_same_rows(self._everyone, place, digest(portion.batch), self._where())
        if not self._has_dtensors or self._dp.group is None:
            return
        assert self._placer is not None
        portion = replace(portion, batch=self._placer.inputs_of(portion.batch))
        own = signature(portion.batch)
        if is_time or self._sizes is None:
            check_dtensors(portion, own, self._dp, self._where())
            self._sizes = own
        elif own != self._sizes:
            raise ValueError(
                f"{self._where()}: the inputs were {{{self._sizes}}} before and are {{{own}}} now. The rows of a "
                "DTensor must have the same length on all ranks: pad all batches to one length, set check_every=1 if "
                "the lengths change in the same way on all ranks, or use output='local'"
            )

    def _delivered(self, portion: Portion) -> Any:
        """Return a portion's batch as the user gets it, on this rank's device and the inputs' meshes."""
        batch = portion.batch
        if not is_batch(batch):
            raise ValueError(
                f"the collate function returned a {type(batch).__name__}; return a tensor, or a dict, list or tuple "
                "of tensors"
            )
        if self.feeds_causal_lm:
            self.feeds_causal_lm = False
            warn_without_labels(batch)
        least = getattr(self._reader, "least", None)
        if self._steps == 0 and least is not None and self._cannot_share(batch, least):
            logger.warning("this epoch will end in an error: %s", self._too_few(least))
        if portion.total % self._dp.size and not self._has_dtensors:
            batch = self._in_step(portion)
        batch = to_device(batch, self._device)
        return self._placer.place(batch, portion) if self._placer else batch

    def _in_step(self, portion: Portion) -> Any:
        """Return this rank's rows of a batch whose rows cannot be divided evenly over the ranks.

        Raises:
            ValueError: a rank would get a row that cannot be excluded from the loss. All ranks raise.
        """
        if self._cannot_share(portion.batch, portion.total):
            raise ValueError(self._too_few(portion.total))
        has_maskable = self._blanks != "weighted" and _has_labels(portion.batch)
        if not self._has_warned and not has_maskable:
            self._has_warned = True
            logger.warning(
                "a batch of %d rows is spread unevenly over %d ranks, so an average of the ranks' means would weight "
                "rows differently. Multiply each rank's mean by loader.weight, or set drop_last=True",
                portion.total,
                self._dp.size,
            )
        return without_labels(portion.batch) if portion.is_blank and has_maskable else portion.batch

    def _cannot_share(self, batch: object, rows: int) -> bool:
        return rows < self._dp.size and self._blanks == "masked" and not _has_labels(batch)

    def _too_few(self, rows: int) -> str:
        return (
            f"the last batch has {rows} rows, fewer than the {self._dp.size} data-parallel ranks. A batch without "
            "'labels' cannot be padded with a row that the loss ignores; set drop_last=True on the loader"
        )


def _own_object(x: Tensor) -> Tensor:
    """Return a tensor that only the program has, so that it is gone when the program drops it."""
    return x.detach() if type(x) is Tensor and not x.requires_grad else x


def _has_labels(batch: object) -> bool:
    return isinstance(batch, Mapping) and any(isinstance(batch.get(name), Tensor) for name in TARGETS)


def without_labels(batch: object) -> Any:
    """Return a batch with labels that no loss counts; a batch that is not a mapping is returned unchanged."""
    return without_targets(batch) if isinstance(batch, Mapping) else batch


def made_together(make: Callable[[], DistributedLoader]) -> DistributedLoader:
    """Make and return a loader on every rank. If ``make`` fails on a rank or the datasets differ, all ranks raise."""

    is_alone = not dist.is_initialized() or dist.get_world_size() == 1
    return make() if is_alone else agreed(lambda: make().claim())[0].agree()
