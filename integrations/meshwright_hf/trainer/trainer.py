"""transformers' Trainer under a plan: the same arguments and numbers, with a sharded model."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import meshwright as mw
from meshwright.data.loader import DistributedLoader
from meshwright.data.nested import tensors_of
from meshwright.faults.equal_errors import say_equal_texts_once
from meshwright.mesh.process_group import leave_process_group, world_size
from meshwright.optim.runtime import Runtime, find_runtime
from meshwright.parallel.forward.compiled_layers import CompilableLayers
from meshwright.parallel.forward.uneven_batches import UnevenBatches
from meshwright.parallel.losses.causal_lm import BatchLoss
from meshwright.plan.config import NumItems, PlanLike, ToDistributedConfig
from meshwright.temporarily import temporarily
from meshwright_hf.batches import global_batches, has_only_tensors
from meshwright_hf.callback import MeshwrightCallback
from meshwright_hf.trainer.accelerator import ASKS_FOR_COPIES, ItemsUse, become_trainers
from meshwright_hf.trainer.checkpoints import CheckpointMixin
from meshwright_hf.trainer.checks import (
    arguments_of,
    check_arguments,
    check_distributed,
    check_nothing_thawed,
    check_run,
    check_trainer,
    config_of,
    has_own_loss,
    renew_options,
)
from meshwright_hf.trainer.control import (
    Control,
    count_from,
    figures_for,
    save_together_on_sigterm,
    show_run,
    without_lines,
)
from meshwright_hf.trainer.data import gather_rows, mesh_loader
from meshwright_hf.trainer.evaluation import EvaluationLoss, smoothing, takes_smoothing
from meshwright_hf.trainer.trl_trainers import (
    balance_fused_head,
    check_last_batch,
    check_trl,
    gather_for_fused_head,
    whole_loader,
    with_global_batch,
)
from meshwright_hf.versions import warn_outside_range

logger = logging.getLogger(__name__)


class MeshwrightTrainerMixin(CheckpointMixin):
    """Mixin that makes a subclass of transformers' Trainer train by a plan; put it first among the base classes.

    The model is sharded when the Trainer is made, and stays the user's object. Batch sizes count rows per data-parallel
    rank, as in the Trainer. Losses, gradient norms, metrics and predictions are those of one process with a batch that
    is dp times as large. Checkpoints have one-device weights and optimizer state, and can be resumed under any plan.

    Args:
        meshwright: a ParallelPlan, a plan in words ("dp2 tp2+sp zero1"), a dict of its fields, the path of a plan file,
            or a ToDistributedConfig; by default the launcher's plan, or the plan that the planner picks.

    Raises:
        PlanError: if the plan cannot run, or an argument contradicts it.

    Example::

        class PlannedSFTTrainer(MeshwrightTrainerMixin, SFTTrainer): ...

        trainer = PlannedSFTTrainer(model, args=args, train_dataset=data, meshwright=mw.ParallelPlan(tp=2))
    """

    def __init__(self, *args: Any, meshwright: ToDistributedConfig | PlanLike | None = None, **kwargs: Any) -> None:
        say_equal_texts_once()
        warn_outside_range()
        self._mesh_config = config_of(meshwright)
        self._is_training_loader = self._is_distributing = self._counts_own_rows = False
        self._gathers_loss = False  # whether the loop gathers next the loss that prediction_step has returned
        self._items = ItemsUse()
        self._agreed = Control()
        self._smoothing = 0.0  # the label smoothing of the model's own loss
        self._distributed: Any = None  # the model that _distribute has set up
        self._trained: set[str] | None = None  # parameters with gradients when the optimizer was made
        self._arguments: dict[str, Any] | None = None  # those from which the optimizer was made, until training begins
        check_arguments(arguments_of(args, kwargs))
        if kwargs.get("callbacks"):
            kwargs["callbacks"] = [_marked(callback) for callback in kwargs["callbacks"]]
        super().__init__(*args, **kwargs)
        check_trainer(self)
        save_together_on_sigterm(self)
        self._distribute()

    # ---- set-up

    def create_accelerator_and_postprocess(self) -> None:
        """Make the Trainer's Accelerator, and change it so that the plan distributes models and loaders."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        become_trainers(self.accelerator, self)
        # Whatever eval_use_gather_object says, tensors stay tensors: the Trainer would take a list of rows for outputs.
        self.gather_function = self.gathered_for_metrics

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Move the model unless it is distributed: a move to "cpu:0" would copy parameters out of ZeRO's buckets."""
        if find_runtime(model) is None:
            super()._move_model_to_device(model, device)  # type: ignore[misc]

    def _distribute(self) -> None:
        """Shard the model and prepare it for the Trainer, unless this was already done for this model."""
        if self._distributed is self.model:
            return
        runtime = find_runtime(self.model)
        if runtime is not None:
            self._complete(runtime)
        else:
            if self.train_dataset is not None:
                self.create_optimizer()
            # Registered before the guard's exit hook, to run after it: exit hooks run in reverse order.
            atexit.register(leave_process_group)
            with torch.random.fork_rng(devices=[]):  # keeps the Trainer's later random draws those of one process
                mw.to_distributed(self.model, self.optimizer, self._batches_to_plan_for(), config=self._config())
        self._distributed, runtime = self.model, self._runtime
        self._evaluation_loss = EvaluationLoss(self, runtime)
        if not _reads_logits(type(self)) and takes_smoothing(self, runtime):
            self._smoothing, self.label_smoother = self.label_smoother.epsilon, None
        check_run(self, runtime)
        check_trl(self, runtime)
        runtime.logits.in_evaluation = False  # prediction_step gathers them only where it returns them
        if (loss := runtime.features.find(BatchLoss)) is not None:
            loss.mean.num_items = self._meaning_of_items()  # if the model was distributed earlier
        self.model.no_sync = runtime.gradients.no_sync  # accelerate looks for it while gradients accumulate
        gather_for_fused_head(self.model, runtime)
        balance_fused_head(self.model, runtime)
        show_run(self.model, runtime, self._mesh_config, self.args)
        if self.args.torch_compile:
            layers = runtime.features.find(CompilableLayers)
            assert layers is not None
            layers.compile_if_possible(**self.accelerator.state.dynamo_plugin.to_kwargs())

    def create_optimizer(self, *args: object, **kwargs: object) -> Any:
        """Make the Trainer's optimizer; under a plan this is done when the Trainer is made.

        The stock Trainer makes it when training begins. So if an argument has changed by then, the options of the
        optimizer's groups become those of an optimizer that is made from the arguments as they are now.
        """
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        if is_new:
            self._trained = {name for name, p in self.model.named_parameters() if p.requires_grad}
            self._arguments = dict(vars(self.args))
            return optimizer
        if self._trained is not None:
            check_nothing_thawed(self.model, self._trained)
        made_from, self._arguments = self._arguments, None
        if made_from is not None and made_from != vars(self.args):
            with temporarily(self, optimizer=None):
                renew_options(optimizer, super().create_optimizer(*args, **kwargs), self.args)  # type: ignore[misc]
            check_run(self, self._runtime)  # whose limits are of arguments too
        return optimizer

    def _complete(self, runtime: Runtime) -> None:
        """Add the optimizer to a model that was distributed before the Trainer was made, perhaps while loading."""
        trains = self.train_dataset is not None
        if trains and not runtime.gradients.has_optimizer:
            self.create_optimizer()
            mw.to_distributed(self.model, self.optimizer, config=without_lines(self._mesh_config))
        else:
            check_distributed(self.model, self.optimizer, self._mesh_config, trains=trains)

    def _config(self) -> ToDistributedConfig:
        config = dataclasses.replace(without_lines(self._mesh_config), num_items_in_batch=self._meaning_of_items())
        if _reads_logits(type(self)) and not config.gather_logits:
            logger.info("%s has a compute_loss of its own, so training gathers whole logits", type(self).__name__)
            config = dataclasses.replace(config, gather_logits=True)
        if _reads_logits(type(self)) or has_own_loss(self):
            config = dataclasses.replace(config, picks_stages=False)
        return config

    def _meaning_of_items(self) -> NumItems:
        return "global" if self.args.average_tokens_across_devices else "local"

    def _batches_to_plan_for(self) -> Any:
        """Return a loader of the batches of all processes if the planner has to pick the plan, otherwise None."""
        is_given = self._mesh_config.plan not in (None, "auto") or self._mesh_config.input_spec is not None
        if is_given or self.train_dataset is None:
            return None
        with temporarily(self, _is_distributing=True):
            return global_batches(self.get_train_dataloader(), world_size())

    def get_tp_size(self) -> int:
        """Return the number of ranks with the same rows; batch sizes, step counts and the loss scale depend on it."""
        runtime = find_runtime(self.model)
        if runtime is None or self._counts_own_rows:
            return super().get_tp_size()  # type: ignore[misc]
        if self._items.is_active and not self._items.settle(self, runtime):
            return self.accelerator.num_processes  # the Trainer divides by it: a factor of 1
        return runtime.mesh.row_copies

    def loss_factor(self, processes: int) -> int:
        """Return by what transformers multiplies its loss: the number of processes over ``get_tp_size``."""
        return processes // self.get_tp_size()

    # ---- data

    def get_train_dataloader(self) -> Any:
        """Return a training loader that yields this rank's rows of the global batches."""
        if not self._is_distributing:
            self._distribute()  # model_init may have made a new model
        with temporarily(self, _is_training_loader=True):
            loader = super().get_train_dataloader()  # type: ignore[misc]
        self._train_loader = loader if isinstance(loader, DistributedLoader) else None
        return loader

    def planned_loader(self, data_loader: DataLoader[Any]) -> Any:
        """Return a loader on the plan's mesh; the Trainer's Accelerator calls this method and the next three."""
        if find_runtime(self.model) is None:
            # The planner reads only the loader's sizes, but a trainer that reads data before the model is sharded needs
            # every row on each rank.
            return data_loader if self._is_distributing else whole_loader(data_loader, self.args.device)
        check_last_batch(self, data_loader, self._runtime.mesh.dp.size, is_training=self._is_training_loader)
        return mesh_loader(
            data_loader,
            self._runtime,
            self.args,
            options=self._mesh_config.loader,
            is_training=self._is_training_loader,
            has_seedable_sampler=self.accelerator.use_seedable_sampler,
        )

    def gathered(self, stock: Callable[[object], Any], tensor: object) -> Any:
        """Gather a metric's tensors over the data-parallel ranks; without a plan, call ``stock`` of accelerate."""
        runtime = find_runtime(self.model)
        if runtime is None or not has_only_tensors(tensor) or any(x.ndim == 0 for x in tensors_of(tensor)):
            return stock(tensor)
        # Ranks may have different numbers of rows. The loss, which is repeated for each row of a full batch, is that of
        # all ranks, also on a rank without rows.
        is_of_rows, self._gathers_loss = not self._gathers_loss, False
        return gather_rows(tensor, runtime.mesh.dp, is_cut=False, is_of_rows=is_of_rows)

    def gathered_for_metrics(self, input_data: object, use_gather_object: bool = False) -> Any:
        """Gather a metric's rows over the data-parallel ranks, each once and in the dataset's order."""
        self._gathers_loss = False
        if find_runtime(self.model) is None:
            return input_data  # whole_loader gives each rank all rows
        return gather_rows(input_data, self._runtime.mesh.dp, as_objects=use_gather_object)

    def notice_processes(self) -> None:
        """Record that the number of processes was read, perhaps by a loss."""
        self._items.has_asked_processes = True

    def _prepare_dataset(
        self, dataset: object, processing_class: object, args: TrainingArguments, *rest: object, **kwargs: object
    ) -> Any:
        """Prepare a TRL trainer's dataset before the model is distributed; KTO gets the global batch size."""
        if getattr(self, "calculate_KL", False):
            args = with_global_batch(args, self._mesh_config)
        return super()._prepare_dataset(dataset, processing_class, args, *rest, **kwargs)  # type: ignore[misc]

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        # If the Trainer does not sum the count over ranks, it must not divide by the number of ranks with the same
        # rows.
        with temporarily(self, _counts_own_rows=not self.args.average_tokens_across_devices):
            count = super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc]
            if count is not None and not ASKS_FOR_COPIES:
                count = count // self.get_tp_size()
            return self._items.watch(count)

    def _track_num_input_tokens(self, inputs: Mapping[str, Any]) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)  # type: ignore[misc]
        seen = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + seen // self.get_tp_size()

    # ---- steps

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None, **kwargs: object
    ) -> Tensor:
        """Run the Trainer's step; labels are counted in ``inputs`` first, since the user's loss may remove them."""
        uneven, count = self._runtime.features.find(UnevenBatches), self._items.watch(num_items_in_batch)
        count_from(self._runtime, self.state)
        with contextlib.nullcontext() if uneven is None else uneven.of_batch(inputs):
            return super().training_step(model, inputs, count, **kwargs)  # type: ignore[misc]

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the Trainer's loss; a loss that was divided by the items of all ranks is multiplied by dp."""
        inputs = args[1] if len(args) > 1 else kwargs["inputs"]
        with (
            self._items.of_one_loss(self, self._runtime),  # for a subclass that calls it from its own training_step
            smoothing(self, self._runtime, self._smoothing, inputs),
        ):
            return super().compute_loss(*args, **kwargs)  # type: ignore[misc]

    def compute_loss_context_manager(self) -> contextlib.ExitStack:
        """Return the Trainer's context, which also watches a subclass's compute_loss."""
        stack = super().compute_loss_context_manager()  # type: ignore[misc]
        stack.enter_context(self._items.of_one_loss(self, self._runtime))
        return stack

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self._unscaled_norm(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | float | None = None) -> Any:
        return self._unscaled_norm(math.inf) if grad_norm is None else grad_norm

    def _unscaled_norm(self, max_norm: float) -> Tensor:
        self.accelerator.unscale_gradients()
        return mw.clip_grad_norm_(self.model, max_norm)

    def log(self, logs: dict[str, Any], *args: object, **kwargs: object) -> None:
        """Add throughput, memory and the slowest rank to a log of the training loss, and log it as the Trainer does."""
        logs.update(figures_for(logs, self._runtime, self.state))
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def prediction_step(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        """Run the Trainer's prediction step, with the loss of the global batch on every rank."""
        counted = self._evaluation_loss.count(args[1] if len(args) > 1 else kwargs["inputs"])
        is_loss_only = args[2] if len(args) > 2 else kwargs["prediction_loss_only"]
        with contextlib.ExitStack() as stack:
            if not is_loss_only or has_own_loss(self):
                stack.enter_context(self._runtime.logits.gathering())
            loss, logits, labels = super().prediction_step(*args, **kwargs)  # type: ignore[misc]
        self._gathers_loss = loss is not None
        return (
            None if loss is None else self._evaluation_loss.of_global_batch(loss, counted, self._items),
            logits,
            labels,
        )


class MeshwrightTrainer(MeshwrightTrainerMixin, Trainer):
    """transformers' Trainer with a plan; see MeshwrightTrainerMixin."""


def _marked(callback: object) -> Any:
    """Return the callback; a MeshwrightCallback is marked so that it does not warn that it cannot shard."""
    if isinstance(callback, type) and issubclass(callback, MeshwrightCallback):
        callback = callback()
    if isinstance(callback, MeshwrightCallback):
        callback.trainer_shards = True
    return callback


def _reads_logits(kind: type) -> bool:
    """Return whether a Trainer class has its own compute_loss, which may read the logits."""
    owners = (owner for owner in kind.__mro__ if "compute_loss" in vars(owner))
    return next(owner for owner in owners if owner is not MeshwrightTrainerMixin) is not Trainer
