"""Run one of accelerate's own test scripts with ``accelerator.prepare`` going by a plan, for whatever model.

``accelerate launch ... -m support.with_plugin SCRIPT``.
"""

from __future__ import annotations

import runpy
import sys

from torch import nn

import meshwright as mw
from meshwright.mesh.process_group import world_size
from meshwright_hf.accelerate import activate

seen: list[nn.Module] = []


def every_model(model: nn.Module) -> bool:
    seen.append(model)
    return True


if __name__ == "__main__":
    script = sys.argv.pop()
    # Each process of these scripts draws other numbers for the same dataset, which is refused unless it has a name.
    options = mw.LoaderOptions(fingerprint="drawn anew by each process")
    activate(mw.ToDistributedConfig(plan=mw.ParallelPlan(dp=world_size()), loader=options), models=every_model)
    runpy.run_module(f"accelerate.test_utils.scripts.{script}", run_name="__main__")
    # In one piece: launchers start Python unbuffered, where print's pieces mix with those of other ranks.
    sys.stdout.write(f"models by the plan: {len(seen)}\n")
