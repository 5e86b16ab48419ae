"""The run that is saved or loaded, and what one rank has and writes of it.

Each element of a checkpoint is written once, and the writing is spread evenly over the ranks that hold it. The
configuration files of a transformers model are saved too. They are found by duck typing: the core does not import
transformers.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.checkpoint.files.reading import LAST_TIME
from meshwright.checkpoint.format.checkpoint_folders import CONFIG_NAMES, Manifest
from meshwright.checkpoint.format.object_states import Random, random_state
from meshwright.checkpoint.format.part_files import RankPart, Source, as_of_now
from meshwright.checkpoint.one_device.rank_optimizer import RankOptimizer, RankTensor
from meshwright.checkpoint.one_device.safetensors_file import DTYPES, Form
from meshwright.compiling import without_compilation
from meshwright.errors import CheckpointError
from meshwright.layout.packed_weights import state_without_packed
from meshwright.layout.row_layout import StridedBlock, between, numel, packed
from meshwright.layout.tensor_layout import TensorLayout, layout_if_any
from meshwright.mesh.axes import Mesh, Place
from meshwright.optim.owners import check_no_engine
from meshwright.optim.runtime import Runtime, device_of, find_runtime
from meshwright.parallel.dropout_streams import DropoutStreams
from meshwright.plan.config import ParallelPlan
from meshwright.roles.adapters import wrapped


@dataclass(frozen=True, kw_only=True)
class Run:
    """A model, distributed or not, as a checkpoint sees it.

    Args:
        model: the model, without what ``torch.compile`` puts around it.
        runtime: its runtime, or one of a single rank.
        device: its device.
        mesh: its mesh, without process groups, which a save in the background must not keep alive.
    """

    model: nn.Module
    runtime: Runtime
    device: torch.device
    mesh: Mesh

    @staticmethod
    def of(call: str, folder: object, model: nn.Module, optimizer: object) -> Run:
        """Look at the first three arguments of ``save_checkpoint`` or ``load_checkpoint``.

        Raises:
            CheckpointError: if one has the type of another; the message names it and their order.
        """
        wrong = None
        if not isinstance(folder, str | os.PathLike):
            wrong = f"folder is {_kind(folder)}, not a path"
        elif not isinstance(model, nn.Module):
            wrong = f"model is {_kind(model)}, not a module"
        elif optimizer is not None and not hasattr(optimizer, "param_groups"):  # engines wrap theirs in other classes
            wrong = f"optimizer is {_kind(optimizer)}, not an optimizer"
        if wrong is not None:
            raise CheckpointError(f"{wrong}; write mw.{call}(folder, model, optimizer, ...)")
        model = without_compilation(model)
        runtime = find_runtime(model) or Runtime(mesh=Mesh())
        return Run(model=model, runtime=runtime, device=device_of(model), mesh=runtime.mesh.without_groups())

    def check(self) -> None:
        """Check that a checkpoint can hold the run.

        Raises:
            CheckpointError: if an engine holds the model's state, or several processes the model, and it is not
                distributed over them.
        """
        check_no_engine(self.model)
        ranks = self.mesh.size
        # If the process group is gone, compare_before_save says so.
        processes = dist.get_world_size() if dist.is_initialized() else ranks
        if ranks != processes:
            raise CheckpointError(
                f"the model is distributed over {ranks} of {processes} processes, but a checkpoint needs all of them; "
                "pass the model that to_distributed returned, or shard over all: shard_optimizer(optimizer)"
            )

    def model_tensors(self) -> tuple[dict[str, RankTensor], dict[str, str], dict[str, Tensor]]:
        """Return the model's parameters and persistent buffers.

        Returns:
            The tensors by key, the key of each tied weight's values by its other keys, and the model's own tensor
            objects by key.
        """
        tensors: dict[str, RankTensor] = {}
        ties: dict[str, str] = {}
        objects: dict[str, Tensor] = {}
        first: dict[int, str] = {}
        for name, tensor in state_without_packed(self.model).items():
            key = f"weights/{name}"
            if not isinstance(tensor, Tensor):
                raise CheckpointError(
                    f"{name} of the model's state_dict is a {type(tensor).__name__}, and a checkpoint holds its "
                    "tensors only. Save it as extra=..."
                )
            if tensor.dtype not in DTYPES.values() or tensor.layout is not torch.strided:
                raise CheckpointError(
                    f"{name} of the model's state_dict is {tensor.dtype}, {tensor.layout}, which safetensors files do "
                    "not hold. Register it with persistent=False, or convert it"
                )
            if id(tensor) in first:
                ties[key] = first[id(tensor)]
                continue
            first[id(tensor)] = key
            objects[key] = tensor
            tensors[key] = self._tensor(tensor)
        return tensors, ties, objects

    def _tensor(self, tensor: Tensor) -> RankTensor:
        weights, layout = self.runtime.weights, layout_if_any(tensor)
        if weights is not None and isinstance(tensor, nn.Parameter):
            layout = weights.layout(tensor)
            return RankTensor(dtype=tensor.dtype, layout=layout, values=lambda: weights.part(tensor).detach())
        layout = layout or TensorLayout(shape=tensor.shape)
        return RankTensor(dtype=tensor.dtype, layout=layout, values=lambda: tensor.detach().reshape(-1))


def _kind(value: object) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"


logger = logging.getLogger(__name__)

_LIBRARIES = ("meshwright", "torch", "transformers", "accelerate", "numpy")
_SPLIT = 2**16  # bytes; a smaller part is written by one rank, since each piece of it costs a line in the index


@dataclass(frozen=True, kw_only=True)
class RankState:
    """What this rank has of a run.

    The call that saves only makes one of these. All that is derived from it, which takes several times longer, can be
    computed in a thread, while training goes on.

    Args:
        mesh: the mesh, with the rank's place on it.
        device: the device of the model.
        weights: the model's tensors by key.
        ties: the key of each tied weight's values by its other keys.
        optimizer: what the rank has of the optimizer; None without one.
        random: function that returns the rank's random states.
        config: function that returns the model's configuration files.
        plan: the plan of the model; None if it was not distributed.
        states: the rest of the manifest, the same on all ranks.
    """

    mesh: Mesh
    device: torch.device
    weights: dict[str, RankTensor]
    ties: dict[str, str]
    optimizer: RankOptimizer | None
    random: Callable[[], Random]
    config: Callable[[], dict[str, str] | None]
    plan: ParallelPlan | None
    states: dict[str, Any]

    @staticmethod
    def of(run: Run, optimizer: Optimizer | None, states: dict[str, Any]) -> RankState:
        """Look at a run and its optimizer.

        Raises:
            OptimizerMismatchError: if the optimizer belongs to another model.
            CheckpointError: if a checkpoint cannot hold a tensor of the model, or the optimizer's state or options.
        """
        weights, ties, _ = run.model_tensors()
        streams = run.runtime.features.find(DropoutStreams)
        return RankState(
            mesh=run.mesh,
            device=run.device,
            weights=weights,
            ties=ties,
            optimizer=None if optimizer is None else RankOptimizer.of(run.model, optimizer),
            random=random_state(run.device),
            config=model_config(run.model),
            plan=run.runtime.plan,
            states={**states, "streams": None if streams is None else streams.state_dict()},
        )

    def as_of_now(self) -> RankState:
        """Return the run with the present values of all tensors, whatever the program writes to them later."""
        weights = {
            key: replace(tensor, values=as_of_now(tensor.values))
            if tensor.layout.is_held  # the others are empty, and would become whole
            else tensor
            for key, tensor in self.weights.items()
        }
        if self.optimizer is None:
            return replace(self, weights=weights)
        values = {key: as_of_now(values) for key, values in self.optimizer.values.items()}
        return replace(self, weights=weights, optimizer=replace(self.optimizer, values=values))

    def text(self) -> str:
        """Return what :meth:`planned` needs of each rank."""
        return "" if self.optimizer is None else self.optimizer.text()

    def planned(self, texts: list[str]) -> tuple[RankPart, Callable[[], Manifest]]:
        """Return what this rank writes, and a function that returns the manifest without the records of the files.

        Args:
            texts: the texts of all ranks.
        """
        tensors, fields = dict(self.weights), None
        if self.optimizer is not None:
            optimizer = self.optimizer.with_all(texts)
            tensors |= optimizer.tensors(self.device)
            fields = vars(optimizer.manifest())

        forms = {key: tensor.form for key, tensor in tensors.items()}
        rest = replace(self, weights={}, optimizer=None)  # so that tensors are freed as soon as they are copied
        part = RankPart(place=self.mesh.index, sources=self._sources(tensors), random=self.random)
        return part, functools.partial(rest._manifest, forms, fields)

    def _sources(self, tensors: dict[str, RankTensor]) -> dict[str, Source]:
        """What this rank writes."""
        layouts = tuple((key, (tensor.dtype, tensor.layout)) for key, tensor in tensors.items())
        own = _own_shares(layouts, self.mesh)
        return {
            key: Source(dtype=tensors[key].dtype, values=tensors[key].values, held=held, share=share)
            for key, (held, share) in own.items()
        }

    def _manifest(self, forms: dict[str, Form], fields: dict[str, Any] | None) -> Manifest:
        return Manifest(
            written=min(time.time_ns(), LAST_TIME),
            versions=dict(_versions()),
            plan=None if self.plan is None else asdict(self.plan),
            ranks=self.mesh.size,
            mesh=self.mesh.sizes,
            tensors=forms,
            ties=self.ties,
            optimizer=fields,
            model_config=self.config(),
            files={},
            **self.states,
        )


# This is the same at each save of a run, and takes longer to compute than all else before the copy.
@functools.lru_cache(maxsize=1)
def _own_shares(
    tensors: tuple[tuple[str, tuple[torch.dtype, TensorLayout]], ...], mesh: Mesh
) -> dict[str, tuple[list[StridedBlock], list[StridedBlock]]]:
    """For each tensor that this rank writes a part of: the elements that it holds, and those that it writes."""
    layouts = dict(tensors)
    own = assign_writes(layouts, mesh.places)[mesh.index]
    return {key: (layouts[key][1].blocks(mesh.place), share) for key, share in own.items()}


@functools.cache  # reading them takes longer than any other preparation of a save
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def assign_writes(
    tensors: Mapping[str, tuple[torch.dtype, TensorLayout]], places: Sequence[Place]
) -> list[dict[str, list[StridedBlock]]]:
    """Return what each rank writes of each tensor, by the rank's index; every rank computes the same.

    The blocks of a share have the positions in the rank's file as storage, contiguous from 0 on.

    Args:
        tensors: the dtype and the layout of each tensor.
        places: the coordinates of all ranks.
    """
    found: list[dict[str, list[StridedBlock]]] = [{} for _ in places]
    load = [0] * len(places)  # bytes

    def lightest(ranks: Sequence[int]) -> int:
        return min(ranks, key=load.__getitem__)

    for name, (dtype, layout) in tensors.items():
        for shards, spans in layout.regions(places):
            # The slices of two shards may begin at other rows, so that the ranks of one shard write for all.
            for ranks in min(shards, key=lambda groups: sum(load[lightest(ranks)] for ranks in groups)):
                share = packed(layout.blocks(places[ranks[0]], spans))
                total = numel(share)
                writers = ranks if total * dtype.itemsize >= _SPLIT else [lightest(ranks)]
                borders = [total * index // len(writers) for index in range(len(writers) + 1)]
                for rank, (start, stop) in zip(writers, pairwise(borders), strict=True):
                    if start < stop:
                        part = share if len(writers) == 1 else between(share, start, stop)
                        found[rank].setdefault(name, []).extend(part)
                        load[rank] += (stop - start) * dtype.itemsize
    return [{name: packed(blocks) for name, blocks in share.items()} for share in found]


def model_config(model: nn.Module) -> Callable[[], dict[str, str] | None]:
    """Return a function that returns the texts of a model's ``config.json`` and ``generation_config.json``, by name.

    The texts are of the present values, also if a thread calls the function later. They are None if there are none.
    A model in PEFT's wrappers has none: its names are those of the wrappers, and ``from_pretrained`` would find no
    weight of its config.
    """
    configs: dict[str, Any] = {}
    for name in CONFIG_NAMES if wrapped(model) is None else ():
        config = getattr(model, name.removesuffix(".json"), None)
        if callable(getattr(config, "to_json_string", None)):
            try:
                configs[name] = copy.deepcopy(config)
            except Exception as error:  # of whatever the program has put on it, a lock for example
                logger.warning("the checkpoint has no %s, since it cannot be copied: %s", name, error)
    architecture = type(model).__name__

    def texts() -> dict[str, str] | None:
        found = {}
        for name, config in configs.items():
            try:
                fields = json.loads(config.to_json_string())
            except (TypeError, ValueError) as error:
                logger.warning("the checkpoint has no %s, since it is not JSON: %s", name, error)
                continue
            found[name] = fields
        if "config.json" in found:
            found["config.json"]["architectures"] = [architecture]  # as save_pretrained does
        return {name: _text(fields) for name, fields in found.items()} or None

    return texts


def with_dtype(text: str, dtype: str) -> str:
    """Return a ``config.json`` for weights of a dtype."""
    fields: dict[str, object] = json.loads(text)
    fields.pop("torch_dtype", None)  # its name before transformers 5
    return _text({**fields, "dtype": dtype})


def ties_weights(text: str) -> bool:
    """Whether ``from_pretrained`` ties the weights of a model with this ``config.json``."""
    fields = json.loads(text)
    parts = [fields, fields.get("text_config")]
    return any(isinstance(part, dict) and part.get("tie_word_embeddings") is True for part in parts)


def _text(fields: dict[str, object]) -> str:
    return json.dumps(fields, indent=2, sort_keys=True) + "\n"
