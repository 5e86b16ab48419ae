"""The position that every reader keeps, and the interface of readers that a loader uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch.utils.data import DataLoader

from meshwright.data.global_batches import Portion
from meshwright.data.shuffling import Draws
from meshwright.errors import CheckpointError
from meshwright.outside_files import LARGEST_COUNT, Check, anything, integer, is_same, record, require, shown

VERSION = 2
MOST_EPOCHS = 2**31  # some orders are found by going through all epochs before
WORKER_SEEDS = 2**62  # leaves room for the worker's number, which is added to a seed
NAMED = "If the dataset is the same, give it the same name in both runs: LoaderOptions(fingerprint='a name')"


@dataclass
class Position:
    """The position of a reader.

    Args:
        epoch: the epoch that is being read, or the next one.
        samples: the number of the epoch's samples that were returned, over all ranks.
        is_fresh: whether no iteration has started at this position yet, so that the next iteration starts here.
    """

    epoch: int = 0
    samples: int = 0
    is_fresh: bool = True

    def begin(self) -> None:
        """Start an iteration at this position, or at the next epoch if the last iteration was left before its end."""
        if not self.is_fresh:
            self.epoch, self.samples = self.epoch + 1, 0
        self.is_fresh = False

    def finish(self) -> None:
        """Move to the start of the next epoch."""
        self.epoch, self.samples, self.is_fresh = self.epoch + 1, 0, True

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; a position that was loaded for this epoch is kept.

        Raises:
            ValueError: ``epoch`` is not an integer from 0 on.
        """
        if not isinstance(epoch, int) or isinstance(epoch, bool) or epoch < 0:
            raise ValueError(f"epoch must be an integer from 0 on, got {epoch!r}")
        if epoch != self.epoch or not self.is_fresh:
            self.epoch, self.samples, self.is_fresh = epoch, 0, True

    def state(self, reader: str) -> dict[str, Any]:
        """Return the position as the beginning of a state of a reader of this kind."""
        return {"version": VERSION, "reader": reader, "epoch": self.epoch, "samples": self.samples}

    def load(self, state: Mapping[str, Any]) -> None:
        """Move to the position in a state that was checked."""
        self.epoch, self.samples, self.is_fresh = state["epoch"], state["samples"], True


@dataclass(frozen=True, kw_only=True)
class StateForm:
    """What the state of a reader has beside its version and the position.

    Args:
        equal: entries that must have these values, by the reason why.
        fields, optional: the checks of the other entries, of which it may lack ``optional`` ones.
        most: the largest number of samples.
    """

    equal: Mapping[str, Mapping[str, Any]]
    fields: Mapping[str, Check] = field(default_factory=dict)
    optional: Mapping[str, Check] = field(default_factory=dict)
    most: int = LARGEST_COUNT


class Reader(Protocol):
    """The base of the readers, which read this rank's rows of the global batches and keep their position.

    ``read`` receives the numbers that ``draw`` drew on the first rank. If one rank reads for its peers, only its reader
    reads.
    """

    position: Position
    _dropped: int = 0

    @property
    def dropped(self) -> int:
        """The number of samples at the end of this epoch that are left out."""
        return self._dropped

    @property
    def batch_size(self) -> int | None:
        """The number of rows per batch; None if it is unknown."""

    @property
    def seed(self) -> int | None:
        """The seed that decides the orders of all epochs, if there is one. It may be set to another rank's seed."""
        return None

    @seed.setter
    def seed(self, seed: int) -> None:
        raise AssertionError("this reader's order has no seed that could be set")

    @property
    def is_repeatable(self) -> bool:
        """Whether an epoch that is read again has the same order, as far as can be checked."""
        return True

    def __len__(self) -> int:
        """Return the number of steps per epoch; raise TypeError if it is unknown."""

    def describe(self) -> dict[str, str]:
        """Return the values that must be equal on all ranks, by name."""

    def draw(self) -> Draws:
        """Draw the epoch's random numbers on this rank."""

    def read(self, draws: Draws) -> Iterator[Portion]:
        """Yield the rest of the epoch from ``position`` on, and move ``position`` past each batch."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that is read next."""
        self.position.set_epoch(epoch)

    @property
    def follows_torch(self) -> bool:
        """Whether torch's random state may decide the orders of later epochs."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and values that identify the data."""

    def form_of(self, state: Mapping[str, Any]) -> StateForm:
        """Return the form that a state of this reader must have."""

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError if a state belongs to other data, or a field of it has a wrong type or range."""
        form = self.form_of(state)
        compared = ["version"]
        for why, expected in form.equal.items():
            for name, value in {"version": VERSION, **expected}.items():
                compared.append(name)
                if not is_same(state.get(name), value):
                    found = shown(state.get(name))
                    raise CheckpointError(f"the state has {name}={found}, but this loader has {name}={value!r}; {why}")
        place = {"epoch": integer(0, MOST_EPOCHS), "samples": integer(0, form.most)}
        known = {**dict.fromkeys(compared, anything), **place, **form.fields}
        require(dict(state), record(known, form.optional), "the state of the loader")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to the position in a state that was checked."""


def worker_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments of a DataLoader that configure its workers."""
    names = ["num_workers", "timeout", "worker_init_fn", "multiprocessing_context"]
    if loader.num_workers:
        names.append("prefetch_factor")
    return {name: getattr(loader, name) for name in names}
