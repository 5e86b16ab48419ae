"""Options that an optimizer keeps for single parameters, outside of its groups, as those of bitsandbytes do.

bitsandbytes has one manager for all optimizers of a process, as ``optimizer.mng``, which knows parameters by identity
or by their place in the groups. Both change where a rank steps something else in a parameter's place.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from torch.optim import Optimizer


def follow_overrides(optimizer: Optimizer, parameter: nn.Parameter, stepped: nn.Parameter) -> None:
    """Give what is stepped in a parameter's place the parameter's own options."""
    manager: Any = getattr(optimizer, "mng", None)
    if not hasattr(manager, "pid2config"):
        return
    manager.index2config.clear()  # of places in the groups, which have changed
    of_modules = {id(getattr(module, name)): config for module, name, config in manager.module_weight_config_triple}
    config = {**of_modules.get(id(parameter), {}), **manager.pid2config.get(id(parameter), {})}
    manager.pid2config.pop(id(stepped), None)  # of a parameter that is gone, whose identity is used again
    if config:
        manager.pid2config[id(stepped)] = config


def forget_overrides(optimizer: Optimizer) -> None:
    """Give a copy of an optimizer a manager of its own, without options of single parameters."""
    manager: Any = getattr(optimizer, "mng", None)
    if hasattr(manager, "pid2config"):
        manager = optimizer.__dict__["mng"] = copy.copy(manager)
        manager.pid2config, manager.index2config, manager.module_weight_config_triple = {}, {}, []
