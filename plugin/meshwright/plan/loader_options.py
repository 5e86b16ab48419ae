"""The options of reading: which rank reads what of a dataset, and in which order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.errors import PlanError
from meshwright.plan.fields import check_bool, check_choice, check_int, check_type, names_checked

Source = Literal["each", "leader"]
DrawsOf = Literal["batch", "rank"]
ReadingOrder = Literal["loader", "lanes"]
LANES = 32  # number of shards of a dataset that a stream reads at the same time


@names_checked()
@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """Options of ``shard_dataloader``, and of the loader that ``to_distributed`` returns.

    Args:
        source: which ranks read the dataset. With "each", every rank reads its own rows. With "leader", one of the
            ranks that need the same rows reads and sends them, for a dataset that is not deterministic or is slow.
        draws: rows that a rank reads if reading draws random numbers: all of the "batch", so that the numbers are those
            of one device, or only those of the "rank".
        check_every: number of steps between two comparisons of rows between the ranks that must have the same rows,
            starting at step 0; 0 turns the comparisons off.
        seed: seed of the shuffling. None takes the seed from the loader's generator or, if the loader has no generator,
            from torch's random state.
        fingerprint: name that identifies the dataset to other ranks and in a loader state, in place of its contents.
        order: order of an iterable dataset with numbered shards. With "loader", the samples come in the order of the
            user's DataLoader on one device, and every rank reads the whole dataset. With "lanes", each shard is read by
            one data-parallel rank, and the samples come in an order of Meshwright's own, the same on any mesh.
        shuffle: whether to shuffle the samples of the lanes; it implies ``order="lanes"``.
        buffer_size: number of samples that are shuffled with each other, over all lanes.
        lanes: number of shards that all ranks read at the same time. The order of the samples depends on this number;
            another number than the default implies ``order="lanes"``.

    Raises:
        PlanError: if a field does not exist, has the wrong type or is out of range.
    """

    source: Source = "each"
    draws: DrawsOf = "batch"
    check_every: int = 50
    seed: int | None = None
    fingerprint: str | None = None
    order: ReadingOrder = "loader"
    shuffle: bool = False
    buffer_size: int = 1000
    lanes: int = LANES

    def __post_init__(self) -> None:
        choices_of = {"source": ("each", "leader"), "draws": ("batch", "rank"), "order": ("loader", "lanes")}
        for name, choices in choices_of.items():
            check_choice("LoaderOptions", name, getattr(self, name), choices)
        if self.seed is not None and not (type(self.seed) is int and 0 <= self.seed < 2**63):
            raise PlanError(f"LoaderOptions.seed={self.seed!r} must be an integer from 0 to 2**63 - 1")
        check_bool("LoaderOptions", "shuffle", self.shuffle)
        check_type("LoaderOptions", "fingerprint", self.fingerprint, str, "a string")
        for name, least in (("check_every", 0), ("buffer_size", 1), ("lanes", 1)):
            check_int("LoaderOptions", name, getattr(self, name), least=least)

    @property
    def reads_lanes(self) -> bool:
        """Whether a dataset with numbered shards is read in lanes."""
        return self.order == "lanes" or self.shuffle or self.lanes != LANES

    @property
    def of_stream(self) -> dict[str, object]:
        """The arguments of a ShardedStream."""
        shuffling = {"shuffle": self.shuffle, "buffer_size": self.buffer_size, "seed": self.seed or 0}
        return {**shuffling, "lanes": self.lanes}
