"""What an optimizer reads to update an element, and so whether ranks may step parts of a parameter.

This decides on what a rank may step. Only optimizers that are known to read the element alone step parts of parameters.
"""

from __future__ import annotations

import enum
import inspect
import sys
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from meshwright.errors import OptimizerMismatchError
from meshwright.optim.chained import members
from meshwright.optim.trial import CHECKED, why_not_apart, why_not_on_host
from meshwright.plan.config import ParallelPlan, ToDistributedConfig
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


Declared = Literal["element", "parameter"] | None


def declared(config: ToDistributedConfig) -> Declared:
    """Return what the user says that the optimizer reads, if anything."""
    return "element" if config.optimizer_is_elementwise else config.optimizer_reads


def check_elementwise(optimizer: Optimizer, *, is_trusted: bool, plan: ParallelPlan | None = None) -> None:
    """Raise if an optimizer's step on a shard may differ from its step on the whole tensor.

    Args:
        optimizer: the user's optimizer.
        is_trusted: whether the user declares the optimizer elementwise (ToDistributedConfig.optimizer_is_elementwise).
        plan: the plan; one that leaves each tensor whole takes any optimizer. None if ZeRO alone shards.

    Raises:
        OptimizerMismatchError: for optimizers that are not known to update each element from that element alone.
    """
    whole = "zero_stage=0" if plan is None else _whole(plan)
    if not whole or is_trusted:
        return
    # A program may have an optimizer for each parameter, and each is looked at before each of its steps.
    known = vars(optimizer).get("step"), has_step_hooks(optimizer), len(optimizer.param_groups)
    if vars(optimizer).get(CHECKED) == known:
        return
    if all(reads is Reads.ELEMENT for reads in reads_of(optimizer)):
        vars(optimizer)[CHECKED] = known
        return
    raise OptimizerMismatchError(
        f"{_name(optimizer)} is not known to update each element from that element alone, so its step "
        "on a shard may differ from its step on the whole tensor. Use one of "
        f"{', '.join(known.__name__ for known in ELEMENTWISE)}; or pass the optimizer to to_distributed, which steps "
        "whole parameters with any other optimizer. If it is elementwise, pass "
        f"ToDistributedConfig(optimizer_is_elementwise=True). Otherwise use a plan with {whole}"
    )


def check_reads(optimizer: Optimizer, reads: Declared, plan: ParallelPlan) -> None:
    """Raise if neither the ranks' parts nor whole parameters, each on one rank, can be stepped as on one device.

    Args:
        optimizer: the user's optimizer.
        reads: what the user says that it reads; see :func:`declared`.
        plan: the plan; one that leaves each tensor whole takes any optimizer.

    Raises:
        OptimizerMismatchError: for updates that read several parameters at once (Prodigy, LBFGS), for steps inside of
            backward (LOMO), and for a ``step`` that the program has replaced; with offload also for optimizers that
            cannot step on the host.
    """
    if plan.offload is not None and (why := why_not_on_host(optimizer)) is not None:
        raise OptimizerMismatchError(
            f"ParallelPlan.offload={plan.offload!r} steps on the host, where {_name(optimizer)} ended a trial step in "
            f"{why}. Make the optimizer without options that need a GPU (capturable=True), or leave offload out"
        )
    if not (whole := _whole(plan)):
        return
    otherwise = f"Otherwise use a plan with {whole}, or one of {', '.join(known.__name__ for known in ELEMENTWISE)}"
    if any(_needs_closure(each) for each in members(optimizer)):
        raise OptimizerMismatchError(
            f"{_name(optimizer)} has a step that needs a closure. Such a step may compute the loss again and read "
            f"all parameters at once, of which a rank has parts. {otherwise}"
        )
    if reads == "element":
        return
    if patched := [step for each in members(optimizer) if (step := patched_step(each)) is not None]:
        raise OptimizerMismatchError(
            f"{_name(optimizer)}.step is {getattr(patched[0], '__qualname__', patched[0])}, which the program has put "
            "in its place. It would see parts of parameters, since the whole ones exist inside of the optimizer's own "
            "step alone. Use optimizer.register_step_pre_hook and register_step_post_hook before the call, or a "
            "subclass of the optimizer with this step. If it reads each element alone, pass "
            f"ToDistributedConfig(optimizer_reads='element'). {otherwise}"
        )
    if plan.pp > 1 and any(map(has_step_hooks, {optimizer, *members(optimizer)})):
        raise OptimizerMismatchError(
            f"{_name(optimizer)} has hooks of its step, and each of the {plan.pp} stages steps parameters of its own, "
            "so a hook that reads all of them would see others than on one device. Pass "
            "ToDistributedConfig(optimizer_reads='element') for a hook that reads no parameter, or use a plan with pp=1"
        )
    unknown = [each for each in members(optimizer) if reads is None and not is_known(each)]
    if (why := next((why for each in unknown if (why := why_not_apart(each))), None)) is not None:
        raise OptimizerMismatchError(
            f"{_name(optimizer)} can be stepped neither in shards nor one parameter at a time: {why}. If it "
            "updates each element from that element alone, pass ToDistributedConfig(optimizer_reads='element'); if "
            f"it updates each parameter from that parameter alone, optimizer_reads='parameter'. {otherwise}"
        )


def whole_groups(optimizer: Optimizer, *, reads: Declared, plan: ParallelPlan) -> list[int]:
    """Return the indices of the groups whose parameters must be stepped whole, because a rank may have a part only."""
    if not _whole(plan):
        return []
    found = reads_of(optimizer) if reads is None else [Reads(reads)] * len(optimizer.param_groups)
    return [index for index, of_group in enumerate(found) if of_group is Reads.PARAMETER]


def _whole(plan: ParallelPlan) -> str:
    """Return the fields of a plan that would leave each tensor whole on one rank; empty if all are."""
    return " and ".join([*(f"{axis}=1" for axis in plan.weight_axes), *(["zero_stage=0"] if plan.zero_stage else [])])


def _needs_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimizer cannot be stepped without a function that computes the loss."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def _name(optimizer: Optimizer) -> str:
    return " and ".join(type(each).__name__ for each in members(optimizer))
