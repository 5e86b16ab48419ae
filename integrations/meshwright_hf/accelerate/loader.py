"""A loader on the plan's mesh that accelerate knows: it says when it ends, and how many rows a batch has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from accelerate import Accelerator
from accelerate.state import GradientState
from torch import Tensor, nn
from torch.utils.data import DataLoader

from meshwright.config import LoaderOptions
from meshwright.data.loader import DistributedLoader, made_together
from meshwright.data.nested import tensors_of
from meshwright.data.peers import Peers
from meshwright.faults.together import succeed_together
from meshwright.optim.runtime import device_of, runtime_of
from meshwright.parallel.collectives import Axis
from meshwright_hf.batches import global_batches, order_by_seed_and_epoch


class PlannedLoader:
    """This rank's batches, with what accelerate asks of the loader that is being iterated.

    Reads one batch ahead, so as to know the last one when it is given out; ``state_dict`` speaks of the batch given
    out. Everything else that the user's loader has, such as ``dataset`` or ``batch_size``, is found here too.

    Args:
        loader: as the user made it.
        inner: reads this rank's rows of its (global) batches.
        dp: the axis whose ranks read different rows.
        total_batch_size: rows of a global batch, where they are known.
    """

    _is_accelerate_prepared = True

    def __init__(self, loader: Iterable[Any], inner: DistributedLoader, dp: Axis, total_batch_size: int | None):
        self.user_loader, self.inner, self.dp = loader, inner, dp
        self.total_batch_size = total_batch_size
        self.gradient_state = GradientState()
        self.end_of_dataloader = False
        self.rows = 0
        self.remainder = -1
        self._state: dict[str, Any] | None = None
        self._to_drop = 0

    def __iter__(self) -> Iterator[Any]:
        self.end_of_dataloader = False
        self.remainder = self._rows_of_last()
        self.gradient_state._add_dataloader(self)
        try:
            dropped, self._to_drop = self._to_drop, 0
            batches = islice(self.inner, dropped, None)
            batch = next(batches, None)
            while batch is not None:
                rows = 0 if self.inner.weight == 0 else _rows(batch)
                state = self.inner.place()
                following = next(batches, None)
                self.rows, self._state, self.end_of_dataloader = rows, state, following is None
                yield batch
                batch = following
            self._state = None
        finally:
            self.gradient_state._remove_dataloader(self)

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name in ("user_loader", "inner"):  # not yet set: half-built or being unpickled
            raise AttributeError(name)
        return getattr(self.user_loader, name)

    @property
    def total_dataset_length(self) -> int:
        return len(self.user_loader.dataset)  # type: ignore[attr-defined]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration reads; without it, epochs follow each other."""
        self.inner.set_epoch(epoch)
        self._state = None

    def state_dict(self) -> dict[str, Any]:
        """Where the batch last given out ends; the same on all ranks, small, and good for any mesh."""
        return {**self.inner.state_dict(), **self.place()}

    def place(self) -> dict[str, Any]:
        """The state without torch's random state, which ``Accelerator.save_state`` saves itself."""
        return self.inner.place() if self._state is None else self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next iteration go on from there."""
        self.inner.load_state_dict(state)
        self._state = None

    def skip(self, num_batches: int) -> None:
        """Have the next iteration begin after the first batches of its epoch.

        Of the epoch, not of what is left of it: after ``load_state``, which goes to the place by itself, a script that
        skips the batches it had seen is at the same place.
        """
        place = self.inner.position
        if self.total_batch_size is not None and self.inner.skip(num_batches * self.total_batch_size):
            self._state = None
        elif not (place.is_fresh and place.samples):
            self._to_drop = num_batches  # where they end is known by reading them only

    def _rows_of_last(self) -> int:
        """Rows of the last batch over all ranks if it is not full, 0 if it is; -1 where nobody knows (accelerate's)."""
        if self.total_batch_size is None or getattr(self.user_loader, "drop_last", False):
            return -1
        try:
            return self.total_dataset_length % self.total_batch_size
        except TypeError:
            return -1


def check_loader(loader: DataLoader[Any], dp: int, options: LoaderOptions, *, is_global: bool) -> None:
    """Raise on all ranks for a loader that cannot be put on a mesh, before anything is changed.

    Raises:
        ValueError: see ``global_batches`` and ``DistributedLoader``.
    """
    succeed_together(
        lambda: DistributedLoader(loader if is_global else global_batches(loader, dp), dp=Axis("dp"), options=options)
    )


def plan_loader(
    loader: Any, model: nn.Module, options: LoaderOptions, *, is_global: bool, accelerator: Accelerator
) -> PlannedLoader:
    """Put a loader on the mesh of a distributed model; a collective call.

    Args:
        loader: its batches are those of one data-parallel rank; or of all of them, with ``is_global``.
        model: what ``to_distributed`` returned.
        options: how it reads.
        accelerator: says whether accelerate would shuffle by a seed and the epoch.
    """
    runtime = runtime_of(model)
    joined = loader if is_global else global_batches(loader, runtime.dp.size)
    if accelerator.use_seedable_sampler:
        order_by_seed_and_epoch(joined, accelerator.dataloader_config.data_seed)

    def make() -> DistributedLoader:
        peers, device = Peers((runtime.tp,)), device_of(model)
        return DistributedLoader(
            joined, dp=runtime.dp, peers=peers, device=device, options=options, may_hold_blanks=True
        )

    inner = made_together(make)
    return PlannedLoader(loader, inner, runtime.dp, _batch_size(joined))


def _batch_size(loader: Any) -> int | None:
    size = getattr(loader, "batch_size", None)
    return size or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)


def _rows(batch: Any) -> int:
    """Rows of a batch: of its first tensor that has any."""
    return next((x.shape[0] for x in tensors_of(batch) if isinstance(x, Tensor) and x.ndim), 0)
