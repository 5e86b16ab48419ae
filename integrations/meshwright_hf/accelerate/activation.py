"""Scripts that are not to be changed: ``accelerator.prepare`` itself distributes by the plan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from torch import nn

from meshwright.config import PlanLike, ToDistributedConfig
from meshwright.given import config_with
from meshwright.optim.runtime import find_runtime
from meshwright_hf.accelerate.preparation import prepare
from meshwright_hf.versions import warn_outside_range

_ORIGINAL = "_meshwright_original"


def is_causal_lm(model: nn.Module) -> bool:
    """Whether a model has the causal-LM loss of transformers."""
    return getattr(getattr(model, "loss_function", None), "__name__", None) == "ForCausalLMLoss"


def activate(
    config: ToDistributedConfig | None = None,
    *,
    plan: PlanLike | None = None,
    models: Callable[[nn.Module], bool] = is_causal_lm,
) -> None:
    """Have ``accelerator.prepare`` distribute models by a plan, until ``deactivate``.

    Calls with any other model, and with none, stay accelerate's own. For a script of somebody else; in one's own,
    ``prepare`` says what it does. A second call replaces the config.

    Args:
        config: of every ``prepare``.
        plan: of every ``prepare``, in any form that ``to_distributed`` takes.
        models: which ones; by default the causal LMs of transformers. Any model can be data-parallel.

    Example::

        meshwright_hf.accelerate.activate(plan="tp2")
        runpy.run_path("run_clm_no_trainer.py", run_name="__main__")
    """
    warn_outside_range()
    config = config_with(config, plan)
    deactivate()
    original = Accelerator.prepare

    @functools.wraps(original)
    def prepare_by_plan(self: Accelerator, *args: Any, device_placement: list[bool] | None = None) -> Any:
        if not any(_is_new(value) and (find_runtime(value) is not None or models(value)) for value in args):
            return original(self, *args, device_placement=device_placement)
        if device_placement is not None:
            raise ValueError("device_placement is not available under a plan; set Accelerator(device_placement=...)")
        return prepare(self, *args, config=config)

    setattr(prepare_by_plan, _ORIGINAL, original)
    Accelerator.prepare = prepare_by_plan


def deactivate() -> None:
    """Give ``accelerator.prepare`` back; what was prepared stays distributed."""
    Accelerator.prepare = getattr(Accelerator.prepare, _ORIGINAL, Accelerator.prepare)


def _is_new(value: Any) -> bool:
    """Whether this is a model that no Accelerator has yet."""
    return isinstance(value, nn.Module) and not getattr(value, "_is_accelerate_prepared", False)
