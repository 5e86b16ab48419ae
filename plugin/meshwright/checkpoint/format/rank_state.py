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
from torch import nn
from torch.optim import Optimizer

from meshwright.checkpoint.files.lineage import LAST_TIME
from meshwright.checkpoint.format.assign_writes import Held, assign_writes
from meshwright.checkpoint.format.manifest import Manifest
from meshwright.checkpoint.format.model_config import model_config
from meshwright.checkpoint.format.part_files import RankPart, Source
from meshwright.checkpoint.format.random_state import Random, random_state
from meshwright.checkpoint.format.run_tensors import Mesh, RankOptimizer, RunTensor, model_tensors
from meshwright.checkpoint.format.snapshot import as_of_now
from meshwright.checkpoint.one_device.blocks import Block
from meshwright.checkpoint.one_device.save_optimizer import of_all, own_text
from meshwright.checkpoint.one_device.streamed_files import Form
from meshwright.optim.runtime import Runtime, device_of
from meshwright.plan.config import ParallelPlan

_LIBRARIES = ("meshwright", "torch", "transformers", "accelerate", "numpy")


@dataclass(frozen=True, kw_only=True)
class RankState:
    """What this rank has of a run.

    The call that saves only makes one of these. All that is derived from it, which takes several times longer, can be
    computed in a thread, while training goes on.

    Args:
        mesh: the rank's place.
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
    weights: dict[str, RunTensor]
    ties: dict[str, str]
    optimizer: RankOptimizer | None
    random: Callable[[], Random]
    config: Callable[[], dict[str, str] | None]
    plan: ParallelPlan | None
    states: dict[str, Any]

    @staticmethod
    def of(
        model: nn.Module, optimizer: Optimizer | None, runtime: Runtime, mesh: Mesh, states: dict[str, Any]
    ) -> RankState:
        """Look at a model and its optimizer.

        Raises:
            OptimizerMismatchError: if the optimizer belongs to another model.
            CheckpointError: if a checkpoint cannot hold a tensor of the model, or the optimizer's state or options.
        """
        weights, ties, _ = model_tensors(model, runtime)
        device = device_of(model)
        return RankState(
            mesh=mesh,
            device=device,
            weights=weights,
            ties=ties,
            optimizer=None if optimizer is None else RankOptimizer.of(model, optimizer),
            random=random_state(device),
            config=model_config(model),
            plan=runtime.plan,
            states={**states, "streams": None if runtime.streams is None else runtime.streams.state_dict()},
        )

    def as_of_now(self) -> RankState:
        """Return the run with the present values of all tensors, whatever the program writes to them later."""
        weights = {
            key: replace(tensor, values=as_of_now(tensor.values))
            if self.mesh.place.pp in tensor.held.stages  # the others are empty, and would become whole
            else tensor
            for key, tensor in self.weights.items()
        }
        if self.optimizer is None:
            return replace(self, weights=weights)
        values = {key: as_of_now(values) for key, values in self.optimizer.values.items()}
        return replace(self, weights=weights, optimizer=replace(self.optimizer, values=values))

    def text(self) -> str:
        """Return what :meth:`planned` needs of each rank."""
        return "" if self.optimizer is None else own_text(self.optimizer.found, self.optimizer.state)

    def planned(self, texts: list[str]) -> tuple[RankPart, Callable[[], Manifest]]:
        """Return what this rank writes, and a function that returns the manifest without the records of the files.

        Args:
            texts: the texts of all ranks.
        """
        tensors, fields = dict(self.weights), None
        if self.optimizer is not None:
            found, state = of_all(self.optimizer.found, texts)
            optimizer = replace(self.optimizer, found=found)
            tensors |= optimizer.tensors(state, self.device)
            fields = optimizer.fields(state)

        sources = _sources(tensors, self.mesh)
        forms = {key: (tensor.held.dtype, tensor.held.shape) for key, tensor in tensors.items()}
        rest = replace(self, weights={}, optimizer=None)  # so that tensors are freed as soon as they are copied
        part = RankPart(place=self.mesh.index, sources=sources, random=self.random)
        return part, functools.partial(rest._manifest, forms, fields)

    def _manifest(self, forms: dict[str, Form], fields: dict[str, Any] | None) -> Manifest:
        return Manifest(
            written=min(time.time_ns(), LAST_TIME),
            versions=dict(_versions()),
            plan=None if self.plan is None else asdict(self.plan),
            ranks=self.mesh.sizes.ranks,
            mesh=self.mesh.sizes.by_axis,
            tensors=forms,
            ties=self.ties,
            optimizer=fields,
            model_config=self.config(),
            files={},
            **self.states,
        )


def _sources(tensors: dict[str, RunTensor], mesh: Mesh) -> dict[str, Source]:
    """What this rank writes."""
    own = _own_shares(tuple((key, tensor.held) for key, tensor in tensors.items()), mesh)
    return {
        key: Source(dtype=tensors[key].held.dtype, values=tensors[key].values, held=held, share=share)
        for key, (held, share) in own.items()
    }


# This is the same at each save of a run, and takes longer to compute than all else before the copy.
@functools.lru_cache(maxsize=1)
def _own_shares(tensors: tuple[tuple[str, Held], ...], mesh: Mesh) -> dict[str, tuple[list[Block], list[Block]]]:
    """For each tensor that this rank writes a part of: the elements that it holds, and those that it writes."""
    held = dict(tensors)
    own = assign_writes(held, mesh.sizes)[mesh.index]
    return {key: (held[key].part(mesh.place), share) for key, share in own.items()}


@functools.cache  # reading them takes longer than any other preparation of a save
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
