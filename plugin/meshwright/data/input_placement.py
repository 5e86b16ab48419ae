"""Places each input of a batch on its mesh, and checks what becomes a DTensor."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from meshwright.containers import rebuilt
from meshwright.data.global_batches import Portion, Sharing
from meshwright.data.nested import digest, is_dense, kind_of, leaves, map_tensors, take_rows
from meshwright.data.peers import Peers
from meshwright.data.stream import gather_objects
from meshwright.mesh.axes import Axis
from meshwright.mesh.process_mesh import ProcessMesh
from meshwright.parallel.batch.schema import PER_TOKEN
from meshwright.placement import accept_plain_tensors
from meshwright.resharding.layouts import process_mesh
from meshwright.resharding.move import wrap


@dataclass(frozen=True)
class Target:
    """The mesh and the sharding of one input.

    Args:
        mesh: the mesh that the input is placed on.
        axis: the name of the axis that shards the input's rows; None to replicate the input.
    """

    mesh: ProcessMesh
    axis: str | None

    @property
    def axis_size(self) -> int:
        return 1 if self.axis is None else self.mesh.axis_size(self.axis)


Targets = Target | list[Any]  # a list of Targets for an input that is a list itself


def match_targets(meshes: object, shard_dims: object, *, is_dataset_splitted: bool = False) -> list[Targets]:
    """Return the target of each input, or a list with a single target for all inputs.

    Args:
        meshes: a mesh for all inputs, or a list with one mesh per input. For an input that is a list, the entry may be
            a list of meshes.
        shard_dims: the axis that shards the rows, by name or index: one for all meshes, or a list like ``meshes``. None
            replicates the inputs.
        is_dataset_splitted: whether the rows are split already, along ``shard_dims``.

    Raises:
        ValueError: there is no mesh, the lists differ in length, an axis is unknown, a rank is in two different
            meshes, or the dataset is split and ``shard_dims`` is None.

    Example:
        >>> match_targets(ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"]), "dp")[0].axis_size
        2
    """
    entries = list(meshes) if isinstance(meshes, list | tuple) else [meshes]
    if not entries:
        raise ValueError("meshes is empty; pass a ProcessMesh, or one for each input")
    if is_dataset_splitted and shard_dims is None:
        raise ValueError(
            "is_dataset_splitted=True means that the ranks hold different rows, but shard_dims=None means that they "
            "hold the same rows; set shard_dims to the axis along which the dataset was split"
        )
    targets = _match(entries, shard_dims)
    distinct = list(dict.fromkeys(target.mesh for target in flat(targets)))
    for number, mesh in enumerate(distinct):
        for other in distinct[number + 1 :]:
            if shared := sorted(set(mesh.ranks) & set(other.ranks)):
                raise ValueError(
                    f"ranks {shared} are in two different meshes, and would have to read two different sets of rows:\n"
                    f"{mesh}\nand\n{other}\nUse one mesh for both inputs, or meshes without common ranks"
                )
    return targets


def flat(targets: Targets) -> list[Target]:
    """Return the targets as a flat list."""
    if isinstance(targets, Target):
        return [targets]
    return [target for entry in targets for target in flat(entry)]


def _match(entries: Sequence[Any], shard_dims: object) -> list[Targets]:
    dims = list(shard_dims) if isinstance(shard_dims, list | tuple) else [shard_dims] * len(entries)
    if len(dims) != len(entries):
        raise ValueError(
            f"shard_dims has {len(dims)} entries for {len(entries)} meshes; pass one for each, or a single one for all"
        )
    matched: list[Targets] = []
    for entry, dim in zip(entries, dims, strict=True):
        if isinstance(entry, list | tuple):
            matched.append(_match(entry, dim))
        else:
            mesh = process_mesh(entry)
            matched.append(Target(mesh, _axis_name(mesh, dim)))
    return matched


def _axis_name(mesh: ProcessMesh, dim: object) -> str | None:
    if dim is None:
        return None
    if isinstance(dim, str) and dim in mesh.dim_names:
        return dim
    if isinstance(dim, int) and not isinstance(dim, bool) and -mesh.ndim <= dim < mesh.ndim:
        return mesh.dim_names[dim]
    raise ValueError(f"shard_dims={dim!r} is no axis of the mesh, whose axes are {mesh.dim_names}:\n{mesh}")


class Placer:
    """Turns the rows that a rank has read into a batch with every input on its mesh.

    Args:
        targets: the targets of the inputs; a single one applies to all.
        input_keys: the keys of a dict batch that ``targets`` apply to; None for all keys.
        share: the function that chooses a rank's rows of a batch.
        as_dtensors: whether to return DTensors. If not, ``place`` returns this rank's tensors, and None for inputs
            whose mesh does not contain this rank.
        device_type: the device type of the DTensors.
    """

    def __init__(
        self,
        targets: list[Targets],
        input_keys: Sequence[str] | None,
        share: Sharing,
        *,
        as_dtensors: bool,
        device_type: str,
    ):
        if input_keys is not None and len(targets) > 1 and len(input_keys) != len(targets):
            raise ValueError(
                f"input_keys has {len(input_keys)} entries {list(input_keys)} for {len(targets)} meshes; pass one key "
                "per mesh"
            )
        self._targets, self._input_keys, self.share = targets, input_keys, share
        self._device_meshes: dict[ProcessMesh, DeviceMesh] = {}
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self.as_dtensors = as_dtensors
        # If all inputs have the same layout, the rows that were read are already this rank's part of each input.
        here = [target for target in flat(targets) if self._rank in target.mesh]
        self._leaves_as_read = len(here) == len(flat(targets)) and len({target.axis for target in here}) == 1
        if as_dtensors:
            # Creating process groups is collective, so every rank creates all of them, in the order of the inputs.
            for target in flat(targets):
                mesh = self._device_meshes[target.mesh] = target.mesh.to_device_mesh(device_type)
                accept_plain_tensors(mesh)

    def place(self, batch: object, portion: Portion) -> Any:
        """Return the batch with its inputs on their meshes.

        Args:
            batch: this rank's rows.
            portion: the portion that says which rows of the global batch these are.

        Raises:
            ValueError: the batch's inputs do not fit the meshes, or the batch or an input has an unsupported type.
        """
        if isinstance(batch, Mapping):
            keys = list(batch) if self._input_keys is None else list(self._input_keys)
            if missing := [key for key in keys if key not in batch]:
                raise ValueError(f"the batch has no input {missing[0]!r} of input_keys; its keys are {list(batch)}")
            targets = self._targets_for(len(keys), f"inputs {keys}")
            placed = {key: self._place(batch[key], targets[i], portion) for i, key in enumerate(keys)}
            return {key: placed.get(key, value) for key, value in batch.items()}
        if self._input_keys is not None:
            raise ValueError(
                f"input_keys={list(self._input_keys)} needs a dict, but the batch is a {type(batch).__name__}"
            )
        if isinstance(batch, Tensor):
            return self._place(batch, self._targets[0], portion)  # a single tensor is the first input
        if isinstance(batch, list | tuple):
            targets = self._targets_for(len(batch), f"{len(batch)} inputs")
            return self._place_each(batch, targets, portion)
        raise AssertionError(f"a batch cannot be a {type(batch).__name__}")

    def inputs_of(self, batch: object) -> Any:
        """Return the inputs of a batch that are placed on meshes."""
        if self._input_keys is None or not isinstance(batch, Mapping):
            return batch
        return {key: batch[key] for key in self._input_keys if key in batch}

    def _targets_for(self, count: int, what: str) -> list[Targets]:
        if len(self._targets) == 1:
            return self._targets * count
        if len(self._targets) != count:
            raise ValueError(f"the batch has {what}, but there are {len(self._targets)} meshes; pass one per input")
        return self._targets

    def _place(self, value: object, targets: Targets, portion: Portion) -> Any:
        if isinstance(targets, Target):
            if self._leaves_as_read and not self.as_dtensors:
                return value
            return map_tensors(value, self._on(targets, portion))
        if not isinstance(value, list | tuple) or len(value) != len(targets):
            got = f"{len(value)} values" if isinstance(value, list | tuple) else f"a {type(value).__name__}"
            raise ValueError(
                f"meshes has a list of {len(targets)} meshes for this input, so the input must be a list of "
                f"{len(targets)} values, got {got}"
            )
        return self._place_each(value, targets, portion)

    def _place_each(self, values: list[Any] | tuple[Any, ...], targets: list[Targets], portion: Portion) -> Any:
        pairs = zip(values, targets, strict=True)
        return rebuilt(values, [self._place(value, target, portion) for value, target in pairs])

    def _on(self, target: Target, portion: Portion) -> Callable[[Tensor], Any]:
        def place(x: Tensor) -> Any:
            if self.as_dtensors and not is_dense(x):
                raise ValueError(
                    f"an input of the batch is a {kind_of(x)} tensor, which cannot be the rows of a DTensor; return "
                    "x.to_dense() from collate_fn, set output='local', or list only the other inputs in input_keys, "
                    "which leaves this input unchanged"
                )
            has_rows = x.ndim > 0 and x.shape[0] == portion.held
            is_sharded = has_rows and not self.share(portion.total, Axis("", target.axis_size)).is_replicated
            is_sharded &= target.axis is not None
            if is_sharded and portion.is_whole and self._rank in target.mesh:
                if not self.as_dtensors and portion.total % target.axis_size:
                    raise ValueError(
                        f"a batch of {portion.total} rows cannot be divided evenly over axis {target.axis!r} of size "
                        f"{target.axis_size}. Other inputs have another layout, so loader.weight cannot correct the "
                        "loss; use output='dtensor', or set drop_last=True"
                    )
                assert target.axis is not None
                share = self.share(portion.total, place_on(target.mesh, target.axis, self._rank))
                x = take_rows(x, slice(share.low, share.high))
            if not self.as_dtensors:
                return x if self._rank in target.mesh else None
            mesh = target.mesh
            shape = (portion.total, *x.shape[1:]) if has_rows else tuple(x.shape)
            placements = [Shard(0) if is_sharded and name == target.axis else Replicate() for name in mesh.dim_names]
            return wrap(x, self._device_meshes[mesh], placements, shape)

        return place


def place_on(mesh: ProcessMesh, axis: str, rank: int) -> Axis:
    """Return the place of a rank of a mesh on one of its axes, without the axis's process group."""
    coordinate = mesh.coordinate(rank)
    assert coordinate is not None
    return Axis(axis, mesh.axis_size(axis), coordinate[mesh.dim_names.index(axis)])


logger = logging.getLogger(__name__)


def check_dtensors(portion: Portion, own: str, dp: Axis, where: str) -> None:
    """Raise on all ranks of the axis unless the inputs that become DTensors fit together.

    Args:
        portion: this rank's portion of the batch, of which these inputs are left.
        own: their dtypes and sizes, as text.
        dp: the axis over whose ranks the rows are sharded.
        where: the step, as a text for the message.

    Raises:
        ValueError: the inputs have different dtypes or sizes, or a tensor that is not sharded by rows differs.
    """
    if len(set(map(tuple, Peers((dp,)).gather(zlib.crc32(own.encode()))))) > 1:
        signatures = gather_objects(own, dp)
        said = "; ".join(f"{{{text}}} on rank {rank} of {dp.name}" for rank, text in enumerate(signatures))
        raise ValueError(
            f"{where}: the inputs differ in dtype or size between ranks: {said}. The rows of a DTensor must have the "
            "same length on all ranks: pad all batches to one length, or use output='local'"
        )
    if portion.is_whole:
        return
    kept = {name: x for name, x in leaves(portion.batch) if isinstance(x, Tensor)}
    kept = {name: x for name, x in kept.items() if not x.ndim or x.shape[0] != portion.held}
    if len(set(map(tuple, Peers((dp,)).gather(digest(kept))))) > 1:
        raise ValueError(
            f"{where}: the ranks have different values of {', '.join(kept)}. These cannot be sharded by rows, since "
            f"their first dim is not the number of rows ({portion.held} on this rank), so as DTensors they must be the "
            "same on all ranks; leave them out of the batch, or use output='local'"
        )


def warn_without_labels(batch: object) -> None:
    """Log a warning if a batch has a causal LM's inputs but no labels."""
    if isinstance(batch, Mapping) and "input_ids" in batch and set(PER_TOKEN).issuperset(batch):
        logger.warning(
            "the loader's batches have %s but no labels, so model(**batch).loss is None and has no backward(). Add "
            "them in the collate function, for example batch['labels'] = batch['input_ids'].clone(), or use "
            "transformers' DataCollatorForLanguageModeling(tokenizer, mlm=False). A loss of your own needs no labels.",
            ", ".join(map(str, batch)),
        )
