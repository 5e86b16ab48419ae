"""The methods of an Accelerator that depend on a plan; all other methods are accelerate's own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor, nn
from torch.utils.data import DataLoader

import meshwright as mw
from meshwright.checkpoint.files.reading import Lineage, Mark
from meshwright.checkpoint.sealed import NAME as SEAL
from meshwright.checkpoint.sealed import sealed_folder
from meshwright.compiling import without_compilation
from meshwright.data.nested import map_tensors
from meshwright.faults.together import succeed_together
from meshwright.layout.tensor_layout import is_held
from meshwright.mesh.axes import Axis
from meshwright.monitor.monitor import monitor_of
from meshwright.optim.runtime import find_runtime, runtime_of
from meshwright.parallel.collectives import all_reduce, maximum
from meshwright.parallel.method_chain import ChainStep, StepOrder, find_step, remove_step
from meshwright.plan.config import ParallelPlan
from meshwright.plan.loader_options import LoaderOptions
from meshwright.temporarily import temporarily
from meshwright_hf.accelerate import state
from meshwright_hf.accelerate.checks import check_num_processes
from meshwright_hf.accelerate.planned_loader import PlannedLoader, PlannedScheduler, plan_loader
from meshwright_hf.accelerate.state import folder_to_load, folder_to_save, remove_oldest
from meshwright_hf.batches import gather_tensors, gather_values, has_only_tensors


class InAutocast(ChainStep):
    """The step of a model's ``forward`` that runs it in mixed precision."""

    order = StepOrder.AUTOCAST

    def __init__(self, context: Any):
        self.context = context

    def __call__(self, *args: object, **kwargs: object) -> object:
        return convert_outputs_to_fp32(self.context(self.method))(*args, **kwargs)


class PlannedAccelerator(Accelerator):
    """An Accelerator with models that a plan distributes; ``prepare`` changes the user's Accelerator to this class.

    For models, optimizers and loaders that no plan distributes, each method is accelerate's.
    """

    _loader_options = LoaderOptions()
    _plan: ParallelPlan | None = None  # the plan, if it is known before the first model is prepared
    _is_saving = _counts_all = False
    read_counts: frozenset[int] = frozenset()  # values that num_processes has returned

    @property
    def num_processes(self) -> int:
        """The number of data-parallel ranks, by which scripts multiply schedules and losses.

        Ranks along the other axes share a batch. ``state.num_processes`` counts all processes.
        """
        dp = self._dp()
        if self._counts_all or (dp is None and (self._models or self._plan is None)):
            count = int(self.state.num_processes)
        else:
            count = self._plan.dp if dp is None and self._plan is not None else dp.size  # type: ignore[union-attr]
        if not self._counts_all:
            self.read_counts |= {count}
        return count

    @property
    def is_last_process(self) -> bool:
        """Whether this process has the highest rank of all processes."""
        return bool(self.state.is_last_process)

    @contextlib.contextmanager
    def split_between_processes(self, inputs: object, apply_padding: bool = False) -> Iterator[Any]:
        """Yield this data-parallel rank's part of the inputs; ranks that share a batch get the same part."""
        dp = self._dp()
        if dp is None:
            with super().split_between_processes(inputs, apply_padding=apply_padding) as part:
                yield part
            return
        place = SimpleNamespace(num_processes=dp.size, process_index=dp.rank, device=self.device)
        with PartialState.split_between_processes(place, inputs, apply_padding=apply_padding) as part:
            yield part

    def prepare_data_loader(self, data_loader: Any, *args: object, **kwargs: object) -> Any:
        """Return a loader on the mesh of the last planned model; without one, prepare it as accelerate does."""
        is_plain = isinstance(data_loader, DataLoader) and not getattr(data_loader, "_is_accelerate_prepared", False)
        if not (is_plain and state.planned_models(self)):
            with temporarily(self, _counts_all=True):  # as accelerate's own loaders need it
                return super().prepare_data_loader(data_loader, *args, **kwargs)
        model = state.planned_models(self)[-1]
        loader = plan_loader(data_loader, model, self._loader_options, is_global=self.split_batches, accelerator=self)
        self._dataloaders.append(loader)
        return loader

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Wrap the scheduler of a planned optimizer, so that it steps once for each batch of an optimizer step."""
        runtime = find_runtime(getattr(scheduler, "optimizer", scheduler))
        if runtime is None or getattr(scheduler, "_is_accelerate_prepared", False):
            return super().prepare_scheduler(scheduler)
        check_num_processes(self.read_counts, runtime.mesh.dp.size)
        optimizers = [wrapper for wrapper in self._optimizers if wrapper.optimizer is scheduler.optimizer]
        planned = PlannedScheduler(
            scheduler,
            optimizers,
            batches=1 if self.split_batches else runtime.mesh.dp.size,
            step_with_optimizer=self.step_scheduler_with_optimizer,
        )
        self._schedulers.append(planned)
        return planned

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """Clip by the global norm and return it; while gradients are being accumulated, do nothing and return None."""
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        model = self._model_of(parameters)
        if model is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        if not self.sync_gradients:
            return None
        self.unscale_gradients()
        return mw.clip_grad_norm_(model, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clip each element of the gradients; do nothing while gradients are being accumulated."""
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        model = self._model_of(parameters)
        if model is None:
            super().clip_grad_value_(parameters, clip_value)
        elif self.sync_gradients:
            self.unscale_gradients()
            runtime = runtime_of(model)
            runtime.gradients.check_synced()
            for gradient, _ in runtime.gradients.counted(runtime.mesh):
                gradient.clamp_(-clip_value, clip_value)

    def gather(self, tensor: object) -> Any:
        """Return the rows of all data-parallel ranks; rows that several ranks share count once."""
        dp = self._dp()
        if dp is None or not has_only_tensors(tensor):
            return super().gather(tensor)
        return gather_tensors(tensor, dp)

    def reduce(self, tensor: object, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce over the data-parallel ranks; values of ranks that share a batch count once."""
        dp = self._dp()
        if dp is None or not has_only_tensors(tensor):
            return super().reduce(tensor, reduction, scale)

        def reduced(x: Tensor) -> Tensor:
            total = maximum(x.clone(), dp) if reduction == "max" else all_reduce(x.clone(), dp)
            return total.div_(dp.size) if reduction == "mean" and dp.size > 1 else total

        return map_tensors(tensor, reduced)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the rows of all data-parallel ranks, each once, in the order of the dataset."""
        loader, dp = self.gradient_state.active_dataloader, self._dp()
        if dp is None or (loader is not None and not isinstance(loader, PlannedLoader)):
            return super().gather_for_metrics(input_data, use_gather_object)
        is_blank, rows = False, None
        if loader is not None and loader.share is not None:
            is_blank = loader.share.is_filler
            # As accelerate cuts what a script has repeated for each row of a full batch.
            if loader.end_of_dataloader and loader.share.total < (loader.total_batch_size or 0):
                rows = loader.share.total
        gather = gather_values if use_gather_object or not has_only_tensors(input_data) else gather_tensors
        return gather(input_data, dp, is_blank=is_blank, rows=rows)

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """Log values and the newest figures of planned models to all trackers; of two equal names, the value's wins."""
        figures: dict[str, Any] = {}
        for model in state.planned_models(self):
            monitor = monitor_of(find_runtime(model))
            if monitor is not None and monitor.latest is not None:
                figures |= monitor.latest.as_logs()
            if monitor is not None:
                monitor.note_values(values)
        super().log({**figures, **values}, step=step, log_kwargs=log_kwargs or {})

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Iterable[object], even_batches: bool | None = None) -> Iterator[None]:
        """Do nothing for planned models, since their ranks always take the same number of steps."""
        if any(isinstance(model, nn.Module) and find_runtime(model) is not None for model in joinables):
            yield
        else:
            with super().join_uneven_inputs(joinables, even_batches):
                yield

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Return the one-device weights on rank 0 and an empty dict on other ranks; every rank makes the call."""
        if find_runtime(model) is None:
            return super().get_state_dict(model, unwrap)
        return state.PendingState(model) if self._is_saving else mw.full_state_dict(model)

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """Return the model itself, since only its forward is wrapped, for mixed precision; compiled or not."""
        if find_runtime(model) is None:
            return super().unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)
        plain = without_compilation(model)
        if not keep_fp32_wrapper and (step := find_step(plain, InAutocast)) is not None:
            remove_step(plain, step)
        return model if keep_torch_compile else plain

    def skip_first_batches(self, dataloader: Iterable[object], num_batches: int = 0) -> Any:
        """Return the same loader, whose next iteration leaves out the first batches of its epoch."""
        if not isinstance(dataloader, PlannedLoader):
            return super().skip_first_batches(dataloader, num_batches)
        dataloader.skip(num_batches)
        return dataloader

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **kwargs: object
    ) -> Any:
        """Save everything that training needs to resume under any plan; every rank makes the call.

        Planned models and their optimizers are saved in one-device form in the folders ``meshwright_0``,
        ``meshwright_1``, ... The folder exists whole or not at all: it is written under a hidden name, sealed and
        renamed.

        Raises:
            CheckpointError: if ``output_dir`` holds other files than a sealed checkpoint.
            OSError: on every rank, if a rank cannot write; ``output_dir`` then is what it was before.
        """
        if not state.planned_models(self):
            return super().save_state(output_dir, safe_serialization, **kwargs)
        if not safe_serialization:
            raise ValueError("safe_serialization=False would pickle the weights; a planned model's are safetensors")
        target = folder_to_save(self, output_dir)
        lineage = Lineage.of(state.planned_models(self)[0])
        with sealed_folder(target, lineage=lineage) as folder:
            # This comes first, since it communicates: an error of one rank in accelerate's own files must not leave
            # others waiting.
            state.save_progress(self, folder)
            # Runs after the user's hooks, which may have removed models from the list.
            hook = self.register_save_state_pre_hook(state.take_weights)
            self._is_saving = True
            try:
                named = temporarily(self.project_configuration, automatic_checkpoint_naming=False)  # by ``target``
                with state.without_planned_optimizers(self), named:
                    super().save_state(str(folder), safe_serialization, **kwargs)
            finally:
                self._is_saving = False
                hook.remove()
        remove_oldest(self, lineage.run)
        return target

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **kwargs: object,
    ) -> None:
        """Resume from a folder of ``save_state``, under this plan or another; every rank makes the call.

        Raises:
            CheckpointError: on every rank, if the folder is not whole; it names the file.
        """
        if not state.planned_models(self):
            super().load_state(input_dir, load_kwargs, **kwargs)
            return
        folder = folder_to_load(self, input_dir)
        is_stock = succeed_together(lambda: state.is_stock_checkpoint(self, folder))
        hook = self.register_load_state_pre_hook(
            lambda models, directory: state.give_weights(self._models, models, directory, is_stock=is_stock)
        )
        try:
            with state.without_planned_optimizers(self):
                super().load_state(str(folder), load_kwargs, **kwargs)
        finally:
            hook.remove()
        if is_stock:
            state.load_stock_optimizers(self, folder)
        else:
            state.load_progress(self, folder)
        Lineage.of(state.planned_models(self)[0]).go_on_from(Mark.of(folder / SEAL))

    def _dp(self) -> Axis | None:
        """Return the dp axis of the active loader or, without one, of the last prepared model; None without either."""
        loader = self.gradient_state.active_dataloader
        if isinstance(loader, PlannedLoader):
            return loader.dp
        models = state.planned_models(self)
        return runtime_of(models[-1]).mesh.dp if models else None

    def _model_of(self, parameters: Iterable[Tensor]) -> nn.Module | None:
        """Return the planned model that has these parameters; None if no planned model has them.

        Raises:
            ValueError: if these are only some of a model's parameters, since the norm must include all of them.
        """
        given = {id(p) for p in parameters if p.requires_grad}
        for model in state.planned_models(self):
            elsewhere = (p for p in model.parameters() if p.requires_grad and not is_held(p))
            own = {id(p) for p in (*runtime_of(model).gradients.parameters, *elsewhere)}
            if own and own == given:
                return model
            if own & given:
                raise ValueError(
                    f"{len(own & given)} of these {len(given)} parameters are of a model that a plan distributes, but "
                    f"it trains {len(own)}; clip all of them at once: model.parameters()"
                )
        return None


def become_planned(
    accelerator: Accelerator, options: LoaderOptions | None = None, *, plan: ParallelPlan | None = None
) -> None:
    """Change an Accelerator's class to a subclass of its class with the methods above; the object stays the same.

    Args:
        accelerator: the Accelerator, changed in place.
        options: the options of its loaders.
        plan: the plan of models that are prepared later, if it is known.
    """
    if not isinstance(accelerator, PlannedAccelerator):
        kind = type(accelerator)
        is_stock = kind is Accelerator
        accelerator.__class__ = PlannedAccelerator if is_stock else type(kind.__name__, (PlannedAccelerator, kind), {})
    assert isinstance(accelerator, PlannedAccelerator)
    if options is not None:
        accelerator._loader_options = options
    if plan is not None:
        accelerator._plan = plan
