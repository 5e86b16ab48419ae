"""The named axes of a plan's ranks, one rank's place on each of them, and the process groups of their ranks.

All models of a process share the groups.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup

from meshwright.errors import PlanError
from meshwright.mesh.process_group import backend_of_new_groups
from meshwright.mesh.process_mesh import ParallelDims
from meshwright.mesh.rank_grid import AXES

_FACTORS = ("tp", "tokens", "pp")  # the names of Mesh.factors
Place = Mapping[str, int]  # a rank's coordinate on each axis, by the axis's name

# Keyed by the world's process group, so that a new world starts without groups.
_groups: WeakKeyDictionary[ProcessGroup, dict[tuple[tuple[int, ...], str], Any]] = WeakKeyDictionary()

# The threads of a gloo group end with the group's last reference, which must not outlive the interpreter.
atexit.register(_groups.clear)


@dataclass(frozen=True)
class Axis:
    """This rank's place on one mesh axis.

    Args:
        name: the name of the axis, e.g. "tp".
        size: the number of ranks on the axis.
        rank: this rank's coordinate on the axis.
        group: the axis's process group; may be None if ``size`` is 1.
    """

    name: str
    size: int = 1
    rank: int = 0
    group: ProcessGroup | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> Axis:
        return self  # a copied model is on the same ranks

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.group is not None:
            raise PlanError(
                f"a model under a plan cannot be pickled: its ranks talk over process groups of this job, here of "
                f"{self.name}. Save its weights, torch.save(meshwright.full_state_dict(model), file), or the run, "
                "meshwright.save_checkpoint(folder, model, optimizer)"
            )
        return super().__reduce_ex__(protocol)

    @classmethod
    def over(cls, groups: Iterable[Sequence[int]], name: str) -> Axis:
        """Make a process group of each group of ranks, and return this rank's place in its own.

        Every rank of the world must make the call. A second call for the same groups and name makes no new ones.

        Args:
            groups: the global ranks of each group; each rank of the world once, as ``ParallelDims.groups`` returns.
            name: the name of the axis.
        """
        rank, own = dist.get_rank(), cls(name)
        for ranks in groups:
            group = shared_group(ranks, name)
            if rank in ranks:
                own = cls(name, size=len(ranks), rank=ranks.index(rank), group=group)
        return own


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """This rank's place on each axis of a plan's ranks.

    The world is the product of the plan's axes. Other axes are made of them::

        world      pp x dp x cp x tp    pp is the outermost axis, tp the innermost one
        tokens          dp x cp         the ranks that hold different tokens of a batch
        factors    pp x tokens x tp     the world again, which is how weights and gradients see it
        experts    pp x copies x ep x etp     the same ranks in the same order, divided a second time

    An axis that factors the same ranks a second time is made from ``ParallelDims.groups`` and ``Axis.over`` in
    :meth:`build`; the rank's place on it is added to :attr:`places`.

    Args:
        pp: the ranks that hold the stages of a pipeline.
        dp: the ranks that read different rows of a batch.
        cp: the ranks that hold parts of the same sequences.
        tp: the ranks that share each layer.
        ep: the ranks of dp x cp x tp that hold different experts; without etp these are neighbours.
        etp: neighbouring ranks of dp x cp x tp, which hold slices of the same experts.
        copies: the ranks of dp x cp x tp that hold the same of the experts, if ep or etp is larger than 1. Over these
            ranks the gradients of experts are averaged and ZeRO shards them.
        tokens: the ranks of dp and cp, over which losses and gradients are averaged and ZeRO shards; by default ``dp``.
    """

    pp: Axis = Axis("pp")
    dp: Axis = Axis("dp")
    cp: Axis = Axis("cp")
    tp: Axis = Axis("tp")
    ep: Axis = Axis("ep")
    etp: Axis = Axis("etp")
    copies: Axis = Axis("copies")
    tokens: Axis = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.tokens is None:
            assert self.cp.size == 1
            object.__setattr__(self, "tokens", self.dp)

    @classmethod
    def build(cls, dims: ParallelDims, device_type: str) -> Mesh:
        """Make the process groups of the axes. Every rank of the world must make this call.

        Args:
            dims: the sizes of the axes, whose product is the size of the world.
            device_type: ``"cpu"`` or ``"cuda"``.
        """
        if dims.world_size == 1:
            return cls()
        device_mesh = dims.build(device_type)

        def axis(name: str) -> Axis:
            ranks = device_mesh[name]
            return Axis(name, size=ranks.size(), rank=ranks.get_local_rank(), group=ranks.get_group())

        own = {name: axis(name) for name in dims.axis_names}
        tokens = own["dp"] if dims.cp == 1 else Axis.over(dims.groups("dp", "cp"), "dp")
        if dims.ep * dims.etp > 1:
            experts = (name for name, size in dims.expert_sizes.items() if name != "pp" and size > 1)
            own |= {name: Axis.over(dims.groups(name), name) for name in experts}
        return cls(**own, tokens=tokens)

    @property
    def factors(self) -> dict[str, Axis]:
        """The axes tp, tokens and pp by name, from the innermost to the outermost, whose product is the world."""
        return {name: getattr(self, name) for name in _FACTORS}

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(axis.size for axis in self.factors.values())

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank on every axis."""
        return self.index == 0

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the axes whose product is the world, as checkpoints name them."""
        return {axis.name: axis.size for axis in reversed(self.factors.values())}

    @property
    def index(self) -> int:
        """This rank's index among the mesh's ranks, of which the innermost factor varies fastest."""
        return functools.reduce(lambda outer, axis: outer * axis.size + axis.rank, reversed(self.factors.values()), 0)

    @functools.cached_property
    def places(self) -> tuple[Place, ...]:
        """Each rank's coordinate on each axis, in the order of ``index``."""
        return tuple(map(self._place, itertools.product(*(range(a.size) for a in reversed(self.factors.values())))))

    def _place(self, ranks: tuple[int, ...]) -> Place:
        """Return a rank's coordinate on each axis, from those on the factors, the outermost first."""
        place = dict(zip(reversed(_FACTORS), ranks, strict=True))
        place["dp"], place["cp"] = divmod(place["tokens"], self.cp.size)
        place["ranks"] = place["tokens"] * self.tp.size + place["tp"]  # of the stage
        rest, place["etp"] = divmod(place["ranks"], self.etp.size)
        place["copies"], place["ep"] = divmod(rest, self.ep.size)
        return place

    @property
    def place(self) -> Place:
        """This rank's coordinate on each axis."""
        return self.places[self.index]

    def without_groups(self) -> Mesh:
        """Return the same place on the same axes, without the process groups."""
        axes = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return Mesh(**{name: dataclasses.replace(axis, group=None) for name, axis in axes.items()})

    @property
    def of_same_rows(self) -> tuple[Axis, ...]:
        """The axes along which ranks have the same rows of a batch, from the outermost to the innermost."""
        return tuple(getattr(self, name) for name in AXES if name != "dp")

    @property
    def row_copies(self) -> int:
        """The number of ranks that have the same rows of a batch."""
        return math.prod(axis.size for axis in self.of_same_rows)

    @property
    def coordinates(self) -> str:
        """This rank's coordinates, for messages."""
        axes = (getattr(self, name) for name in AXES)
        return " ".join(f"{axis.name}={axis.rank}" for axis in axes if axis.size > 1 or axis.name in ("dp", "tp"))


def shared_group(ranks: Sequence[int], purpose: str) -> Any:
    """Return the process group of some ranks for a purpose; a second call for the same returns the same group.

    So a second model under the same plan, or a notebook that distributes a model many times, makes no new groups. Two
    models may share a group because every collective of a step ends within the step. Creating a group is collective:
    every rank of the world must make this call, and in the same order.

    Args:
        ranks: the global ranks of the group.
        purpose: what the group is for; groups of the same ranks for different purposes are different.

    Returns:
        The group, or torch's placeholder on a rank that is not a member.

    Example:
        >>> shared_group([0, 1], "pp0 to pp1") is shared_group([0, 1], "pp0 to pp1")  # doctest: +SKIP
        True
    """
    world = dist.group.WORLD
    assert world is not None, "groups are made in a world of processes"
    if world not in _groups:
        _groups.clear()
    known, key = _groups.setdefault(world, {}), (tuple(ranks), purpose)
    if key not in known:
        known[key] = dist.new_group(list(ranks), backend=backend_of_new_groups(), group_desc=f"mesh_{purpose}")
    return known[key]
