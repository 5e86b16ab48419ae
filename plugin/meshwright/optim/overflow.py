"""Makes a GradScaler find the infinite gradients of all ranks, so that all of them skip the same steps."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from meshwright.optim.chained import chain_of
from meshwright.optim.runtime import Runtime, find_runtime, live_runtimes
from meshwright.optim.zero.sliced_optimizer import LentSlices
from meshwright.parallel.collectives import maximum
from meshwright.parallel.gradients.loss_scale import LossScale
from meshwright.parallel.shards.reads import reading_shards

Found = dict[torch.device, Tensor]  # a number for each device of gradients: not 0 if some are infinite or NaN


def share_overflow() -> None:
    """Make the scalers of this process look at the gradients of all ranks, where ranks have different gradients.

    A scaler has no hook between its search for infinite gradients and its decision, so a method of its class is
    replaced. For optimizers of models that are not distributed the method is torch's.
    """
    original: Any = GradScaler._unscale_grads_
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def _unscale_grads_(
        self: GradScaler, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> Found:
        runtimes = _runtimes(optimizer)
        for runtime in runtimes:
            runtime.gradients.settle()
            if (scale := runtime.features.find(LossScale)) is not None:
                scale.follow(self)
        with contextlib.ExitStack() as stack:
            stack.enter_context(reading_shards())
            if find_runtime(optimizer) is not None and (zero := runtimes[0].gradients.zero) is not None:
                stack.enter_context(LentSlices(chain_of(optimizer), zero))
            found: Found = original(self, optimizer, inv_scale, found_inf, allow_fp16)
        for runtime in runtimes:
            found = _of_all_ranks(found, found_inf, runtime)
        return found

    GradScaler._unscale_grads_ = _unscale_grads_  # type: ignore[method-assign]


def _runtimes(optimizer: Optimizer) -> list[Runtime]:
    """Return the runtimes of the models that an optimizer steps, whether it was passed to the call or not."""
    if (own := find_runtime(optimizer)) is not None:
        return [own]
    return [runtime for runtime in live_runtimes() if runtime.gradients.are_stepped_by(optimizer)]


def _of_all_ranks(found: Found, none: Tensor, runtime: Runtime) -> Found:
    """Return what any rank has found.

    Args:
        found: what this rank has found.
        none: what a rank has found that has no gradients.
        runtime: the runtime of the model that has the gradients.
    """
    if not runtime.spreads_gradients:
        return found
    runtime.meet_all("GradScaler.unscale_")
    devices = list(found) or [none.device]
    total = none.clone()
    for each in found.values():
        total += each.to(total.device)
    for axis in runtime.mesh.factors.values():
        total = maximum(total, axis)
    return {device: total.to(device) for device in devices}
