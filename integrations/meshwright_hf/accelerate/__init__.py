"""accelerate under a plan: ``prepare`` distributes the script's objects by the plan, and the loop stays the same.

    preparation.py     ``prepare``                       activation.py  the stock Accelerator's, for unchanged scripts
    drop_in.py         an Accelerator that has a plan    accelerator.py  its methods that depend on the plan
    planned_loader.py  loader and scheduler              state.py  ``save_state`` and ``load_state``
    checks.py          what contradicts a plan

Example::

    accelerator = Accelerator(gradient_accumulation_steps=4)
    model, optimizer, loader, scheduler = meshwright_hf.accelerate.prepare(
        accelerator, model, optimizer, loader, scheduler, config=ToDistributedConfig(plan=ParallelPlan(dp=2, tp=2))
    )
"""

from meshwright_hf.accelerate.activation import activate, deactivate
from meshwright_hf.accelerate.drop_in import Accelerator
from meshwright_hf.accelerate.preparation import prepare

__all__ = ["Accelerator", "activate", "deactivate", "prepare"]
