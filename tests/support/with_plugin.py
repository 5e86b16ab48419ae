"""Run one of accelerate's own test scripts with ``accelerator.prepare`` going by a plan.

``python -m support.with_plugin SCRIPT all|causal``: for which models.
"""

from __future__ import annotations

import runpy
import sys

import meshwright as mw
from meshwright.launch import world_size
from meshwright_hf.accelerate import activate
from meshwright_hf.accelerate.activation import is_causal_lm

if __name__ == "__main__":
    _, script, models = sys.argv
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(dp=world_size()))
    activate(config, models=is_causal_lm if models == "causal" else lambda model: True)
    sys.argv = [script]
    runpy.run_module(f"accelerate.test_utils.scripts.{script}", run_name="__main__")
