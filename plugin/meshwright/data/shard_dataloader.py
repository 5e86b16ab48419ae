"""Defines ``shard_dataloader``, which turns a DataLoader into a loader that reads each rank's rows on a mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist

from meshwright.data.global_batches import chunk_share, even_share
from meshwright.data.input_placement import Placer, Targets, flat, match_targets, place_on
from meshwright.data.loader import DistributedLoader
from meshwright.data.peers import LoaderMesh, Peers
from meshwright.data.readers.stream_shards import has_lanes
from meshwright.faults.guard import active_guard, start_guard
from meshwright.faults.together import Claim, Result, agreed
from meshwright.mesh.axes import Axis, shared_group
from meshwright.mesh.process_group import (
    backend_of_new_groups,
    device_for,
    ensure_process_group,
    start_process_group,
    wire_device,
    world_size,
)
from meshwright.mesh.process_mesh import ProcessMesh
from meshwright.parallel.batch.items import BatchFormat
from meshwright.plan.config import RowsOf
from meshwright.plan.fields import either_name, names_checked
from meshwright.plan.loader_options import LoaderOptions, ReadingOrder, Source

_NAMES = dict.fromkeys(("mesh", "device_mesh", "process_mesh"), "meshes=") | dict.fromkeys(
    ("shard_dim", "dp", "dim"), "shard_dims="
)


@names_checked(_NAMES)
def shard_dataloader(
    dataloader: Iterable[Any] | None = None,
    meshes: object = None,
    input_keys: Sequence[str] | None = None,
    shard_dims: object = None,
    is_dataset_splitted: bool = False,
    *,
    output: Literal["dtensor", "local"] = "dtensor",
    spread: bool = False,
    source: Source = "each",
    check_every: int = 50,
    seed: int | None = None,
    fingerprint: str | None = None,
    order: ReadingOrder = "loader",
    shuffle: bool = False,
    buffer_size: int = 1000,
    batch_dims: Mapping[str, RowsOf] | None = None,
    timeout_s: float = 120.0,
    loader: Iterable[Any] | None = None,
) -> DistributedLoader:
    """Return a loader that reads the rows that this rank needs, and places every input on its mesh.

    Ranks along the sharded axis read different rows; ranks along the other axes read the same rows. The batch size of
    ``dataloader`` is the global batch size or, with ``is_dataset_splitted``, each rank's batch size. Every rank of the
    world must make this call and iterate over the loader.

    Args:
        dataloader: a DataLoader over a map-style or iterable dataset, or any iterable of batches. A batch is a tensor,
            a tuple or list of inputs, or a dict of them; an input may be a nested list or dict. Values other than
            tensors pass through.
        meshes: a ``ProcessMesh`` (or torch's ``DeviceMesh``) for all inputs, or a list with one for each input. For an
            input that is a list, the entry is a list too. A batch that is a single tensor goes on the first mesh.
        input_keys: the keys of a dict batch that ``meshes`` apply to: one key for each of several meshes, or any number
            of keys for a single mesh. The inputs under other keys are returned unchanged.
        shard_dims: the axis along which rows are sharded, by name or index: one for all meshes, or a list like
            ``meshes``. None gives every rank all rows.
        is_dataset_splitted: whether the dataset is split already, so that each rank's dataset is a different part.
        output: "dtensor" for DTensors, or "local" for tensors on this rank's device, with None for inputs whose mesh
            does not contain this rank.
        spread: whether to accept batches whose rows cannot be divided evenly over the ranks. With local output,
            multiply a mean over a rank's rows by the loader's ``weight``.
        source: "each" if every rank reads, or "leader" if one rank reads for all ranks that need the same rows.
        check_every: the number of steps between comparisons of rows that several ranks must have, starting at step 0;
            0 for no comparisons.
        seed: the seed of the shuffling. By default the loader's generator decides or, without a generator, torch's
            random state on rank 0.
        fingerprint: a name for the dataset, used instead of a text computed from the dataset's contents.
        order: "loader" for the order that the DataLoader has on one device, or "lanes" to read each shard of an
            iterable dataset once, in an order of its own that is the same on any mesh.
        shuffle: whether to shuffle the samples of the lanes; it implies ``order="lanes"``.
        buffer_size: the number of samples that are shuffled with each other.
        batch_dims: what says which rows the parts of an input belong to, for inputs of ready batches that do not show
            it; see ``ToDistributedConfig``.
        timeout_s: the seconds that a rank may keep the others waiting.
        loader: another name for ``dataloader``.

    Returns:
        A loader with ``set_epoch``, ``state_dict`` and ``load_state_dict``. Each ``iter(loader)`` or ``loader()`` reads
        one epoch.

    Raises:
        ValueError: the meshes, keys and dims do not fit each other; the batch size is not a multiple of the number of
            ranks; the dataset is empty or split already; or the ranks' datasets or arguments differ. Every rank raises.

    Example::

        mesh = mw.ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "tp"])
        loader = mw.shard_dataloader(DataLoader(dataset, batch_size=8), mesh, shard_dims="dp")
        for batch in loader:  # ranks 0 and 1 read rows 0-3, ranks 2 and 3 rows 4-7
            ...
    """
    loader = either_name("shard_dataloader", dataloader, loader)
    if loader is None:
        raise ValueError("shard_dataloader got no dataloader; write shard_dataloader(dataloader, meshes)")
    if meshes is None:
        raise ValueError("shard_dataloader got no meshes; write shard_dataloader(dataloader, meshes=mesh)")
    if output not in ("dtensor", "local"):
        raise ValueError(f"output={output!r} must be 'dtensor' or 'local'")
    options = LoaderOptions(
        source=source,
        check_every=check_every,
        seed=seed,
        fingerprint=fingerprint,
        order=order,
        shuffle=shuffle,
        buffer_size=buffer_size,
    )
    is_dtensor = output == "dtensor"
    device = device_for(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if is_dtensor:
        ensure_process_group(timeout_s)
    else:
        start_process_group(device, timeout_s)
    if dist.is_initialized() and active_guard() is None:
        start_guard(timeout=timeout_s, coordinates="")

    def check() -> Claim[list[Targets]]:
        targets = match_targets(meshes, shard_dims, is_dataset_splitted=is_dataset_splitted)
        largest = max(max(target.mesh.ranks) for target in flat(targets))
        if largest >= world_size():
            raise ValueError(
                f"rank {largest} of the meshes is outside the world of {world_size()} process(es); launch more "
                "processes, or use meshes of fewer ranks"
            )
        rows = None if is_dataset_splitted or spread else getattr(loader, "batch_size", None)
        if rows and (uneven := [target for target in flat(targets) if rows % target.axis_size]):
            size, axis = uneven[0].axis_size, uneven[0].axis
            below, above = rows // size * size, -(-rows // size) * size
            raise ValueError(
                f"the loader's batch_size={rows} is not divisible by the {size} ranks of axis {axis!r}; use "
                f"{f'{below} or {above}' if below else above}, or set spread=True to give the ranks different numbers "
                "of rows"
            )
        same = {"meshes": str([(repr(t.mesh), t.axis) for t in flat(targets)]), "input_keys": str(input_keys)}
        return Claim(targets, same | {"options": str((options, output, spread, is_dataset_splitted))})

    targets = _on_all_ranks(check)
    share = chunk_share if is_dtensor else even_share
    device_type = wire_device().type if is_dtensor and device.type == "cpu" else device.type
    dp, peers = _places(targets, device_type)
    placer = Placer(targets, input_keys, share, as_dtensors=is_dtensor, device_type=device_type)
    mesh = LoaderMesh(dp=dp, peers=peers, everyone=_everyone(targets), device=device)

    def make() -> Claim[DistributedLoader]:
        knows_own_rows = is_dataset_splitted or (options.reads_lanes and has_lanes(loader))
        outsiders = set(range(world_size())).difference(*(target.mesh.ranks for target in flat(targets)))
        if outsiders and knows_own_rows:
            raise ValueError(
                f"ranks {sorted(outsiders)} are in none of the meshes, and the rows of lanes or of a split dataset are "
                "known only on ranks that read them; use meshes that contain all ranks, or order='loader'"
            )
        return DistributedLoader(
            loader,
            mesh,
            placer=placer,
            is_dataset_splitted=is_dataset_splitted,
            blanks="weighted",
            options=options,
            format=BatchFormat(dims=batch_dims or {}),
        ).claim()

    return _on_all_ranks(make).agree()


def _on_all_ranks(check: Callable[[], Claim[Result]]) -> Result:
    """Run a check on every rank and return its result. If the check fails on one rank, all ranks raise."""
    return agreed(check)[0] if dist.is_initialized() else check().result


def _places(targets: list[Targets], device_type: str) -> tuple[Axis, Peers]:
    """Return the axis along which ranks read different rows, and the ranks that read the same rows as this rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    everywhere = flat(targets)
    if dist.is_initialized():
        for target in everywhere:  # creating groups is collective, so every rank creates them, in the inputs' order
            target.mesh.to_device_mesh(device_type)
    here = [target for target in everywhere if rank in target.mesh]
    if not here:  # a rank outside all meshes gets empty tensors, and reads rows only for their sizes
        return Axis("outside", size=everywhere[0].axis_size), Peers()
    names = {target.axis for target in here}
    # If the inputs are sharded along different axes, or along none, the rank reads all rows and slices each input.
    name = names.pop() if len(names) == 1 else None
    mesh = here[0].mesh
    axes = {axis: _axis_of(mesh, axis, rank, device_type) for axis in mesh.dim_names}
    dp = axes.pop(name) if name is not None else Axis("dp")
    return dp, Peers(tuple(axes.values()))


def _axis_of(mesh: ProcessMesh, name: str, rank: int, device_type: str) -> Axis:
    axis = place_on(mesh, name, rank)
    if axis.size == 1 or not dist.is_initialized():
        return axis
    return replace(axis, group=mesh.to_device_mesh(device_type).get_group(name))


def _everyone(targets: list[Targets]) -> Peers:
    """Return the ranks of all meshes. All of them use the first rank's random numbers."""
    if not dist.is_initialized():
        return Peers()
    ranks = sorted({rank for target in flat(targets) for rank in target.mesh.ranks})
    is_world = len(ranks) == dist.get_world_size() and backend_of_new_groups() is None
    group = dist.group.WORLD if is_world else shared_group(ranks, "loaders")
    rank = dist.get_rank()
    if rank not in ranks:
        return Peers()
    return Peers((Axis("all", size=len(ranks), rank=ranks.index(rank), group=group),))
