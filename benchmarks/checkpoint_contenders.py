"""The contenders that save and load a checkpoint: this project, torch's distributed checkpoints, and accelerate."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import meshwright as mw
from benchmarks import contenders
from benchmarks.workload import Workload
from meshwright.optim.owners import parts_of, unwrapped
from meshwright.parallel.shards.state_of_parts import state_of


class WrongAnswer(RuntimeError):
    """Raised if a contender does not load what it saved, so that its time is meaningless."""


class Saver(contenders.Contender):
    """A trained model on this rank, and how its library saves and loads it."""

    saved: Path  # the folder of its first save, from which it loads

    def save(self, folder: Path) -> None:
        """Save into a folder that does not exist; every rank makes the call."""
        raise NotImplementedError

    def load(self, folder: Path) -> None:
        """Load what ``save`` wrote; every rank makes the call."""
        raise NotImplementedError

    def drop_state(self) -> None:
        """Remove the optimizer's state, which a new process does not have either."""
        unwrapped(self.optimizer).state.clear()

    def tensors(self) -> Iterator[Tensor]:
        """Yield this rank's weights and optimizer state."""
        for group in self.optimizer.param_groups:
            for weight in group["params"]:
                yield from (_local(x) for x in (weight.detach(), *self.optimizer.state[weight].values()))

    def check(self, folder: Path) -> None:
        """Save, overwrite all with zeros, and load.

        Raises:
            WrongAnswer: if a tensor is not what it was.
        """
        self.save(folder)
        before = [tensor.clone() for tensor in self.tensors()]
        for tensor in self.tensors():
            tensor.zero_()
        self.load(folder)
        after = list(self.tensors())
        if len(before) != len(after) or not all(map(torch.equal, before, after)):
            raise WrongAnswer(f"{type(self).__name__} did not load what it saved")


class Ours(Saver, contenders.Ours):
    """``mw.save_checkpoint`` and ``mw.load_checkpoint``."""

    def save(self, folder: Path) -> None:
        mw.save_checkpoint(folder, self.model, self.optimizer)

    def load(self, folder: Path) -> None:
        mw.load_checkpoint(folder, self.model, self.optimizer)

    def save_in_background(self, folder: Path) -> None:
        mw.save_checkpoint(folder, self.model, self.optimizer, asynchronous=True)

    def tensors(self) -> Iterator[Tensor]:
        found = parts_of(self.model, self.optimizer)
        for part in found.parts.values():
            if part.key is not None:
                yield part.key.detach()
                yield from (x for x in state_of(found.optimizer, part.key).values() if isinstance(x, Tensor))


class FullySharded(Saver):
    """torch's FSDP2, and its checkpoint with the calls that torch's tutorial shows.

    Args:
        workload: what to train.
        sync_files: whether the writer flushes its files to the disk, as it does by default.
    """

    def __init__(self, workload: Workload, sync_files: bool = True):
        self.model, self.sync_files = workload.model(), sync_files
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = workload.optimizer(self.model.parameters())
        self.batch = workload.batch(part=dist.get_rank(), parts=dist.get_world_size())

    def save(self, folder: Path) -> None:
        self.write(self.state(), folder)

    def load(self, folder: Path) -> None:
        state = self.state()
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def write(self, state: dict[str, Any], folder: Path) -> None:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, sync_files=self.sync_files))


class ReadyState(FullySharded):
    """``FullySharded`` without the time for state dicts: it writes DTensors that exist, and reads into them."""

    def step(self) -> Tensor | None:
        loss = super().step()
        self.ready = self.state()
        return loss

    def save(self, folder: Path) -> None:
        self.write(self.ready, folder)

    def load(self, folder: Path) -> None:
        dcp.load(self.ready, storage_reader=dcp.FileSystemReader(folder))


class Accelerated(Saver):
    """accelerate's ``save_state`` and ``load_state`` under DDP; it has no FSDP on the CPU.

    Args:
        workload: what to train.
        sync_files: whether to flush the files to the disk after the save; accelerate does not.
    """

    def __init__(self, workload: Workload, sync_files: bool):
        from accelerate import Accelerator

        self.accelerator, self.sync_files = Accelerator(cpu=True), sync_files
        model = workload.model()
        self.model, self.optimizer = self.accelerator.prepare(model, workload.optimizer(model.parameters()))
        self.batch = workload.batch(part=dist.get_rank(), parts=dist.get_world_size())

    def save(self, folder: Path) -> None:
        self.accelerator.save_state(str(folder))
        self.accelerator.wait_for_everyone()
        if self.sync_files and dist.get_rank() == 0:
            for path in [*folder.rglob("*"), folder, folder.parent]:
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)
        self.accelerator.wait_for_everyone()

    def load(self, folder: Path) -> None:
        self.accelerator.load_state(str(folder))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
