"""What one rank has of a run at the time of a save, and what it writes once it knows what the others have."""

from __future__ import annotations

import functools
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import Any

import torch
from torch.optim import Optimizer

from meshwright.checkpoint.files.lineage import LAST_TIME
from meshwright.checkpoint.format.assign_writes import assign_writes
from meshwright.checkpoint.format.manifest import Manifest
from meshwright.checkpoint.format.model_config import model_config
from meshwright.checkpoint.format.part_files import RankPart, Source
from meshwright.checkpoint.format.random_state import Random, random_state
from meshwright.checkpoint.format.run import Run
from meshwright.checkpoint.format.snapshot import as_of_now
from meshwright.checkpoint.one_device.rank_optimizer import RankOptimizer, RankTensor
from meshwright.checkpoint.one_device.safetensors_file import Form
from meshwright.layout.blocks import StridedBlock
from meshwright.layout.tensor_layout import TensorLayout
from meshwright.mesh.axes import Mesh
from meshwright.parallel.dropout_streams import DropoutStreams
from meshwright.plan.config import ParallelPlan

_LIBRARIES = ("meshwright", "torch", "transformers", "accelerate", "numpy")


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
            fields = vars(optimizer.manifest({}))

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
            optimizer=fields and {key: x for key, x in fields.items() if key not in ("weight_map", "format")},
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
