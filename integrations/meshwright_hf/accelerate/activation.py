"""Makes stock ``accelerator.prepare`` distribute by a plan, for scripts that cannot be changed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from meshwright.choose.given_plan import config_with, given_plan
from meshwright.errors import PlanError
from meshwright.faults.equal_errors import say_equal_texts_once
from meshwright.optim.runtime import find_runtime
from meshwright.plan.config import PlanLike, ToDistributedConfig
from meshwright_hf.accelerate.accelerator import PlannedAccelerator, become_planned
from meshwright_hf.accelerate.checks import check_placement
from meshwright_hf.accelerate.preparation import prepare
from meshwright_hf.accelerate.state import is_new_model
from meshwright_hf.versions import warn_outside_range

_ORIGINAL = "_meshwright_original"
_PATCHED = ("__init__", "prepare")


def is_causal_lm(model: nn.Module) -> bool:
    """Return whether a model has the causal-LM loss of transformers."""
    return getattr(getattr(model, "loss_function", None), "__name__", None) == "ForCausalLMLoss"


def activate(
    config: ToDistributedConfig | None = None,
    *,
    plan: PlanLike | None = None,
    models: Callable[[nn.Module], bool] = is_causal_lm,
) -> None:
    """Make ``accelerator.prepare`` distribute models by a plan, until ``deactivate`` is called.

    Calls of ``accelerator.prepare`` with any other model, or without a model, work as in accelerate. Use ``activate``
    for scripts that you cannot change; in your own script, call ``prepare``. A second call replaces the config.

    Args:
        config: the options of every ``prepare``.
        plan: the plan of every ``prepare``, in any form that ``to_distributed`` takes.
        models: a function that returns whether to distribute a model; by default transformers' causal LMs. Any model
            can be data-parallel.

    Example::

        meshwright_hf.accelerate.activate(plan="tp2")
        runpy.run_path("run_clm_no_trainer.py", run_name="__main__")
    """
    say_equal_texts_once()
    warn_outside_range()
    config = config_with(config, plan)
    deactivate()
    make, original = Accelerator.__init__, Accelerator.prepare
    known = given_plan(config)

    @functools.wraps(make)
    def make_by_plan(self: Accelerator, *args: object, **kwargs: object) -> None:
        make(self, *args, **kwargs)
        become_planned(self, plan=known)  # scripts read num_processes for a schedule, before prepare

    @functools.wraps(original)
    def prepare_by_plan(self: Accelerator, *args: Any, device_placement: list[bool] | None = None) -> Any:
        if any(is_new_model(value) and (find_runtime(value) is not None or models(value)) for value in args):
            check_placement(device_placement)
            return prepare(self, *args, config=config)
        if isinstance(self, PlannedAccelerator) and any(is_new_model(value) for value in args):
            count = int(self.state.num_processes)
            wrong = self.read_counts - {count}
            if wrong and any(isinstance(value, LRScheduler) for value in args):
                raise PlanError(
                    f"accelerator.num_processes was {min(wrong)}, the dp of the plan of activate(), but this plan does "
                    f"not distribute this model: accelerate steps its scheduler {count} times per optimizer step. "
                    "Choose the models by activate(..., models=...), or write accelerator.state.num_processes for the "
                    "schedule of this model"
                )
        return original(self, *args, device_placement=device_placement)

    for name, patched in (("__init__", make_by_plan), ("prepare", prepare_by_plan)):
        setattr(patched, _ORIGINAL, getattr(Accelerator, name))
        setattr(Accelerator, name, patched)


def deactivate() -> None:
    """Restore ``accelerator.prepare``; models that were prepared stay distributed."""
    for name in _PATCHED:
        patched = getattr(Accelerator, name)
        setattr(Accelerator, name, getattr(patched, _ORIGINAL, patched))
