"""accelerate's ``Accelerator`` with a plan from the start: a script changes its import."""

from __future__ import annotations

from typing import Any

from meshwright.choose.given_plan import config_with, given_plan
from meshwright.config import PlanLike, ToDistributedConfig
from meshwright_hf.accelerate.accelerator import PlannedAccelerator
from meshwright_hf.accelerate.checks import check_placement
from meshwright_hf.accelerate.preparation import prepare
from meshwright_hf.accelerate.state import is_new_model, planned_models


class Accelerator(PlannedAccelerator):
    """accelerate's Accelerator, whose ``prepare`` distributes the model by a plan and whose ``num_processes`` is dp.

    Everything else is the script's: see ``prepare`` of this module.

    Args:
        args: of ``accelerate.Accelerator``.
        plan: in any form that ``to_distributed`` takes; by default the launcher's, or the one that the planner picks.
        config: its options.
        kwargs: of ``accelerate.Accelerator``.

    Raises:
        PlanError: for what is no plan, and for one that is not the launcher's.

    Example::

        from meshwright_hf.accelerate import Accelerator  # was: from accelerate import Accelerator

        accelerator = Accelerator(gradient_accumulation_steps=4, plan="tp2")
        warmup_steps = 100 * accelerator.num_processes
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    """

    def __init__(
        self, *args: Any, plan: PlanLike | None = None, config: ToDistributedConfig | None = None, **kwargs: Any
    ) -> None:
        self._config = config_with(config, plan)
        self._plan = given_plan(self._config)
        super().__init__(*args, **kwargs)

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        """Distribute a model by the plan, with its optimizer, loaders and schedulers; see ``prepare`` of this module.

        Raises:
            PlanError: see there.
        """
        if any(is_new_model(value) for value in objects) or not planned_models(self):
            check_placement(device_placement)
            return prepare(self, *objects, config=self._config)
        return super().prepare(*objects, device_placement=device_placement)
