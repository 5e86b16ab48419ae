"""Checks that an optimizer updates each element from that element alone, so that its steps are exact on shards."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from meshwright.errors import OptimizerMismatchError
from meshwright.plan.config import ParallelPlan

_ELEMENTWISE = (
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


def check_elementwise(optimizer: Optimizer, *, is_trusted: bool, plan: ParallelPlan | None = None) -> None:
    """Raise if an optimizer's step on a shard may differ from its step on the whole tensor.

    Args:
        optimizer: the user's optimizer.
        is_trusted: whether the user declares the optimizer elementwise (ToDistributedConfig.optimizer_is_elementwise).
        plan: the plan; one that leaves each tensor whole takes any optimizer. None if ZeRO alone shards.

    Raises:
        OptimizerMismatchError: for factored, layer-wise or matrix updates (Adafactor, LAMB, Muon, ...),
            and for optimizer classes that this version does not know.
    """
    whole = "zero_stage=0" if plan is None else _whole(plan)
    if not whole or is_trusted or any(type(optimizer).step is known.step for known in _ELEMENTWISE):
        return
    raise OptimizerMismatchError(
        f"{type(optimizer).__name__} is not known to update each element from that element alone, so its step "
        "on a shard may differ from its step on the whole tensor. Use one of "
        f"{', '.join(known.__name__ for known in _ELEMENTWISE)}. If it is elementwise, pass "
        f"ToDistributedConfig(optimizer_is_elementwise=True). Otherwise use a plan with {whole}"
    )


def _whole(plan: ParallelPlan) -> str:
    """Return the fields of a plan that would leave each tensor whole on one rank; empty if all are."""
    return " and ".join([*(f"{axis}=1" for axis in plan.weight_axes), *(["zero_stage=0"] if plan.zero_stage else [])])
