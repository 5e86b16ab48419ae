"""Which optimizers are exact on shards: those that update each element from that element alone."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from meshwright.errors import OptimizerMismatchError

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


def check_elementwise(optimizer: Optimizer, *, is_trusted: bool) -> None:
    """Refuse an optimizer whose step on a shard is not the shard of its step.

    Args:
        optimizer: the user's.
        is_trusted: the user vouches for it (ToDistributedConfig.optimizer_is_elementwise).

    Raises:
        OptimizerMismatchError: for factored, layer-wise or matrix updates (Adafactor, LAMB, Muon, ...)
            and for classes this version does not know.
    """
    if is_trusted or any(type(optimizer).step is known.step for known in _ELEMENTWISE):
        return
    raise OptimizerMismatchError(
        f"{type(optimizer).__name__} is not known to update each element from that element alone, so its step "
        "on a shard of a tensor would not be the shard of its step. Use one of "
        f"{', '.join(known.__name__ for known in _ELEMENTWISE)}; or, if it is elementwise, say so with "
        "ToDistributedConfig(optimizer_is_elementwise=True); or use a plan with tp=1 and zero_stage=0"
    )
