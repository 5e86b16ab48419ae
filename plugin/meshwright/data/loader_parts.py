"""The parts of a user's loader from which code outside of Meshwright may build another loader.

Such a loader knows no plan: each rank reads all rows, in batches of the user's loader, from a place that is in no
state. accelerate's function ``skip_first_batches`` builds one, as do wrappers of loaders.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.utils.data import IterableDataset

from meshwright.errors import PlanError


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
