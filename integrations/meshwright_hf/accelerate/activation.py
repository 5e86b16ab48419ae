"""Scripts that are not to be changed: ``accelerator.prepare`` itself distributes by the plan."""

from __future__ import annotations

import functools
from typing import Any

from accelerate import Accelerator
from torch import nn

from meshwright.config import ToDistributedConfig
from meshwright.optim.runtime import find_runtime
from meshwright_hf.accelerate.preparation import prepare

_ORIGINAL = "_meshwright_original"


def activate(config: ToDistributedConfig | None = None) -> None:
    """Have ``accelerator.prepare`` distribute causal LMs of transformers by a plan, until ``deactivate``.

    Calls with any other model, and with none, stay accelerate's own. For a script of somebody else; in one's own,
    ``prepare`` says what it does. A second call replaces the config.

    Args:
        config: of every ``prepare``.

    Example::

        meshwright_hf.accelerate.activate(ToDistributedConfig(plan=ParallelPlan(tp=2)))
        runpy.run_path("run_clm_no_trainer.py", run_name="__main__")
    """
    deactivate()
    original = Accelerator.prepare

    @functools.wraps(original)
    def prepare_by_plan(self: Accelerator, *args: Any, device_placement: list[bool] | None = None) -> Any:
        if not any(is_supported(value) for value in args):
            return original(self, *args, device_placement=device_placement)
        if device_placement is not None:
            raise ValueError("device_placement is not available under a plan; set Accelerator(device_placement=...)")
        return prepare(self, *args, config=config)

    setattr(prepare_by_plan, _ORIGINAL, original)
    Accelerator.prepare = prepare_by_plan  # type: ignore[method-assign]


def deactivate() -> None:
    """Give ``accelerator.prepare`` back; what was prepared stays distributed."""
    Accelerator.prepare = getattr(Accelerator.prepare, _ORIGINAL, Accelerator.prepare)  # type: ignore[method-assign]


def is_supported(model: Any) -> bool:
    """Whether this is a causal LM of transformers that nothing has distributed yet."""
    if not isinstance(model, nn.Module) or find_runtime(model) is not None:
        return False
    if getattr(model, "_is_accelerate_prepared", False):
        return False
    return getattr(getattr(model, "loss_function", None), "__name__", None) == "ForCausalLMLoss"
