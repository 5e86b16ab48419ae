"""``prepare`` distributes the objects of an accelerate script by a plan."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import get_mixed_precision_context_manager
from accelerate.utils.ao import convert_model_to_fp8_ao
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from meshwright.choose.given_plan import config_with, given_plan, plan_in_model, source_of_plan
from meshwright.choose.picked_plan import pick_plan, tell_reasons
from meshwright.compiling import leave_out_of_graphs, without_compilation
from meshwright.distribute.attach_optimizer import plan_to_complete
from meshwright.distribute.decide import call_of, runnable_plans
from meshwright.distribute.to_distributed import to_distributed
from meshwright.errors import PlanError
from meshwright.faults.equal_errors import say_equal_texts_once
from meshwright.mesh.process_group import device_for
from meshwright.monitor.monitor import Preparation, start_monitor
from meshwright.optim.chained import ChainedOptimizer
from meshwright.optim.runtime import Watch, device_of, find_runtime, no_sync, runtime_of
from meshwright.parallel.method_chain import add_step
from meshwright.parallel.tensor_parallel.float8 import float8_layers
from meshwright.plan.config import ParallelPlan, PlanLike, ToDistributedConfig
from meshwright_hf.accelerate.accelerator import InAutocast, PlannedAccelerator, become_planned
from meshwright_hf.accelerate.checks import (
    check_launch,
    check_model,
    check_not_prepared,
    check_num_processes,
    check_settings,
)
from meshwright_hf.accelerate.planned_loader import PlannedLoader, check_loader
from meshwright_hf.accelerate.state import planned_models
from meshwright_hf.batches import global_batches
from meshwright_hf.versions import warn_outside_range

_EVERY = 10  # steps between two measurements for the trackers, if the config has no logging_steps


def prepare(
    accelerator: Accelerator, *objects: object, config: ToDistributedConfig | None = None, plan: PlanLike | None = None
) -> Any:
    """Distribute a script's objects by a plan, in place of ``accelerator.prepare``; the loop stays as it is.

    The plan is the config's, the launcher's or the model's own; otherwise the planner picks a plan. As in accelerate, a
    loader's batch is for one data-parallel rank (for all ranks with ``split_batches=True``), so the loss is the mean
    over ``dp`` batches. Ranks along the other axes share a batch. Loaders and schedulers may also be prepared later.

    After the call these methods of ``accelerator`` follow the plan: backward, accumulate, clip_grad_norm_,
    clip_grad_value_, gather_for_metrics, save_state, load_state, get_state_dict, unwrap_model and skip_first_batches.

    Args:
        accelerator: the script's Accelerator, changed in place.
        objects: one model, its optimizers, each for other parameters, any number of loaders and schedulers, in any
            order; other values, such as None, are returned unchanged.
        config: the options of ``to_distributed``.
        plan: the plan, as in ``to_distributed``: a ParallelPlan, a plan in words ("dp2 tp2+sp zero1"), a dict or a
            path.

    Returns:
        The objects as a tuple in the same order, or the object itself if there is only one. The model is the user's
        object.

    Raises:
        PlanError: if the launch, the Accelerator's settings or the model contradict the plan, before anything is
            changed; see also ``to_distributed``.
        AlreadyDistributedError: if accelerate has prepared one of the objects.
        ValueError: if a loader cannot be put on a mesh.

    Example::

        accelerator = Accelerator()
        model, optimizer, loader = meshwright_hf.accelerate.prepare(accelerator, model, optimizer, loader)
        for batch in loader:
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    """
    say_equal_texts_once()
    warn_outside_range()
    if not isinstance(accelerator, Accelerator):
        raise PlanError(f"the first argument of prepare is the Accelerator, not a {type(accelerator).__name__}")
    config = config_with(config, plan)
    given = _Objects.sort(objects)
    check_launch(accelerator)
    for name, value in given.named:
        check_not_prepared(name, value)
    if given.model is not None:
        with given.unchained_if_refused():
            _distribute(accelerator, given, config)
    elif not planned_models(accelerator):
        raise PlanError("prepare needs a model: pass it together with its optimizer, loaders and schedulers")
    elif given.optimizer is not None:
        raise PlanError("the optimizer of a planned model is prepared together with it; pass both to one prepare")
    return _prepared(accelerator, objects)


@dataclass(frozen=True)
class _Objects:
    """The objects to prepare, by kind."""

    model: nn.Module | None
    optimizers: list[Optimizer]
    loaders: list[DataLoader[Any] | PlannedLoader]
    schedulers: list[LRScheduler]

    @staticmethod
    def sort(objects: Sequence[Any]) -> _Objects:
        models = [value for value in objects if isinstance(value, nn.Module)]
        optimizers = [value for value in objects if isinstance(value, Optimizer)]
        if len(models) > 1:
            raise PlanError(
                f"prepare got {len(models)} models, but a plan is for one model and its optimizers; call prepare once "
                "for each model that the plan is to distribute, and accelerator.prepare_model for others"
            )
        return _Objects(
            model=models[0] if models else None,
            optimizers=optimizers,
            loaders=[value for value in objects if isinstance(value, DataLoader | PlannedLoader)],
            schedulers=[value for value in objects if isinstance(value, LRScheduler)],
        )

    @functools.cached_property
    def optimizer(self) -> Optimizer | None:
        """The optimizer of the model: of several, the chain of which the program steps each."""
        if len(self.optimizers) > 1 and not any(find_runtime(optimizer) for optimizer in self.optimizers):
            return ChainedOptimizer(*self.optimizers)
        return self.optimizers[0] if self.optimizers else None

    @contextlib.contextmanager
    def unchained_if_refused(self) -> Iterator[None]:
        """Leave the optimizers as they were if the context raises before they are distributed."""
        try:
            yield
        except BaseException:
            chain = self.__dict__.get("optimizer")  # made when it was first asked for
            if isinstance(chain, ChainedOptimizer) and chain not in self.optimizers and find_runtime(chain) is None:
                chain.release()
            raise

    @property
    def named(self) -> list[tuple[str, Any]]:
        loaders = [("a loader", loader) for loader in self.loaders]
        optimizers = [("the optimizer", optimizer) for optimizer in self.optimizers]
        return [*optimizers, *loaders, *(("a scheduler", value) for value in self.schedulers)]


def _distribute(accelerator: Accelerator, given: _Objects, config: ToDistributedConfig) -> None:
    """Distribute the model and its optimizer, and make the Accelerator follow the plan."""
    model: Any = given.model
    check_model(accelerator, model)
    loaders = [loader for loader in given.loaders if not isinstance(loader, PlannedLoader)]
    if config.num_items_in_batch == "auto":
        # accelerate's recipe passes the global count and multiplies the loss by num_processes, as DDP needs it. With
        # "local", the sum of dp global counts is the divisor, which cancels this factor.
        config = dataclasses.replace(config, num_items_in_batch="local")
    runtime = find_runtime(model)  # not None if from_pretrained has distributed the model
    plan = (runtime.plan if runtime is not None else None) or given_plan(config) or plan_in_model(model, config)
    is_picked = plan is None
    if runtime is not None and is_picked:
        plan_to_complete(runtime, model, None, config)  # raises: nothing can be added to what distributed the model
    source = source_of_plan(config, is_picked=is_picked)
    if plan is None:
        plan = _pick_plan(accelerator, model, given.optimizer, loaders, config)
    check_settings(accelerator, plan)
    if given.schedulers:
        is_planned = isinstance(accelerator, PlannedAccelerator)
        read = accelerator.read_counts if is_planned else {int(accelerator.num_processes)}
        check_num_processes(read, plan.dp, warns=not is_planned)
    for loader in loaders:
        check_loader(loader, plan.dp, config.loader, is_global=accelerator.split_batches)
    if runtime is None and accelerator.device_placement and not any(p.is_meta for p in model.parameters()):
        model.to(accelerator.device)
    if runtime is not None and accelerator.mixed_precision == "fp8" and not any(float8_layers(model)):
        raise PlanError(
            "Accelerator(mixed_precision='fp8') would convert the model's linear layers, but the model is distributed "
            "already. Load it without a plan, and let prepare distribute it"
        )
    if runtime is None:
        with _in_float8(accelerator, model):
            to_distributed(model, given.optimizer, config=dataclasses.replace(config, plan=plan))
        runtime_of(model).logits.in_evaluation = is_picked
        runtime_of(model).plan_source = source
    elif given.optimizer is not None and find_runtime(given.optimizer) is not runtime:
        to_distributed(model, given.optimizer, config=config)
    else:
        plan_to_complete(runtime, model, None, config)
    plain = without_compilation(model)
    _show(accelerator, plain, config)
    become_planned(accelerator, config.loader)
    _equip(accelerator, plain)
    accelerator._models.append(plain)


@contextlib.contextmanager
def _in_float8(accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
    """Convert linear layers by the Accelerator's recipe for fp8, if it has one; undo it if the context raises."""
    if accelerator.mixed_precision != "fp8":
        yield
        return
    own = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    recipe = accelerator.ao_recipe_handler
    # With the option on, torchao would replace the parameters, which the optimizer has already.
    config = dataclasses.replace(recipe.config, enable_fsdp_float8_all_gather=False)
    convert_model_to_fp8_ao(model, config=config, module_filter_func=recipe.module_filter_func)
    before = {child for _, _, child in own}
    for _, layer in float8_layers(model):
        layer.config = layer.config if layer in before else recipe.config
    try:
        yield
    except BaseException:
        for parent, name, child in own:
            setattr(parent, name, child)
        raise


def _prepared(accelerator: Accelerator, objects: Sequence[Any]) -> Any:
    assert isinstance(accelerator, PlannedAccelerator)
    done: dict[int, Any] = {}
    # Schedulers are prepared last, since they need the optimizer's wrapper.
    for value in sorted(objects, key=lambda value: isinstance(value, LRScheduler)):
        if isinstance(value, DataLoader | PlannedLoader):
            done[id(value)] = accelerator.prepare_data_loader(value)
        elif isinstance(value, Optimizer):
            # to_distributed has moved the optimizer's state; accelerate would move it by a state dict.
            done[id(value)] = _mark(accelerator.prepare_optimizer(value, device_placement=False))
        elif isinstance(value, LRScheduler):
            done[id(value)] = _mark(accelerator.prepare_scheduler(value))
    result = tuple(done.get(id(value), value) for value in objects)
    return result if len(result) != 1 else result[0]


def _show(accelerator: Accelerator, model: nn.Module, config: ToDistributedConfig) -> None:
    """Measure for the Accelerator's trackers, and show the card, if the config asks for no lines."""
    runtime = runtime_of(model)
    if runtime.features.find(Watch) is None and accelerator.log_with:
        start_monitor(model, runtime, config, Preparation.make(model, config), every=_EVERY, prints=False)


def _mark(value: Any) -> Any:
    """Mark an object so that ``accelerator.prepare`` returns it unchanged; return the object."""
    value._is_accelerate_prepared = True
    return value


def _equip(accelerator: Accelerator, model: Any) -> None:
    """Add to the model what accelerate expects: a no_sync method, and mixed precision around forward."""
    _mark(model)
    model.no_sync = functools.partial(_no_sync, model)
    if accelerator.native_amp:
        leave_out_of_graphs(__name__)
        context = get_mixed_precision_context_manager(accelerator.native_amp, accelerator.autocast_handler)
        add_step(model, InAutocast(context))


def _no_sync(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Return a context in which gradients are not synchronised; LocalSGD would keep it open over several steps.

    Raises:
        PlanError: if LocalSGD calls it.
    """
    if sys._getframe(1).f_globals.get("__name__") == LocalSGD.__module__:
        raise PlanError(
            "LocalSGD lets each process step its own replica and averages the weights from time to time, which one "
            "device does not do. Under a plan all ranks compute each step together; write LocalSGD(..., "
            "enabled=False), or leave it out, and reduce communication by Accelerator(gradient_accumulation_steps=...)"
        )
    return no_sync(model)


def _pick_plan(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer | None,
    loaders: Sequence[DataLoader[Any]],
    config: ToDistributedConfig,
) -> ParallelPlan:
    """Return the plan that the planner picks for a global batch of one rank's batch times the plan's own dp."""
    dp, tried = accelerator.state.num_processes, set()
    plans = runnable_plans(call_of(model, config, optimizer, device_for(device_of(model))))
    while True:
        loader = loaders[0] if loaders else None
        if loader is not None and not accelerator.split_batches:
            loader = global_batches(loader, dp)
        plan, reasons = pick_plan(plans, loader)
        tried.add(dp)
        if plan.dp in tried or accelerator.split_batches or config.input_spec is not None:
            tell_reasons(reasons)  # those of earlier rounds are about other batches
            return plan
        dp = plan.dp
