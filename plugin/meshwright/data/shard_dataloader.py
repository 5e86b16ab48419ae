"""``shard_dataloader``: a stock DataLoader made one that knows the mesh."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from meshwright.config import LoaderOptions, Source
from meshwright.data.global_batches import chunk_share, even_share
from meshwright.data.input_placement import Placer, Target, Targets, flat, match_targets
from meshwright.data.loader import DistributedLoader
from meshwright.data.peers import Peers
from meshwright.data.readers.stream_shards import has_shards
from meshwright.faults.guard import active_guard, start_guard
from meshwright.faults.same_call import Claim, agreed
from meshwright.mesh.process_group import device_for, ensure_process_group, start_process_group, wire_device, world_size
from meshwright.mesh.process_mesh import ProcessMesh
from meshwright.parallel.collectives import Axis


def shard_dataloader(
    dataloader: Iterable[Any] | None = None,
    meshes: Any = None,
    input_keys: Sequence[str] | None = None,
    shard_dims: Any = None,
    is_dataset_splitted: bool = False,
    *,
    output: Literal["dtensor", "local"] = "dtensor",
    spread: bool = False,
    source: Source = "each",
    check_every: int = 50,
    seed: int | None = None,
    fingerprint: str | None = None,
    shuffle: bool = False,
    buffer_size: int = 1000,
    timeout_s: float = 120.0,
    loader: Iterable[Any] | None = None,
) -> DistributedLoader:
    """Return a loader that reads on each rank the rows it needs, and gives every input on its mesh.

    Ranks along the sharded axis read different rows, ranks along the others the same. The loader's batch size is the
    global one; with ``is_dataset_splitted`` it is that of each rank. Every rank of the world makes this call, and
    iterates.

    Args:
        dataloader: a DataLoader over a map-style or iterable dataset, or any iterable of batches. A batch is a tensor,
            a tuple or list of inputs, or a dict of them; an input may be a nested list or dict. Values that are no
            tensors pass through.
        meshes: a ``ProcessMesh`` (or torch's ``DeviceMesh``) for all inputs, or a list with one for each, in which a
            list stands for an input that is a list itself. A batch that is a single tensor goes on the first.
        input_keys: the inputs of a dict batch that ``meshes`` speak of, one for each; other keys stay as they are.
        shard_dims: the axis along which rows are sharded, by name or index: one for all meshes, or a list like
            ``meshes``. None gives every rank all rows.
        is_dataset_splitted: the ranks' datasets are different parts already; each reads its own.
        output: "dtensor", or "local" tensors on this rank's device, where an input on other ranks is None.
        spread: accept batches that do not divide over the ranks. With local output a mean over a rank's rows must then
            be multiplied by the loader's ``weight``.
        source: "each" rank reads, or the "leader" of those that need the same rows reads for all of them.
        check_every: compare the rows of ranks that must have the same in step 0 and every so many steps; 0: never.
        seed: of the shuffling; by default the loader's generator or, without one, torch's random state on rank 0.
        fingerprint: a name for the dataset, instead of one made from what it holds.
        shuffle, buffer_size: shuffle an iterable dataset with numbered shards, so many samples together.
        timeout_s: seconds that a rank may keep the others waiting.
        loader: another name of ``dataloader``.

    Returns:
        A loader whose every ``iter`` or call is an epoch, with ``set_epoch``, ``state_dict`` and ``load_state_dict``.

    Raises:
        ValueError: on every rank alike: meshes, keys or dims that do not fit each other; a batch that does not divide
            over the ranks; an empty dataset; one that is split already; ranks whose datasets or arguments differ.

    Example::

        mesh = mw.ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "tp"])
        loader = mw.shard_dataloader(DataLoader(dataset, batch_size=8), mesh, shard_dims="dp")
        for batch in loader:  # ranks 0 and 1 read rows 0-3, ranks 2 and 3 rows 4-7
            ...
    """
    loader = _only(dataloader, loader)
    if meshes is None:
        raise ValueError("shard_dataloader got no meshes; write shard_dataloader(dataloader, meshes=mesh)")
    if output not in ("dtensor", "local"):
        raise ValueError(f"output={output!r} must be 'dtensor' or 'local'")
    options = LoaderOptions(
        source=source,
        check_every=check_every,
        seed=seed,
        fingerprint=fingerprint,
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
            raise ValueError(f"rank {largest} of the meshes is outside the world of {world_size()} process(es)")
        if not (is_dataset_splitted or spread):
            _check_divides(loader, flat(targets))
        same = {"meshes": str([(repr(t.mesh), t.axis) for t in flat(targets)]), "input_keys": str(input_keys)}
        return Claim(targets, same | {"options": str((options, output, spread, is_dataset_splitted))})

    targets = _on_all_ranks(check)
    share = chunk_share if is_dtensor else even_share
    device_type = wire_device().type if is_dtensor and device.type == "cpu" else device.type
    dp, peers = _places(targets, device_type)
    placer = Placer(targets, input_keys, share, as_dtensors=is_dtensor, device_type=device_type)
    everyone = _everyone(targets)

    def make() -> Claim[DistributedLoader]:
        _check_outsiders(loader, flat(targets), is_dataset_splitted)
        return DistributedLoader(
            loader,
            dp=dp,
            peers=peers,
            everyone=everyone,
            device=device,
            share=share,
            placer=placer,
            is_dataset_splitted=is_dataset_splitted,
            masks_blanks=False,
            options=options,
        ).claim()

    return _on_all_ranks(make).agree()


def _only(dataloader: Iterable[Any] | None, loader: Iterable[Any] | None) -> Iterable[Any]:
    """The loader, by whichever of its two names it came."""
    if dataloader is not None and loader is not None:
        raise ValueError("shard_dataloader got dataloader= and loader=, two names of one argument; leave one out")
    found = dataloader if loader is None else loader
    if found is None:
        raise ValueError("shard_dataloader got no dataloader; write shard_dataloader(dataloader, meshes)")
    return found


def _on_all_ranks(check: Any) -> Any:
    """The result of a check that every rank makes, or an error on all of them."""
    return agreed(check)[0] if dist.is_initialized() else check().result


def _check_divides(loader: Any, targets: Sequence[Target]) -> None:
    """Raise if some mesh cannot share out a full batch evenly.

    Raises:
        ValueError: naming both numbers and the sizes that fit.
    """
    batch_size = getattr(loader, "batch_size", None)
    for target in targets:
        size = target.axis_size
        if batch_size and batch_size % size:
            below, above = batch_size // size * size, -(-batch_size // size) * size
            fitting = f"{below} or {above}" if below else str(above)
            raise ValueError(
                f"the loader's batch_size={batch_size} does not divide over the {size} ranks of axis {target.axis!r}; "
                f"use {fitting}, or set spread=True to give the ranks different numbers of rows"
            )


def _check_outsiders(loader: Any, targets: Sequence[Target], is_dataset_splitted: bool) -> None:
    """Ranks in no mesh read rows by themselves, which these ways of reading do not allow."""
    outsiders = set(range(world_size())).difference(*(target.mesh.ranks for target in targets))
    if outsiders and (is_dataset_splitted or has_shards(loader)):
        raise ValueError(
            f"ranks {sorted(outsiders)} are in none of the meshes, and the rows of a stream or of a split dataset are "
            "known only on ranks that read them; use meshes that hold all ranks, or a map-style dataset"
        )


def _places(targets: list[Targets], device_type: str) -> tuple[Axis, Peers]:
    """This rank's place among those that read different rows, and among those that read the same."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    everywhere = flat(targets)
    if dist.is_initialized():
        for target in everywhere:  # creating groups is collective: on every rank, in the order of the inputs
            target.mesh.to_device_mesh(device_type)
    here = [target for target in everywhere if rank in target.mesh]
    if not here:  # its tensors are empty, and rows are read for their sizes only
        return Axis("outside", size=everywhere[0].axis_size), Peers()
    names = {target.axis for target in here}
    # Inputs that are sharded along different axes, or not at all, need all rows to be read and each cut by itself.
    name = names.pop() if len(names) == 1 else None
    mesh = here[0].mesh
    axes = {axis: _axis_of(mesh, axis, rank, device_type) for axis in mesh.dim_names}
    dp = axes.pop(name) if name is not None else Axis("dp")
    return dp, Peers(tuple(axes.values()))


def _axis_of(mesh: ProcessMesh, name: str, rank: int, device_type: str) -> Axis:
    coordinate = mesh.coordinate(rank)
    assert coordinate is not None
    size, place = mesh.axis_size(name), coordinate[mesh.dim_names.index(name)]
    if size == 1 or not dist.is_initialized():
        return Axis(name, size, place)
    return Axis(name, size, place, mesh.to_device_mesh(device_type).get_group(name))


def _everyone(targets: list[Targets]) -> Peers:
    """All ranks of all meshes, of which the first one's random numbers hold."""
    if not dist.is_initialized():
        return Peers()
    ranks = sorted({rank for target in flat(targets) for rank in target.mesh.ranks})
    is_world = len(ranks) == dist.get_world_size()
    group = dist.group.WORLD if is_world else dist.new_group(ranks)
    rank = dist.get_rank()
    if rank not in ranks:
        return Peers()
    return Peers((Axis("all", size=len(ranks), rank=ranks.index(rank), group=group),))
