"""Where each rank's shard of each weight comes from: the model itself, a recipe, or a checkpoint."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.checkpoint.safetensors_file import memory_of
from meshwright.checkpoint.weight_files import WeightFiles
from meshwright.construct.deferred import Recipe, recipe_of
from meshwright.construct.tape import Tape
from meshwright.construct.twin import build_twin, meta_tensors
from meshwright.errors import PlanError, UninitialisedParameterError
from meshwright.parallel.collectives import Axis
from meshwright.parallel.layout import RowLayout
from meshwright.parallel.tensor import shard_parameters


@dataclass
class InitialWeights:
    """The sources of the tensors whose values are not, or not to stay, in the model; keyed by ``id``.

    Args:
        files: the checkpoint, if any.
        names: tensors to read from the checkpoint -> their name there.
        recipes: deferred parameters -> how to compute them.
        values: tensors on the meta device -> their values, where those are small enough to be there.
    """

    files: WeightFiles | None = None
    names: dict[int, str] = field(default_factory=dict)
    recipes: dict[int, Recipe] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)

    @staticmethod
    def find(model: nn.Module, source: str | os.PathLike[str] | None) -> InitialWeights:
        """Find a source for everything that has no values; the model is not changed.

        Args:
            model: materialised, deferred, or on the meta device.
            source: a checkpoint (see ``WeightFiles.open``), from which all parameters are then read.

        Raises:
            CheckpointError: for a checkpoint that is unsound or not this model's.
            UninitialisedParameterError: naming every tensor that nothing initialises.
            PlanError: for a model on the meta device that its config does not describe.
        """
        weights = InitialWeights()
        if source is not None:
            weights.files = WeightFiles.open(source)
            weights.names = weights.files.names_for(model)
        for name, parameter in model.named_parameters():
            recipe = recipe_of(parameter)
            if parameter.is_meta and recipe is not None and id(parameter) not in weights.names:
                _check_current(name, parameter, recipe)
                weights.recipes[id(parameter)] = recipe
        if lacking := weights._lacking(model):
            are_drawn = any(isinstance(x, nn.Parameter) for x in lacking.values())
            weights._take_from(build_twin(model, draws=are_drawn), lacking)
        if empty := [
            *weights._lacking(model),
            *(
                n
                for n, p in model.named_parameters()
                if id(p) in weights.recipes and not weights.recipes[id(p)].is_written
            ),
        ]:
            raise UninitialisedParameterError(empty)
        return weights

    def build(
        self, model: nn.Module, layouts: dict[str, Any], axis: Axis, device: torch.device
    ) -> dict[int, nn.Parameter]:
        """Make every shard, and put it in the model; see ``shard_parameters``."""
        if self.files is None:
            replaced = shard_parameters(model, layouts, axis, device, self._shard)
        else:
            with self.files.progress as progress:
                progress.start(self._bytes_to_read(model, layouts, axis))
                replaced = shard_parameters(model, layouts, axis, device, self._shard)
        self._fill_buffers(model)
        return replaced

    def _bytes_to_read(self, model: nn.Module, layouts: dict[str, Any], axis: Axis) -> int:
        assert self.files is not None
        total = 0.0
        for name, parameter in model.named_parameters():
            entry = self.files.entries[self.names[id(parameter)]][1]
            rows = layouts[name].rows if name in layouts else None
            part = rows.real_rows(axis.rank) / max(rows.size, 1) if rows is not None else 1.0
            total += entry.num_bytes * part
        return int(total)

    def _shard(self, name: str, parameter: nn.Parameter, rows: RowLayout, rank: int) -> Tensor | None:
        """This rank's shard of a parameter, computed or read now; None where the parameter holds its values."""
        if self.files is not None and id(parameter) in self.names:
            return self.files.read(self.names[id(parameter)], rows, rank, parameter.dtype)
        if id(parameter) in self.recipes:
            full = self.recipes[id(parameter)].compute(parameter.dtype)
        elif id(parameter) in self.values:
            full = self.values[id(parameter)].to(parameter.dtype)
        else:
            return None
        return full if rows.is_replicated else rows.take(full, rank)

    def _fill_buffers(self, model: nn.Module) -> None:
        """Give every tensor beside the parameters its values."""
        for module in model.modules():
            for name, buffer in list(module._buffers.items()):
                if buffer is not None and self.files is not None and id(buffer) in self.names:
                    whole = RowLayout.replicated(1, 1)
                    module._buffers[name] = self.files.read(self.names[id(buffer)], whole, 0, buffer.dtype)
            for name, tensor in meta_tensors(module).items():
                owner = module._buffers if name in module._buffers else vars(module)
                owner[name] = self.values[id(tensor)].to(tensor.dtype)

    def own_tensors(self, model: nn.Module) -> list[Tensor]:
        """The real tensors that the model starts from."""
        found = [t for t in (*model.parameters(), *model.buffers()) if not t.is_meta and id(t) not in self.names]
        return [*found, *self.values.values()]

    def equalise_draws(self) -> bool:
        """Make the recipes of all ranks those of rank 0; whether any rank's differed.

        Raises:
            PlanError: where the ranks did not build the same model.
        """
        tapes = list({id(recipe.tape): recipe.tape for recipe in self.recipes.values()}.values())
        digests: list[tuple[list[str], str]] = [([], "")] * dist.get_world_size()
        dist.all_gather_object(digests, ([tape.form() for tape in tapes], _digest(tapes)))
        if any(form != digests[0][0] for form, _ in digests):
            raise PlanError("the ranks built different models: their deferred weights are initialised in other ways")
        if all(digest == digests[0][1] for _, digest in digests):
            return False
        for tape in tapes:
            for tensor in (*tape.states, *tape.constants()):
                dist.broadcast(tensor, src=0)
        return True

    def _lacking(self, model: nn.Module) -> dict[str, Tensor]:
        """The tensors on the meta device without a source, by name."""
        found: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.is_meta}
        for name, module in model.named_modules():
            found |= {f"{name}.{key}".lstrip("."): x for key, x in meta_tensors(module).items()}
        sources = self.names.keys() | self.recipes.keys() | self.values.keys()
        return {name: x for name, x in found.items() if id(x) not in sources}

    def _take_from(self, twin: nn.Module, lacking: dict[str, Tensor]) -> None:
        for name, tensor in lacking.items():
            owner_name, _, attribute = name.rpartition(".")
            made = getattr(twin.get_submodule(owner_name), attribute, None)
            if isinstance(made, Tensor) and made.shape == tensor.shape:
                if (recipe := recipe_of(made)) is not None:
                    self.recipes[id(tensor)] = recipe
                elif not made.is_meta:
                    self.values[id(tensor)] = made.detach()


def _check_current(name: str, parameter: Tensor, recipe: Recipe) -> None:
    if not recipe.is_current(parameter):
        raise PlanError(
            f"{name} was changed after meshwright.deferred_init() ended, where its values do not exist yet; "
            "move the change into the block"
        )


def _digest(tapes: list[Tape]) -> str:
    digest = hashlib.sha256()
    for tape in tapes:
        for tensor in (*tape.states, *tape.constants()):
            digest.update(memory_of(tensor.contiguous()))
    return digest.hexdigest()
