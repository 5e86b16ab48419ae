"""The positions of ranks: an n-d mesh of ranks, and the sizes of the parallel axes that define a mesh.

A mesh here is only a description. It starts nothing and communicates nothing, so a planner, a test or an error message
can build one for any world. Only ``to_device_mesh`` creates process groups.
"""

from __future__ import annotations

import atexit
import inspect
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, get_world_size
from torch.distributed.device_mesh import DeviceMesh

from meshwright.mesh.process_group import backend_of_new_groups
from meshwright.mesh.rank_grid import AXES, AxisSizes, flatten, grid_text, nest

# Keyed by the world's process group, so that a new world starts without device meshes.
_device_meshes: WeakKeyDictionary[ProcessGroup, dict[tuple[ProcessMesh, str], DeviceMesh]] = WeakKeyDictionary()


def _let_groups_end(reference: ref[DeviceMesh]) -> None:
    """At exit, drop the groups of a mesh, which DTensor's caches keep for the life of the process.

    The threads of a gloo group end with the group's last reference. A thread that still runs when the interpreter ends
    may free the tensors of the last collective at that moment, and so abort a run that has succeeded.
    """
    if (device_mesh := reference()) is not None:
        getattr(device_mesh, "_pg_registry", {}).clear()


class ProcessMesh:
    """An n-d array of unique global ranks with named axes; any subset of the world, in any order.

    Args:
        ranks: nested sequences of ints, or an integer tensor or numpy array, of one or more axes.
        dim_names: one name per axis; ``d0, d1, ...`` by default.

    Raises:
        ValueError: if ranks are ragged, repeated, negative or not integers, or there are none; if names are
            repeated, empty or not one per axis.

    Example:
        >>> mesh = ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "tp"])
        >>> print(mesh)
              tp=0  tp=1
        dp=0     0     1
        dp=1     2     3
        >>> mesh.coordinate(2)
        (1, 0)
        >>> mesh.axis_ranks(2, "dp")
        (0, 2)
        >>> mesh[1]
        ProcessMesh([2, 3], dim_names=('tp',))
    """

    def __init__(self, ranks: object, dim_names: Sequence[str] | None = None) -> None:
        self._shape, self._ranks = flatten(ranks)
        if dim_names is None:
            dim_names = [f"d{axis}" for axis in range(len(self._shape))]
        self._dim_names = (dim_names,) if isinstance(dim_names, str) else tuple(dim_names)
        positions = itertools.product(*map(range, self._shape))
        self._coordinates = dict(zip(self._ranks, positions, strict=True))
        if not self._shape or not self._ranks:
            raise ValueError(f"a mesh needs at least one axis and one rank, got shape {self._shape}")
        if len(self._dim_names) != len(self._shape):
            raise ValueError(
                f"dim_names has {len(self._dim_names)} names {self._dim_names} for {len(self._shape)} axes "
                f"of shape {self._shape}; give one name per axis"
            )
        if len(set(self._dim_names)) != len(self._dim_names) or not all(self._dim_names):
            raise ValueError(f"dim_names must be unique and not empty, got {self._dim_names}")
        if repeated := sorted(rank for rank, count in Counter(self._ranks).items() if count > 1):
            raise ValueError(f"a rank may appear in a mesh only once; repeated: {repeated} in {list(self._ranks)}")
        if min(self._ranks) < 0:
            raise ValueError(f"ranks start at 0, got {min(self._ranks)}")

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each axis."""
        return self._shape

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self._shape)

    @property
    def dim_names(self) -> tuple[str, ...]:
        """The name of each axis."""
        return self._dim_names

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self._ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank, row-major: the last axis varies fastest."""
        return self._ranks

    @property
    def array(self) -> torch.Tensor:
        """The ranks as an int64 CPU tensor of the mesh's shape; a copy, so writing to it does not change the mesh."""
        return torch.tensor(self._ranks, dtype=torch.int64, device="cpu").view(self._shape)

    def __contains__(self, rank: object) -> bool:
        return rank in self._coordinates

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Return the index of a rank on each axis, or None for a rank outside the mesh."""
        return self._coordinates.get(rank)

    def axis_size(self, name: str) -> int:
        """Return the size of the axis of that name."""
        return self._shape[self._axis(name)]

    def axis_ranks(self, rank: int, name: str) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` only along this axis, ``rank`` included, in axis order."""
        return self.submesh(name, rank).ranks

    def submesh(self, axes: str | Sequence[str], rank: int) -> ProcessMesh:
        """Return the part of the mesh that contains ``rank`` and spans these axes, in their order.

        Raises:
            ValueError: if a name is not an axis, or the rank is outside the mesh.

        Example:
            >>> ParallelDims(dp=2, cp=2, tp=2).process_mesh().submesh(("cp", "tp"), rank=6)
            ProcessMesh([[4, 5], [6, 7]], dim_names=('cp', 'tp'))
        """
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        chosen = [self._axis(name) for name in names]
        if (coordinate := self.coordinate(rank)) is None:
            raise ValueError(f"rank {rank} is not in the mesh:\n{self}")
        picks = [range(size) if i in chosen else [coordinate[i]] for i, size in enumerate(self._shape)]
        return self._pick(picks, chosen)

    def __getitem__(self, key: int | slice | tuple[int | slice, ...]) -> ProcessMesh:
        """Index like an array: an int drops its axis, and a slice keeps its axis and the axis's name."""
        keys = key if isinstance(key, tuple) else (key,)
        if not all(isinstance(part, (int, slice)) for part in keys):
            raise TypeError(f"a mesh is indexed by ints and slices, got {key!r}; use submesh(axes, rank) for names")
        if len(keys) > self.ndim:
            raise IndexError(f"{len(keys)} indices for the {self.ndim} axes {self._dim_names}")
        keys += (slice(None),) * (self.ndim - len(keys))
        picks: list[Sequence[int]] = []
        for part, size, name in zip(keys, self._shape, self._dim_names, strict=True):
            if isinstance(part, int) and not -size <= part < size:
                raise IndexError(f"index {part} is outside axis {name!r} of size {size}")
            picks.append(range(size)[part] if isinstance(part, slice) else [part % size])
        kept = [axis for axis, part in enumerate(keys) if isinstance(part, slice)]
        if not kept:
            raise ValueError(f"mesh[{key!r}] leaves no axis; keep one with a slice, or index mesh.array")
        return self._pick(picks, kept)

    def _axis(self, name: str) -> int:
        if name not in self._dim_names:
            raise ValueError(f"no axis {name!r} in the mesh; its axes are {self._dim_names}")
        return self._dim_names.index(name)

    def _pick(self, picks: Sequence[Sequence[int]], kept: Sequence[int]) -> ProcessMesh:
        """Return the mesh over ``kept`` axes, in that order, of the ranks at ``picks`` (one index list per axis)."""
        strides = [math.prod(self._shape[axis + 1 :]) for axis in range(self.ndim)]
        order = [*(axis for axis in range(self.ndim) if axis not in kept), *kept]
        offsets = itertools.product(*([index * strides[axis] for index in picks[axis]] for axis in order))
        ranks = [self._ranks[sum(parts)] for parts in offsets]
        shape = [len(picks[axis]) for axis in kept]
        return ProcessMesh(nest(ranks, shape), [self._dim_names[axis] for axis in kept])

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, ProcessMesh) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[tuple[object, ...], ...]:
        return self._shape, self._ranks, self._dim_names

    def __repr__(self) -> str:
        return f"ProcessMesh({nest(self._ranks, self._shape)}, dim_names={self._dim_names})"

    def __str__(self) -> str:
        return grid_text(self._ranks, self._shape, self._dim_names)

    def to_device_mesh(self, device_type: str) -> DeviceMesh:
        """Create the process groups of every axis and return them as torch's ``DeviceMesh``.

        Creating groups is collective: every rank of the world must make this call, including ranks outside the
        mesh, and in the same order. As long as the world's process group lives, a second call for the same mesh
        returns the first result and creates no groups.

        Args:
            device_type: ``"cpu"`` or ``"cuda"``.

        Raises:
            ValueError: if a rank is outside the world; before torch 2.13, also if ranks do not ascend along each axis.
        """
        world_size = get_world_size()
        if max(self._ranks) >= world_size:
            raise ValueError(f"rank {max(self._ranks)} is outside the world of {world_size} ranks:\n{self}")
        world = dist.group.WORLD
        assert world is not None
        if world not in _device_meshes:
            _device_meshes.clear()  # a mesh of the whole world holds that world's group and would keep it alive
        known = _device_meshes.setdefault(world, {})
        if (self, device_type) not in known:
            is_plain = self._ascends() and backend_of_new_groups() is None
            known[self, device_type] = self._create(device_type) if is_plain else self._create_in_order(device_type)
            atexit.register(_let_groups_end, ref(known[self, device_type]))
        return known[self, device_type]

    def _ascends(self) -> bool:
        """Return whether the ranks ascend along each axis."""
        return all(bool((self.array.diff(dim=axis) > 0).all()) for axis in range(self.ndim))

    def _create(self, device_type: str) -> DeviceMesh:
        return DeviceMesh(device_type, self.array, mesh_dim_names=self._dim_names)

    def _create_in_order(self, device_type: str) -> DeviceMesh:
        """Create a device mesh whose groups keep the mesh's order; DeviceMesh itself sorts the ranks of a group."""
        ascending = self._ascends()
        keep_order: dict[str, Any] = {} if ascending else {"sort_ranks": False}
        if not ascending and "sort_ranks" not in inspect.signature(dist.new_group).parameters:
            raise ValueError(
                f"torch {torch.__version__} sorts the ranks of a process group, so they must ascend along each axis; "
                f"reorder them, or use torch 2.13 or newer:\n{self}"
            )
        groups = []
        for axis, size in enumerate(self._shape):
            for ranks in self.array.movedim(axis, -1).reshape(-1, size).tolist():
                name = f"mesh_{self._dim_names[axis]}"
                group = dist.new_group(ranks, backend=backend_of_new_groups(), group_desc=name, **keep_order)
                if dist.get_rank() in ranks:
                    groups.append(group)
        if groups:
            return DeviceMesh.from_group(groups, device_type, self.array, mesh_dim_names=self._dim_names)
        outside = DeviceMesh(device_type, self.array, mesh_dim_names=self._dim_names, _init_backend=False)
        outside._dim_group_names = []
        return outside


@dataclass(frozen=True, kw_only=True)
class ParallelDims(AxisSizes):
    """The sizes of the parallel axes, from the outermost to the innermost: PP, DP, CP, TP.

    TP is innermost because it communicates most, and neighbouring ranks share a node. Experts divide the ranks of each
    pipeline stage a second time, into copies, EP and ETP, which is innermost.

    Args:
        pp: the number of pipeline stages.
        dp: the number of data-parallel replicas.
        cp: the number of ranks that share one sequence, attention included.
        tp: the number of ranks that share each layer.
        ep: the number of ranks that hold different experts of each layer.
        etp: the number of neighbouring ranks that hold slices of the same experts.

    Raises:
        ValueError: if a size is not a positive int, or ep x etp does not divide dp x cp x tp.

    Example:
        >>> dims = ParallelDims(dp=2, tp=2)
        >>> dims.world_size
        4
        >>> print(dims.rank_grid(rank=2))
              tp=0  tp=1
        dp=0     0     1
        dp=1   [2]     3
        >>> print(ParallelDims(dp=2, tp=2, ep=4).rank_grid())
              tp=0  tp=1
        dp=0     0     1
        dp=1     2     3
        <BLANKLINE>
        experts
        ep=0  ep=1  ep=2  ep=3
           0     1     2     3
    """

    axis_names: ClassVar[tuple[str, ...]] = tuple(AXES)

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        for name, size in {**self.sizes, "ep": self.ep, "etp": self.etp}.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name} must be a positive int, got {name}={size!r}")
        if math.prod(self.expert_sizes.values()) != self.world_size:
            raise ValueError(f"{self.product('ep', 'etp')} must divide {self.product('dp', 'cp', 'tp')}")

    @property
    def expert_sizes(self) -> dict[str, int]:
        """The size of each axis of :meth:`expert_mesh`, from the outermost to the innermost."""
        copies = self.world_size // self.pp // (self.ep * self.etp)
        return {"pp": self.pp, "copies": copies, "ep": self.ep, "etp": self.etp}

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each axis, in the order of ``axis_names``."""
        return tuple(self.sizes.values())

    @property
    def active(self) -> tuple[str, ...]:
        """The axes larger than 1."""
        return tuple(name for name, size in self.sizes.items() if size > 1)

    def process_mesh(self, ranks: Sequence[int] | None = None) -> ProcessMesh:
        """Return the mesh of all four axes over ``ranks``, or over ranks 0 to ``world_size - 1``.

        Raises:
            ValueError: if the number of ranks is not ``world_size``.
        """
        ranks = range(self.world_size) if ranks is None else ranks
        if len(ranks) != self.world_size:
            raise ValueError(
                f"{self.product(*(self.active or ('tp',)))} = {self.world_size} ranks, but {len(ranks)} were given"
            )
        return ProcessMesh(nest(ranks, self.shape), self.axis_names)

    def expert_mesh(self) -> ProcessMesh:
        """Return the mesh of the same ranks, in the same order, over the axes along which experts differ."""
        sizes = self.expert_sizes
        return ProcessMesh(nest(range(self.world_size), tuple(sizes.values())), tuple(sizes))

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Return the ranks that differ only along these axes, in the order of the axes given, for all other places.

        Args:
            axes: axes of :meth:`process_mesh`, or axes of :meth:`expert_mesh`.

        Example:
            >>> ParallelDims(dp=2, cp=2, tp=2).groups("dp", "cp")
            [(0, 2, 4, 6), (1, 3, 5, 7)]
        """
        mesh = self.process_mesh() if set(axes) <= set(self.axis_names) else self.expert_mesh()
        indices = [mesh.dim_names.index(name) for name in axes]
        places = itertools.product(*map(range, mesh.shape))
        firsts = (rank for rank, place in enumerate(places) if not any(place[index] for index in indices))
        return [mesh.submesh(axes, rank).ranks for rank in firsts]

    def check_world_size(self, world_size: int) -> None:
        """Raise unless the product of the sizes is the number of ranks that were started.

        Raises:
            ValueError: if they differ; the message shows the field to change.
        """
        if world_size == self.world_size:
            return
        replica = self.world_size // self.dp
        change = f"change pp, cp or tp so that pp x cp x tp (now {replica}) divides {world_size}"
        if world_size % replica == 0:
            change = f"set dp={world_size // replica}"
        raise ValueError(
            f"{self.product(*(self.active or ('tp',)))} = {self.world_size} ranks, but the world has {world_size}:\n"
            f"{self.rank_grid()}\nStart {self.world_size} processes, or {change}."
        )

    def build(self, device_type: str) -> DeviceMesh:
        """Create the process groups and return the 4-d ``DeviceMesh`` (pp, dp, cp, tp) of the whole world.

        Creating groups is collective: every rank of the world must make this call.

        Raises:
            ValueError: if the size of the world is not ``world_size``.
        """
        self.check_world_size(get_world_size())
        return self.process_mesh().to_device_mesh(device_type)

    def rank_grid(self, rank: int | None = None) -> str:
        """Return the ranks as a text grid, with ``rank`` in brackets.

        The last axis larger than 1 (usually tp) gives the columns, and the axis before it the rows. Each position
        on the other axes is a block with a title. A second grid shows which ranks share experts.
        """
        grid = grid_text(range(self.world_size), self.shape, self.axis_names, rank)
        if self.ep * self.etp == 1:
            return grid
        experts = self.expert_mesh()
        return f"{grid}\n\nexperts\n{grid_text(experts.ranks, experts.shape, experts.dim_names, rank)}"
