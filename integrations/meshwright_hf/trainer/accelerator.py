"""The Trainer's Accelerator under a plan: the plan distributes the model, the optimizer and the loaders."""

from __future__ import annotations

import sys
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DynamoBackend
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from meshwright.optim.runtime import find_runtime
from meshwright.temporarily import temporarily
from meshwright_hf.trainer.items import ASKS_FOR_COPIES

_MULTIPLIES = ("transformers.trainer", "compute_loss")  # the function that multiplies a loss by the processes


class TrainerAccelerator(Accelerator):
    """An Accelerator for a Trainer: the methods that a Trainer calls follow the plan; all others are accelerate's.

    ``become_trainers`` gives this class to the Accelerator that the Trainer has made.
    """

    _trainer: Any

    @property
    def num_processes(self) -> int:
        """The number of processes. Each read is recorded, since a loss may be multiplied by it (see ``ItemsUse``).

        To a function of transformers that multiplies its loss without asking for the ranks with the same rows, the
        number is the factor that later versions compute.
        """
        caller = sys._getframe(1)
        if not ASKS_FOR_COPIES and (caller.f_globals.get("__name__"), caller.f_code.co_name) == _MULTIPLIES:
            factor: int = self._trainer.loss_factor(super().num_processes)
            return factor
        self._trainer.notice_processes()
        return super().num_processes

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a model without DDP, since the plan reduces the gradients; only autocast is added."""
        plugin, placement = self.state.dynamo_plugin, device_placement if find_runtime(model) is None else False
        with temporarily(plugin, backend=DynamoBackend.NO):  # the runtime compiles the layers
            return super().prepare_model(model, device_placement=placement, evaluation_mode=True)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """Return the optimizer as it is, since the plan has bound it to the model's gradients; a scaler steps it."""
        if self.scaler is None:
            return optimizer
        return super().prepare_optimizer(optimizer, device_placement=False)

    def prepare_data_loader(self, data_loader: DataLoader[object], *_: object, **__: object) -> Any:
        """Return a loader on the plan's mesh."""
        return self._trainer.planned_loader(data_loader)

    def gather(self, tensor: object) -> Any:
        """Gather a metric's tensors over the data-parallel ranks."""
        return self._trainer.gathered(super().gather, tensor)

    def gather_for_metrics(self, input_data: object, use_gather_object: bool = False) -> Any:
        """Gather a metric's rows over the data-parallel ranks, each once."""
        return self._trainer.gathered_for_metrics(input_data, use_gather_object)


def become_trainers(accelerator: Accelerator, trainer: object) -> None:
    """Change the class of the Trainer's Accelerator to a subclass with the methods above.

    Args:
        accelerator: the Trainer's Accelerator, changed in place.
        trainer: the Trainer that made it.
    """
    kind = type(accelerator)
    accelerator.__class__ = type(kind.__name__, (TrainerAccelerator, kind), {})
    accelerator._trainer = trainer
