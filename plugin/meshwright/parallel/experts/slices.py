"""Expert tensor parallelism: each rank holds a slice of every expert.

The ranks have different tokens. Each computes with those of all of them, and what its slice returns is an addend::

    [R, H] ── all-gather, with the routing ──> [ranks * R, H] ── this rank's slice ──> [ranks * R, H]
    [R, H] <── reduce-scatter ──────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.mesh.axes import Axis
from meshwright.parallel.collectives import all_gather, gather_rows, largest, reduce_scatter_rows
from meshwright.parallel.method_chain import ChainStep


class SlicedExperts(ChainStep):
    """The step of a module of experts, around those that bring tokens to them.

    Args:
        axis: the ranks that hold slices of the same experts; all of them must make each call.
    """

    def __init__(self, axis: Axis):
        self.axis = axis

    def __call__(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of what its experts return for each token of this rank, ``[R, H]``.

        Args:
            hidden: the tokens of this rank, ``[R, H]``.
            top_k_index: the experts of each token, ``[R, k]``.
            top_k_weights: their weights, ``[R, k]``.
        """
        count, axis = len(hidden), self.axis
        # Each rank adds a row of weight 0, so that backward makes its exchanges on a rank without tokens too.
        padding = (0, 0, 0, largest(count, axis) + 1 - count)
        # The slices' gradients of narrower weights are summed before they are rounded, as on one device.
        wide = top_k_weights.to(torch.promote_types(top_k_weights.dtype, hidden.dtype))
        rows, weights = (gather_rows(F.pad(x, padding), axis) for x in (hidden, wide))
        index = all_gather(F.pad(top_k_index, padding), axis)
        return reduce_scatter_rows(self.method(rows, index, weights), axis)[:count]


class OutputBiasOnce(ChainStep):
    """The step of a module of experts with an output bias, which the sum over the slices must have once.

    Each rank adds an equal share. The gradient of the bias is whole on each of them.

    Args:
        experts: the module.
        axis: the ranks that hold slices of the same experts.
    """

    def __init__(self, experts: nn.Module, axis: Axis):
        self.experts, self.others = experts, 1 - 1 / axis.size

    def __call__(self, rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return what the module's own code returns, with a share of the bias."""
        result: Tensor = self.method(rows, index, weights)
        bias = self.experts.get_parameter("down_proj_bias").detach()
        per_slot = bias[index.clamp(max=len(bias) - 1)] * weights.unsqueeze(-1)  # other ranks' experts have weight 0
        return result - self.others * per_slot.sum(1).to(result.dtype)
