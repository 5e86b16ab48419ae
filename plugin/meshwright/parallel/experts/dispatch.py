"""Send each token to the ranks that hold its experts, and bring back the sum of what its experts return.

Of R tokens on a rank, each with k experts, for a width of H::

    [R, H] ── copies of tokens, to the ranks of their experts ──> [copies, H]
                                                                      │ a row for each own expert of a copy, the
                                                                      │ module's own code, the sum over a copy's rows
    [R, H] <── the sum over a token's copies, on its own rank ── [copies, H]

No token is dropped. Backward sends the gradients the same ways. The router stays with the token, and its weights travel
with the copies. A :class:`TokenDispatcher` has the ways between the ranks.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.mesh.axes import Axis
from meshwright.parallel.experts.token_dispatchers import add_rows, make_dispatcher, take_rows
from meshwright.parallel.method_chain import ChainStep
from meshwright.parallel.shards.reads import own_shape


class ExpertDispatch(ChainStep):
    """The step of a module of experts, of which each rank of an axis holds as many.

    Args:
        experts: the module, whose weights are this rank's shards.
        axis: the ranks that share the experts; all of them must make each call, also a rank without tokens.
        dispatcher: the name of the dispatcher.
    """

    def __init__(self, experts: nn.Module, axis: Axis, dispatcher: str = "all_to_all"):
        self.experts = experts
        self._local = own_shape(next(experts.parameters()))[0]
        self._dispatch = make_dispatcher(dispatcher, axis, self._local)
        experts.num_experts = self._local  # type: ignore[assignment]  # the module's code has as many weights

    def __call__(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of what its experts return for each token.

        Args:
            hidden: the tokens of this rank, ``[R, H]``.
            top_k_index: the experts of each token, ``[R, k]``.
            top_k_weights: their weights, ``[R, k]``.
        """
        return self._dispatch(hidden, top_k_index, top_k_weights, self._run).to(hidden.dtype)

    def _run(self, rows: Tensor, index: Tensor, weights: Tensor, pairs: int | None = None) -> Tensor:
        # transformers' code leaves out entries of other ranks only if it is told that there are any.
        self.experts._is_expert_parallel = pairs is None  # type: ignore[assignment]
        if pairs is None:
            result: Tensor = self.method(rows, index, weights.masked_fill(index == self._local, 0))
            return result
        count = len(rows)
        if not count:
            # A row that is dropped again: backward must make its exchanges, and gather weights, on this rank too, and
            # experts without tokens have a gradient of zeros.
            rows, index, weights = (F.pad(x, (0, 0, 0, 1)) for x in (rows, index[:, :1], weights[:, :1]))
            return self._run(rows, index, weights, pairs=1)[:count]
        slots = index.shape[1]
        order = index.flatten().argsort(stable=True)[:pairs]  # by expert; those of other ranks come last
        row = order // slots
        own, weight = index.flatten()[order], take_rows(weights.reshape(-1, 1), order)
        return add_rows(self.method(take_rows(rows, row), own.unsqueeze(-1), weight), row, count)
