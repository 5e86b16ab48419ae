"""The Trainer's Accelerator under a plan, and the factor by which the Trainer's loss becomes that of the global batch.

``num_items_in_batch`` is the Trainer's count of the items of all ranks. A model with a known loss uses the count and
returns the loss of the global batch. A user's function divides its rank's sum by the count, and the quotient must be
multiplied by dp, since gradients are averaged over dp. The Trainer multiplies every result of its own ``compute_loss``
by a factor, which must be dp for such a quotient and 1 for a mean.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DynamoBackend
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from meshwright.optim.runtime import Runtime, find_runtime
from meshwright.parallel.autograd_graph import tensors_in
from meshwright.parallel.collectives import maximum
from meshwright.parallel.forward.uneven_batches import UnevenBatches
from meshwright.parallel.losses.causal_lm import BatchLoss
from meshwright.parallel.shards.stand_in import StandIn, is_metadata, reading_shards
from meshwright.temporarily import temporarily
from meshwright_hf.trainer.checks import StockTrainer, has_own_loss
from meshwright_hf.versions import numbers_of

# Whether transformers asks the Trainer for the number of ranks with the same rows (get_tp_size) where it multiplies a
# loss and counts items; 5.17 and 5.18 ask accelerate's configuration, which a plan does not set. The version tells it,
# since a package may have put a function of its own in the place of compute_loss.
ASKS_FOR_COPIES = numbers_of(transformers.__version__) >= (5, 19)


class ItemsUse:
    """Records how the count of items is used while the Trainer computes one loss.

    Attributes:
        is_active: whether a loss is being computed.
        is_divided: whether the last loss is a quotient that the Trainer multiplied by dp, so that its mean over the
            ranks is the loss of the global batch.
        is_read: whether a value was computed from the count on this rank, other than by the model's known loss.
    """

    def __init__(self) -> None:
        self.is_active = self.is_divided = self.is_read = False
        self._is_settled = self._is_passed = self.has_asked_processes = False

    @contextlib.contextmanager
    def of_one_loss(self, trainer: StockTrainer, runtime: Runtime) -> Iterator[None]:
        """Record whether the loss that is computed inside this context reads the count; every rank must enter it.

        Raises:
            ValueError: if a loss was divided by the count, but the factor dp was not applied or was applied wrongly.
        """
        if self.is_active:
            yield
            return
        self.is_divided = self.is_read = self._is_settled = self.has_asked_processes = False
        self.is_active = True
        if (loss := runtime.features.find(BatchLoss)) is not None:
            loss.mean.used_items = None
        try:
            yield
        finally:
            self.is_active = False
        counts_all = trainer.args.average_tokens_across_devices
        if runtime.mesh.dp.size == 1 and (runtime.mesh.row_copies == 1 or not counts_all):
            return
        is_of_model = _is_of_model(trainer, runtime)
        if not self._is_passed or self._is_settled or (is_of_model and not counts_all):
            return
        if is_of_model and self.has_asked_processes:
            raise ValueError(_MULTIPLIED.format(type(trainer).__name__))
        if self._agree(trainer, runtime):
            raise ValueError(_DIVIDED.format(type(trainer).__name__) if counts_all else _OWN_COUNT)

    def settle(self, trainer: StockTrainer, runtime: Runtime) -> bool:
        """Return whether the Trainer must multiply the loss by dp; every rank makes the call."""
        self._is_settled = True
        if not _is_of_model(trainer, runtime):
            self.is_divided = self._agree(trainer, runtime)
            if self.is_divided and (uneven := runtime.features.find(UnevenBatches)) is not None:
                uneven.stop()
        return self.is_divided

    def _agree(self, trainer: StockTrainer, runtime: Runtime) -> bool:
        # Ranks may differ: a rank without labels may return before it divides.
        flag = torch.tensor(int(self.is_read), device=trainer.args.device)
        for axis in (runtime.mesh.dp, *runtime.mesh.of_same_rows):
            flag = maximum(flag, axis)
        return bool(flag)

    def watch(self, count: object) -> Any:
        """Return the count as a tensor that records whether its value is read."""
        self._is_passed = count is not None
        if count is None or isinstance(count, _WatchedCount):
            return count
        watched = torch.as_tensor(count).as_subclass(_WatchedCount)
        watched.use = self
        return watched


def _is_of_model(trainer: StockTrainer, runtime: Runtime) -> bool:
    """Return whether the model divided its known loss by the count, so that it is the loss of the global batch."""
    loss = runtime.features.find(BatchLoss)
    return not has_own_loss(trainer) and loss is not None and loss.mean.used_items is True


_DIVIDED = (
    "{}.compute_loss reads num_items_in_batch, which counts the items of all ranks. A sum that is divided by this "
    "number has to be multiplied by the number of data-parallel ranks, but Meshwright cannot detect whether it was. "
    "Give the Trainer the loss as a function, compute_loss_func=f with f(outputs, labels, num_items_in_batch); or end "
    "compute_loss with super().compute_loss(model, inputs, return_outputs, num_items_in_batch); or compute a mean "
    "without that number and return meshwright.global_mean(model, loss, count)"
)
_MULTIPLIED = (
    "{}.compute_loss passes num_items_in_batch to the model and reads accelerator.num_processes. Under a plan the "
    "model returns the mean over the global batch, so its loss must not be multiplied by the number of processes. "
    "Leave the factor out, or write it as transformers does: self.accelerator.num_processes // self.get_tp_size(), "
    "which is 1 here"
)
_OWN_COUNT = (
    "a loss is divided by num_items_in_batch, and with TrainingArguments.average_tokens_across_devices=False that is "
    "this rank's own count, so training would use the mean of the ranks' means. Set it True, as it is by default"
)


class _WatchedCount(StandIn):
    use: ItemsUse
    __repr__ = Tensor.__repr__  # type: ignore[assignment]

    @classmethod
    def run(cls, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "detach" or not is_metadata(func, name):
            for x in tensors_in((args, kwargs)):
                if isinstance(x, _WatchedCount):
                    x.use.is_read = True
        with reading_shards():
            return func(*args, **kwargs)


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
