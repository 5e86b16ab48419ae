"""The load-balancing loss of a model with experts, from the routing of all tokens of the global batch.

For E experts, of which N tokens (one for each layer) chose expert e C_e times and gave it the probabilities S_e in sum,
transformers' causal LMs add ``E * sum_e (C_e / N) * (S_e / N)`` to their loss. This is a product of means, so the mean
of what each rank would compute from its own tokens is another number. Counts have no gradient, and the gradient with
respect to a rank's own part of S_e is ``E * C_e / N**2``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import MutableMapping
from types import FunctionType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.mesh.axes import Mesh
from meshwright.parallel.batch_schema import Batch, BatchSchema
from meshwright.parallel.batch_share import runs_filler
from meshwright.parallel.collectives import all_reduce
from meshwright.parallel.mean_over_ranks import GlobalMean
from meshwright.parallel.method_chain import BatchStep, StepOrder
from meshwright.parallel.output_loss import like
from meshwright.parallel.sequence_parts import Parted
from meshwright.parallel.stand_in import StandIn
from meshwright.temporarily import temporarily

_NAME = "load_balancing_loss_func"
_ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


class LoadBalancing(BatchStep):
    """The step of a causal LM in which its load-balancing loss is that of the global batch.

    Args:
        model: the model.
        forward: the forward that calls the loss by a global name; see :func:`forward_with_router_loss`.
        mean: the mean that the model's loss is, over the ranks that have different tokens.
        mesh: the axes. Under tp, each rank routes a run of the tokens.
        region: under context parallelism, what knows the tokens of this rank.
    """

    order = StepOrder.ROUTER_LOSS

    def __init__(self, model: nn.Module, forward: FunctionType, *, mean: GlobalMean, mesh: Mesh, region: Parted | None):
        super().__init__(model)
        self.forward, self.mean, self.mesh, self.region = forward, mean, mesh, region
        self._batch: Batch = {}  # the arguments of the running pass
        self._parts: object = None  # the routers' logits of the running pass, if they are this rank's part

    def __call__(self, *args: object, **kwargs: object) -> object:
        with (
            temporarily(self, _batch=self.batch_of(args, kwargs), _parts=None),
            temporarily(sys.modules[self.forward.__module__], **{_NAME: self.loss}),
        ):
            output = self.method(*args, **kwargs)
            return output if self._parts is None else _without(output, self._parts)

    def loss(
        self,
        gate_logits: tuple[Tensor, ...] | None,
        num_experts: int | None = None,
        top_k: int = 2,
        attention_mask: Tensor | None = None,
    ) -> Tensor | int:
        """Return what transformers' function of these arguments returns for the tokens of the global batch.

        Args:
            gate_logits: the routers' logits of this rank's tokens, ``[R, E]`` for each layer.
            num_experts: E.
            top_k: the number of experts of each token.
            attention_mask: 1 for each token that counts, ``[B, S]``; None if all of them do.
        """
        if not isinstance(gate_logits, tuple) or num_experts is None:
            return 0
        if self.mesh.tp.size > 1 or self.mesh.cp.size > 1:
            self._parts = gate_logits
        device, rows = gate_logits[0].device, len(gate_logits[0])
        counted = self._counted(attention_mask, rows).to(device, torch.float64)
        per_choice, per_token = counted.repeat_interleave(top_k), counted.float().unsqueeze(-1)
        counts = torch.zeros(num_experts, dtype=torch.float64, device=device)
        sums: Tensor | float = 0.0
        for logits in gate_logits:
            probabilities = F.softmax(logits.to(device), dim=-1)
            chosen = torch.topk(probabilities, top_k, dim=-1).indices
            counts.index_add_(0, chosen.flatten(), per_choice)
            sums = sums + (probabilities.float() * per_token).sum(0)
        assert isinstance(sums, Tensor)
        own = torch.cat([counts, sums.detach().double(), (counted.sum() * len(gate_logits)).reshape(1)])
        for axis in (self.mesh.tokens, self.mesh.tp):
            own = all_reduce(own, axis)
        all_counts, all_sums, tokens = own[:num_experts], own[num_experts:-1], own[-1]
        factors = all_counts * num_experts / tokens.square()
        return self.mean.added(sums, (all_sums * factors).sum(), factors)

    def _counted(self, mask: Tensor | None, rows: int) -> Tensor:
        """Return for each of this rank's rows of logits whether it is a token that counts."""
        tokens = BatchSchema(self._batch).tokens
        counted = torch.ones(tokens.shape[:2], device=tokens.device) if mask is None else mask
        if runs_filler(self._batch.values()):
            counted = torch.zeros_like(counted)
        if self.region is not None:
            counted = self.region.parts.take(counted, 1)
        tp, flat = self.mesh.tp, counted.flatten()
        if tp.size == 1:
            return flat
        return F.pad(flat, (0, tp.size * rows - len(flat))).narrow(0, tp.rank * rows, rows)


def forward_with_router_loss(model: nn.Module) -> FunctionType | None:
    """Return the code of a model's forward that calls transformers' load-balancing loss; None if none does."""
    for kind in type(model).__mro__:
        forward = inspect.unwrap(vars(kind).get("forward", object))
        if isinstance(forward, FunctionType) and _NAME in forward.__code__.co_names:
            stock = forward.__globals__.get(_NAME)
            return forward if stock and list(inspect.signature(stock).parameters) == _ARGUMENTS else None
    return None


class PartedRouterLogits(StandIn):
    """Stands in for the routers' logits of all tokens, of which each rank has its own."""

    MESSAGE = (
        "under tp and cp each rank has the routers' logits of its own tokens only. The loss has the load-balancing "
        "loss of all of them already; to read outputs.router_logits, use tp=1 and cp=1"
    )


def _without(output: object, parts: object) -> object:
    """Return the output, with stand-ins for the routers' logits in it."""

    def hidden(value: object) -> object:
        if value is not parts:
            return value
        assert isinstance(parts, tuple)
        return tuple(PartedRouterLogits.of_shape(x.shape, x.dtype, x.device) for x in parts)

    if isinstance(output, tuple | list):
        return like(output, [hidden(value) for value in output])
    assert isinstance(output, MutableMapping)
    for name, value in list(output.items()):
        output[name] = hidden(value)
    return output
