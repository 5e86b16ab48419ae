"""The scale of a GradScaler, for backward passes that begin before the program can multiply the loss by it."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import Tensor, nn
from torch.amp import GradScaler


class LossScale:
    """The factor of losses whose backward runs inside of the model's forward.

    In float16 small gradients round to 0 unless the loss is scaled first. The gradients of micro-batches and of a
    pipeline are computed before ``scaler.scale(loss)`` runs, so the loss is multiplied here by the scale that the
    scaler has at this time, and the gradients are divided by it again when the loss's own gradient arrives. As scales
    are powers of 2, neither rounds.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module):
        self._dtypes = {parameter.dtype for parameter in model.parameters()}
        self._scaler: weakref.ref[GradScaler] | None = None

    def follow(self, scaler: GradScaler) -> None:
        """Use the scale of this scaler from now on."""
        self._scaler = weakref.ref(scaler)

    def is_needed(self, device: torch.device) -> bool:
        """Return whether the forward pass that runs now computes in float16."""
        kind = device.type
        is_cast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.float16
        return is_cast or torch.float16 in self._dtypes

    def of(self, device: torch.device) -> Tensor | float | None:
        """Return the factor for the forward pass that runs now; None if there is none."""
        if not self.is_needed(device):
            return None
        scaler = None if self._scaler is None else self._scaler()
        if scaler is None:  # the program's first pass
            found = [one for one in gc.get_objects() if issubclass(type(one), GradScaler) and one.is_enabled()]
            if not found:
                return None
            scaler = found[-1]
            self.follow(scaler)
        return scaler._init_scale if scaler._scale is None else scaler._scale.detach().clone()
