"""What every way of reading has in common: a place in the epochs, and what a loader asks of a reader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import DataLoader

from meshwright.data.global_batches import Portion

VERSION = 2
WORKER_SEEDS = 2**62  # workers add their numbers to a seed
NAMED = "If the dataset is the same, name it alike in both runs: LoaderOptions(fingerprint='a name')"


@dataclass
class Position:
    """Where reading is.

    Args:
        epoch: that is read, or that is next.
        samples: of it, over all ranks, that were given out.
        is_fresh: nobody has begun to read from here, so that the next iteration does.
    """

    epoch: int = 0
    samples: int = 0
    is_fresh: bool = True

    def begin(self) -> None:
        """Start an iteration: here, or at the next epoch if the last iteration was left before its end."""
        if not self.is_fresh:
            self.epoch, self.samples = self.epoch + 1, 0
        self.is_fresh = False

    def finish(self) -> None:
        """The epoch is read to its end."""
        self.epoch, self.samples, self.is_fresh = self.epoch + 1, 0, True

    def set_epoch(self, epoch: int) -> None:
        """What the next iteration reads; a place that was loaded for this very epoch stays.

        Raises:
            ValueError: no epoch.
        """
        if not isinstance(epoch, int) or epoch < 0:
            raise ValueError(f"an epoch is an integer from 0 on, not {epoch!r}")
        if epoch != self.epoch or not self.is_fresh:
            self.epoch, self.samples, self.is_fresh = epoch, 0, True

    def load(self, state: Mapping[str, Any], most: int | None = None) -> None:
        """Go to a state's place, of at most so many samples.

        Raises:
            ValueError: it has none, or an impossible one.
        """
        for name in ("epoch", "samples"):
            value = state.get(name)
            if not isinstance(value, int) or value < 0 or (name == "samples" and most is not None and value > most):
                limit = f" to {most}" if name == "samples" and most is not None else ""
                raise ValueError(f"the state has {name}={value!r}, which must be an integer from 0{limit}")
        self.epoch, self.samples, self.is_fresh = state["epoch"], state["samples"], True


class Reader(Protocol):
    """Reads a rank's rows of global batches, and knows where it is.

    ``read`` is told what ``draw`` drew on the first rank. Where one rank reads for its peers, theirs are never asked
    to read.
    """

    position: Position

    @property
    def dropped(self) -> int:
        """Samples at the end of this epoch that are left out."""

    @property
    def batch_size(self) -> int | None:
        """Rows of a batch, where they are known."""

    @property
    def seed(self) -> int | None:
        """Of the orders of all epochs, where one seed says them; may be set to another rank's."""

    @seed.setter
    def seed(self, seed: int) -> None: ...

    @property
    def is_repeatable(self) -> bool:
        """Whether an epoch that is read again has the same order."""

    def __len__(self) -> int:
        """Steps of an epoch; TypeError where nobody knows."""

    def describe(self) -> dict[str, str]:
        """What must be the same on all ranks, by name."""

    def draw(self) -> list[Any]:
        """The epoch's random numbers, as this rank would draw them."""

    def read(self, draws: list[Any]) -> Iterator[Portion]:
        """The rest of the epoch from ``position`` on, which is moved past a batch when it is given out."""

    def set_epoch(self, epoch: int) -> None:
        """The epoch that is read next."""

    @property
    def follows_torch(self) -> bool:
        """Whether torch's random state may say what later epochs are."""

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it is a position in."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go there; ValueError for a state of something else."""


def check_state(state: Mapping[str, Any], expected: Mapping[str, Any], why: str) -> None:
    """Compare the entries of a state with what they must be.

    Raises:
        ValueError: naming the first that differs, both values and why they must be equal.
    """
    for name, value in {"version": VERSION, **expected}.items():
        if state.get(name) != value:
            raise ValueError(f"the state has {name}={state.get(name)!r}, and this loader has {name}={value!r}; {why}")


def worker_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """The arguments of a DataLoader that say how its workers run."""
    names = ["num_workers", "timeout", "worker_init_fn", "multiprocessing_context"]
    if loader.num_workers:
        names.append("prefetch_factor")
    return {name: getattr(loader, name) for name in names}
