"""The run that is saved or loaded: its model, this rank's place on its mesh, and how the ranks hold its tensors."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.checkpoint.one_device.rank_optimizer import RankTensor
from meshwright.checkpoint.one_device.safetensors_file import DTYPES
from meshwright.compiling import without_compilation
from meshwright.errors import CheckpointError
from meshwright.layout.packed_weights import state_without_packed
from meshwright.layout.tensor_layout import TensorLayout, layout_if_any
from meshwright.mesh.axes import Mesh
from meshwright.optim.runtime import Runtime, device_of, find_runtime
from meshwright.optim.state_parts import check_no_engine


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
                "pass the model that to_distributed returned"
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
