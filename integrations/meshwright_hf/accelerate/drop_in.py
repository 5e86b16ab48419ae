"""A drop-in for accelerate's ``Accelerator`` that knows the plan from the start: a script only changes its import."""

from __future__ import annotations

from typing import Any

from meshwright.choose.given_plan import config_with, given_plan
from meshwright.plan.config import PlanLike, ToDistributedConfig
from meshwright_hf.accelerate.accelerator import PlannedAccelerator
from meshwright_hf.accelerate.checks import check_placement
from meshwright_hf.accelerate.preparation import prepare
from meshwright_hf.accelerate.state import is_new_model, planned_models


class Accelerator(PlannedAccelerator):
    """An Accelerator whose ``prepare`` distributes the model by a plan, and whose ``num_processes`` is dp.

    The rest of the script stays as it is; see ``prepare`` in this package.

    Args:
        args: the arguments of ``accelerate.Accelerator``.
        plan: a plan in any form that ``to_distributed`` takes; by default the launcher's, or the planner's choice.
        config: the options of ``to_distributed``.
        kwargs: the keyword arguments of ``accelerate.Accelerator``.

    Raises:
        PlanError: if ``plan`` is not a plan, or differs from the launcher's plan.

    Example::

        from meshwright_hf.accelerate import Accelerator  # was: from accelerate import Accelerator

        accelerator = Accelerator(gradient_accumulation_steps=4, plan="tp2")
        warmup_steps = 100 * accelerator.num_processes
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    """

    def __init__(
        self, *args: object, plan: PlanLike | None = None, config: ToDistributedConfig | None = None, **kwargs: object
    ) -> None:
        self._config = config_with(config, plan)
        self._plan = given_plan(self._config)
        super().__init__(*args, **kwargs)

    def prepare(self, *objects: object, device_placement: list[bool] | None = None) -> Any:
        """Distribute a model by the plan, with its optimizer, loaders and schedulers; see ``prepare`` in this package.

        Raises:
            PlanError: see ``prepare``.
        """
        if any(is_new_model(value) for value in objects) or not planned_models(self):
            check_placement(device_placement)
            return prepare(self, *objects, config=self._config)
        return super().prepare(*objects, device_placement=device_placement)
