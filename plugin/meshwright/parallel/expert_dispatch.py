"""Send each token to the ranks that hold its experts, and bring back what the experts return.

Of R tokens on a rank, each with k experts, for a width of H::

    [R, H] ── a row for each token and expert, sorted by expert ──> [R * k, H] ── all-to-all ──> the rows of own experts
                                                                                                      │ the module's own
                                                                                                      │ code, weight 1
    [R, H] <── rows back in order, times the router's weights, summed ── [R * k, H] <── all-to-all ───┘

No token is dropped. Backward sends the gradients the same ways. The router and its weights stay with the token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.mesh.axes import Axis
from meshwright.parallel.collectives import all_to_all, all_to_all_uneven, once_differentiable
from meshwright.parallel.method_chain import ChainStep


class ExpertDispatch(ChainStep):
    """The step of a module of experts, of which each rank of an axis holds as many.

    Args:
        experts: the module, whose weights are this rank's shards.
        axis: the ranks that share the experts; all of them must make each call, also a rank without tokens.
    """

    def __init__(self, experts: nn.Module, axis: Axis):
        self.experts, self.axis = experts, axis
        self._local = next(experts.parameters()).shape[0]
        experts.num_experts = self._local  # type: ignore[assignment]  # the module's code has as many weights

    def __call__(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of what its experts return for each token.

        Args:
            hidden: the tokens of this rank, ``[R, H]``.
            top_k_index: the experts of each token, ``[R, k]``.
            top_k_weights: their weights, ``[R, k]``.
        """
        experts, slots = top_k_index.flatten(), top_k_index.shape[-1]
        order = torch.argsort(experts, stable=True)
        own = torch.bincount(experts, minlength=self.axis.size * self._local).view(self.axis.size, self._local)
        counts = all_to_all(own, self.axis)  # [ranks, own experts]: the rows from each rank for each of them
        sent, received = torch.stack([own.sum(1), counts.sum(1)]).tolist()
        rows = _exchange(hidden[order // slots], sent, received, self.axis)
        numbers = torch.arange(self._local, device=hidden.device).repeat(self.axis.size)
        index = numbers.repeat_interleave(counts.flatten()).unsqueeze(-1)
        results = self._run(rows, index, top_k_weights.new_ones(index.shape))
        back = _exchange(results, received, sent, self.axis)
        in_order = torch.empty_like(back).index_copy(0, order, back)
        weighted = in_order.view(*top_k_index.shape, -1) * top_k_weights.unsqueeze(-1)
        return weighted.sum(1).to(hidden.dtype)

    def _run(self, rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        count = len(rows)
        if not count:
            # A row that is dropped again: backward must make its exchanges, and gather weights, on this rank too, and
            # experts without tokens have a gradient of zeros.
            rows, index, weights = (F.pad(x, (0, 0, 0, 1)) for x in (rows, index, weights))
        result: Tensor = self.method(rows, index, weights)
        return result[:count]


def _exchange(x: Tensor, sent: list[int], received: list[int], axis: Axis) -> Tensor:
    result: Tensor = _Exchange.apply(x, sent, received, axis)
    return result


class _Exchange(torch.autograd.Function):
    """Sends rows to the ranks of an axis; backward sends their gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], axis: Axis) -> Tensor:
        ctx.sizes = received, sent, axis
        return all_to_all_uneven(x, sent, received, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all_uneven(grad, *ctx.sizes), None, None, None
