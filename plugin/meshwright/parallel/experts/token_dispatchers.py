"""Sends each token to the ranks of its experts and brings back the sum: to these ranks alone, to all, or by a program's
own kernels.

The rows of tokens are copied and added up with the same sums in each run. ``x[index]`` of torch gives the same bits in
each run, but takes five times as long on CPU as ``index_select``, whose backward adds in any order on CUDA.

Of R tokens on a rank, each with k experts, for a width of H::

    [R, H] ── copies of tokens, to the ranks of their experts ──> [copies, H]
                                                                      │ a row for each own expert of a copy, the
                                                                      │ module's own code, the sum over a copy's rows
    [R, H] <── the sum over a token's copies, on its own rank ── [copies, H]

No token is dropped. Backward sends the gradients the same ways. The router stays with the token, and its weights travel
with the copies. A :class:`TokenDispatcher` has the ways between the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.autograd import Node, TensorFunction, TensorsFunction
from meshwright.mesh.axes import Axis
from meshwright.parallel.collectives import (
    all_gather,
    all_to_all,
    gather_rows,
    largest,
    reduce_scatter_rows,
    start_all_to_all_uneven,
)
from meshwright.parallel.method_chain import ChainStep
from meshwright.parallel.shards.stand_in import own_shape


class RunExperts(Protocol):
    """Runs this rank's experts on rows that have come to it."""

    def __call__(self, rows: Tensor, index: Tensor, weights: Tensor, pairs: int | None = None) -> Tensor:
        """Return for each row the weighted sum of what this rank's experts return.

        Args:
            rows: the tokens, ``[rows, H]``.
            index: the experts of each row, ``[rows, k]``, counted from this rank's first one. An entry that is the
                number of this rank's experts stands for an expert of another rank, which adds nothing.
            weights: their weights, ``[rows, k]``, which have no effect for experts of other ranks.
            pairs: the number of entries that stand for experts of this rank, if the host knows it; each row then must
                have one. None computes without knowing it, and takes memory for all entries.
        """


class TokenDispatcher:
    """Moves the tokens of one module of experts between the ranks that share these experts.

    A subclass overrides ``__call__``, and :func:`register_dispatcher` gives it a name. There is an object for each
    module of experts, so it may keep buffers. A kernel that torch cannot differentiate must be in an autograd function:
    gradients must reach ``hidden`` and ``top_k_weights``.

    Args:
        axis: the ranks that share the experts: their number is ``axis.size``, this process is ``axis.rank`` of them,
            and ``axis.group`` is their process group.
        experts: the number of experts on each rank. Rank r holds those from ``r * experts`` on.

    Example:
        >>> class Alone(TokenDispatcher):
        ...     def __call__(self, hidden, top_k_index, top_k_weights, run):
        ...         return run(hidden, top_k_index, top_k_weights, top_k_index.numel())
    """

    def __init__(self, axis: Axis, experts: int):
        self.axis, self.experts = axis, experts

    def __call__(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, run: RunExperts) -> Tensor:
        """Return for each token the weighted sum of what its experts return, ``[R, H]``.

        All ranks of the axis make each call, also a rank without tokens.

        Args:
            hidden: the tokens of this rank, ``[R, H]``.
            top_k_index: the experts of each token, ``[R, k]``, counted over all ranks.
            top_k_weights: their weights, ``[R, k]``.
            run: computes this rank's experts for rows, ``run(rows, index, weights, pairs)``. The weighted sums that it
                returns must go back to the ranks of the tokens, which add them.
        """
        raise NotImplementedError


class AllToAllDispatcher(TokenDispatcher):
    """Sends one copy of a token to each rank that holds some of its experts, however many these are.

    The host reads how many copies travel, once for each call.
    """

    def __call__(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, run: RunExperts) -> Tensor:
        ranks, slots = self.axis.size, top_k_index.shape[1]
        owner = top_k_index // self.experts
        # A token travels for a slot if no earlier slot of the token has the same rank.
        is_later = torch.ones(slots, slots, dtype=torch.bool, device=owner.device).triu()
        is_first = (is_later | (owner.unsqueeze(2) != owner.unsqueeze(1))).all(2)
        target, order = torch.where(is_first, owner, ranks).flatten().sort(stable=True)
        own = torch.stack([_counts(x, ranks) for x in (target, owner.flatten())], 1)
        counts = all_to_all(own, self.axis)  # from each rank: its copies, and their pairs of a copy and an own expert
        sent, received, pairs = torch.stack([own[:, 0], *counts.unbind(1)]).tolist()
        token = order[: sum(sent)] // slots
        first = (target[: sum(sent)] * self.experts).unsqueeze(1)
        index = _own(top_k_index[token], first, self.experts)
        copies = (take_rows(hidden, token), index, take_rows(top_k_weights, token))
        rows, index, weights = _swap(copies, sent, received, self.axis)
        (back,) = _swap((run(rows, index, weights, sum(pairs)),), received, sent, self.axis)
        return add_rows(back, token, len(hidden))


class AllGatherDispatcher(TokenDispatcher):
    """Sends every token to every rank, so that all sizes are known, and no host waits for its device.

    Over NCCL this needs a process group that also has gloo, as that of :func:`to_distributed` has: over it the hosts
    agree on the largest number of tokens.
    """

    def __call__(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, run: RunExperts) -> Tensor:
        count, axis = len(hidden), self.axis
        # Each rank has at least one row of padding. It goes to the first expert of every rank with a weight of 0, so
        # that backward makes its exchanges on each of them, and experts without tokens have a gradient of zeros.
        padding = (0, 0, 0, largest(count, axis) + 1 - count)
        rows, weights = (gather_rows(F.pad(x, padding), axis) for x in (hidden, top_k_weights))
        index = all_gather(F.pad(top_k_index, padding, value=-1), axis)
        own = _own(index, axis.rank * self.experts, self.experts).masked_fill(index < 0, 0)
        return reduce_scatter_rows(run(rows, own, weights), axis)[:count]


def _own(index: Tensor, first: Tensor | int, experts: int) -> Tensor:
    """Count experts from a rank's first one; those of other ranks are ``experts``."""
    own = index - first
    return own.where((own >= 0) & (own < experts), experts)


def _counts(numbers: Tensor, below: int) -> Tensor:
    """Return how often each number below a limit occurs, without a wait of the host."""
    return numbers.new_zeros(below + 1).scatter_add_(0, numbers, torch.ones_like(numbers))[:below]


def _swap(tensors: Sequence[Tensor], sent: list[int], received: list[int], axis: Axis) -> tuple[Tensor, ...]:
    """Send ``sent[i]`` rows of each tensor to rank i, and return the ``received[i]`` rows from it, in rank order."""
    return _Swap.apply(sent, received, axis, *tensors)


class _Swap(TensorsFunction):
    """Swaps rows of several tensors with the ranks of an axis; backward swaps their gradients back."""

    is_linear = True

    @staticmethod
    def forward(ctx: Node, sent: list[int], received: list[int], axis: Axis, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.sizes = received, sent, axis
        waits = [start_all_to_all_uneven(x, sent, received, axis) for x in tensors]
        found = tuple(wait() for wait in waits)
        ctx.mark_non_differentiable(*(x for x in found if not x.is_floating_point()))
        return found

    @staticmethod
    def backward(ctx: Node, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # One node for all tensors, so that all ranks make these calls in one order.
        starts = zip(grads, ctx.needs_input_grad[3:], strict=True)
        waits = [start_all_to_all_uneven(grad, *ctx.sizes) if needed else None for grad, needed in starts]
        return None, None, None, *(None if wait is None else wait() for wait in waits)


Factory = Callable[[Axis, int], TokenDispatcher]
_FACTORIES: dict[str, Factory] = {"all_to_all": AllToAllDispatcher, "all_gather": AllGatherDispatcher}


def register_dispatcher(name: str, factory: Factory) -> None:
    """Let ``ToDistributedConfig(token_dispatcher=name)`` use a dispatcher; the last call for a name wins.

    Args:
        name: the dispatcher's name.
        factory: the subclass of :class:`TokenDispatcher`, or a function that makes one from its two arguments.

    Raises:
        ValueError: if ``factory`` cannot be called.

    Example:
        >>> register_dispatcher("my_kernels", TokenDispatcher)
    """
    if not callable(factory):
        raise ValueError(f"register_dispatcher({name!r}) takes a subclass of TokenDispatcher, not {factory!r}")
    _FACTORIES[name] = factory


def dispatchers() -> tuple[str, ...]:
    """Return the names of the dispatchers; the first is the default."""
    return tuple(_FACTORIES)


def make_dispatcher(name: str, axis: Axis, experts: int) -> TokenDispatcher:
    """Return a new dispatcher of this name."""
    return _FACTORIES[name](axis, experts)


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return the rows of ``x`` that ``index`` names; backward adds their gradients up."""
    return _TakeRows.apply(x, index)


def add_rows(x: Tensor, index: Tensor, count: int) -> Tensor:
    """Return ``count`` rows, each of which is the sum of the rows of ``x`` for which ``index`` names it."""
    return _Add.apply(x, index, count)


def _add(x: Tensor, index: Tensor, count: int) -> Tensor:
    out = x.new_zeros((count, *x.shape[1:]))
    if x.device.type == "cpu":
        return out.index_add_(0, index, x)
    return out.index_put_((index,), x, accumulate=True)  # sorts, where index_add_ adds in any order


class _TakeRows(TensorFunction):
    is_linear = True

    @staticmethod
    def forward(ctx: Node, x: Tensor, index: Tensor) -> Tensor:
        ctx.index, ctx.count = index, len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Node, grad: Tensor) -> tuple[Tensor, None]:
        return _add(grad, ctx.index, ctx.count), None


class _Add(TensorFunction):
    is_linear = True

    @staticmethod
    def forward(ctx: Node, x: Tensor, index: Tensor, count: int) -> Tensor:
        ctx.index = index
        return _add(x, index, count)

    @staticmethod
    def backward(ctx: Node, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.index), None, None


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
