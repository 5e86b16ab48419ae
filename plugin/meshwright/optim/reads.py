"""What an optimizer reads to update an element: that element alone, or more of its parameter.

This decides on what a rank may step. Only optimizers that are known to read the element alone step parts of parameters.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from meshwright.optim.chained import members
from meshwright.roles.brought import Brought

ELEMENTWISE = (
    torch.optim.AdamW,
    torch.optim.Adam,
    torch.optim.SGD,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
"""torch's optimizers that update each element from that element alone, with all of their options."""

# bitsandbytes' classes that do so if they keep the state in 32 bits; those of these names in 8 bits quantise blocks.
_OF_BITSANDBYTES = frozenset(
    f"{paged}{kind}{bits}"
    for paged in ("", "Paged")
    for kind in ("Adam", "AdamW", "Lion", "RMSprop", "SGD", "Adagrad", "AdEMAMix")
    for bits in ("", "32bit")
)


class Reads(enum.StrEnum):
    """What the update of an element reads: gradients, weights and state of the element, or of its parameter."""

    ELEMENT = "element"
    PARAMETER = "parameter"


def reads_of(optimizer: Optimizer) -> list[Reads]:
    """Return what each group of an optimizer reads. An optimizer that is not known may read the whole parameter."""
    is_watched = has_step_hooks(optimizer)
    return [
        Reads.ELEMENT if is_known(each) and not is_watched and not has_step_hooks(each) else Reads.PARAMETER
        for each in members(optimizer)
        for _ in each.param_groups
    ]


def is_known(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is known to update each element from that element alone.

    A subclass may read more in a method of its own, and so may a class or a module with a function of the program.
    """
    kind = type(optimizer)
    if kind in ELEMENTWISE:
        brought = Brought()
        methods = [x for name, x in vars(optimizer).items() if callable(getattr(kind, name, None)) and name != "step"]
        return (
            patched_step(optimizer) is None and brought.is_stock_class(kind) and not any(map(brought.is_own, methods))
        )
    library = sys.modules.get("bitsandbytes.optim")
    if kind.__name__ not in _OF_BITSANDBYTES or getattr(library, kind.__name__, None) is not kind:
        return False
    return patched_step(optimizer) is None and _keeps_32_bits(optimizer)


def _keeps_32_bits(optimizer: Any) -> bool:
    """Return whether an optimizer of bitsandbytes quantises nothing and reads no norm, for any parameter."""
    options, manager = optimizer.args, optimizer.mng
    own = [*manager.pid2config.values(), *(config for *_, config in manager.module_weight_config_triple)]
    reads_norm = options.max_unorm or getattr(options, "percentile_clipping", 100) != 100  # the latter in old versions
    return options.optim_bits == 32 and not reads_norm and not any(own)


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether the program has registered hooks of an optimizer's step, which may read whole parameters."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def patched_step(optimizer: Optimizer) -> Callable[..., object] | None:
    """Return what the program has put in the place of the method ``step`` of this optimizer, if anything.

    torch's schedulers, which count the steps, replace it too.
    """
    own = vars(optimizer).get("step")
    return None if own is None or not Brought().is_own(own, around=type(optimizer).step) else own
