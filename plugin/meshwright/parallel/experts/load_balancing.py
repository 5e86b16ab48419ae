"""The load-balancing loss, and the counts of tokens for each expert, from the routing of all tokens of the global
batch.

For E experts, of which N tokens (one for each layer) chose expert e C_e times and gave it the probabilities S_e in sum,
transformers' causal LMs add ``E * sum_e (C_e / N) * (S_e / N)`` to their loss. This is a product of means, so the mean
of what each rank would compute from its own tokens is another number. Counts have no gradient, and the gradient with
respect to a rank's own part of S_e is ``E * C_e / N**2``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import MutableMapping
from types import FunctionType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.containers import rebuilt
from meshwright.layout.tensor_layout import global_shape
from meshwright.mesh.axes import Axis, Mesh
from meshwright.parallel.batch.mean_over_ranks import GlobalMean
from meshwright.parallel.batch.schema import Batch, BatchSchema
from meshwright.parallel.batch.share import runs_filler
from meshwright.parallel.collectives import all_reduce
from meshwright.parallel.experts.routers import LOSS_FUNCTION, OPTION, RouterRecord
from meshwright.parallel.method_chain import BatchStep, ChainStep, StepOrder, add_step
from meshwright.parallel.sequence_parts import Parted
from meshwright.parallel.shards.stand_in import StandIn, reading_shards
from meshwright.roles.blocks.experts import is_experts
from meshwright.temporarily import temporarily


class LoadBalancing(BatchStep):
    """The step of a causal LM in which its load-balancing loss is that of the global batch.

    Args:
        model: the model.
        forward: the forward that calls the loss by a global name; see :func:`forward_with_router_loss`.
        mean: the mean that the model's loss is, over the ranks that have different tokens.
        mesh: the axes. Under tp, each rank routes a run of the tokens.
        region: under context parallelism, what knows the tokens of this rank.
        routers: in a pipeline, the routers of all stages. A stage runs its own, and the statistics of the routers so
            far go on with the hidden states to the last stage, and their gradient comes back with that of these.
    """

    order = StepOrder.ROUTER_LOSS

    def __init__(
        self,
        model: nn.Module,
        forward: FunctionType,
        *,
        mean: GlobalMean,
        mesh: Mesh,
        region: Parted | None,
        routers: RouterRecord | None = None,
    ):
        super().__init__(model)
        self.mean, self.mesh, self.region, self.routers = mean, mesh, region, routers
        self.modules = [forward.__module__]  # the names of the modules whose function a forward may call
        self._batch: Batch = {}  # the arguments of the running pass
        self._parts: object = None  # the routers' logits of the running pass, if they are this rank's part
        self._earlier: Tensor | None = None  # the statistics of the stages before
        self._logits: list[Tensor] | None = None  # the routers' logits of the running stage
        for name, place in () if routers is None else routers.modules:
            add_step(model.get_submodule(name), _KeepsLogits(self, place))

    def __call__(self, *args: object, **kwargs: object) -> object:
        batch = self.batch_of(args, kwargs)
        logits: list[Tensor] | None = [] if self.routers is not None and self.is_wanted(batch) else None
        with contextlib.ExitStack() as stack:
            stack.enter_context(temporarily(self, _batch=batch, _parts=None, _logits=logits))
            for name in self.modules:
                stack.enter_context(temporarily(sys.modules[name], **{LOSS_FUNCTION: self.loss}))
            output = self.method(*args, **kwargs)
            return output if self._parts is None else _without(output, self._parts)

    def is_wanted(self, batch: Batch) -> bool:
        """Return whether a forward with these arguments computes the loss."""
        given = batch.get(OPTION)
        return bool(getattr(getattr(self.model, "config", None), OPTION, False) if given is None else given)

    def after(self, earlier: Tensor | None) -> contextlib.AbstractContextManager[None]:
        """Add the statistics of the stages before to those of the pass inside the context."""
        return temporarily(self, _earlier=earlier)

    def so_far(self) -> Tensor | None:
        """Return the statistics of the routers up to this stage of the running pass; None if no loss is wanted."""
        if self.routers is None or not self.is_wanted(self._batch):
            return None
        mask = self._batch.get("attention_mask")
        assert mask is None or isinstance(mask, Tensor)
        return self._statistics(self.routers.num_experts, self.routers.top_k, mask)

    def keep(self, logits: Tensor) -> None:
        """Take the logits of a router, which belong to no pass if backward runs the router again."""
        if self._logits is not None:
            self._logits.append(logits)

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
        if self.routers is None:
            self._logits = list(gate_logits)
        if self.mesh.tp.size > 1 or self.mesh.cp.size > 1:
            self._parts = gate_logits
        statistics = self._statistics(num_experts, top_k, attention_mask)
        total = statistics.detach().clone()
        for axis in (self.mesh.tokens, self.mesh.tp):
            total = all_reduce(total, axis)
        counts, sums, tokens = total[:num_experts], total[num_experts:-1], total[-1]
        factors = counts * num_experts / tokens.square()
        own = statistics[num_experts:-1].to(torch.promote_types(next(self.model.parameters()).dtype, torch.float32))
        return self.mean.added(own, (sums * factors).sum(), factors)

    def _statistics(self, num_experts: int, top_k: int, mask: Tensor | None) -> Tensor:
        """Return ``[C, S, N]`` of this rank's tokens in the layers so far."""
        assert self._logits is not None
        device = BatchSchema(self._batch).tokens.device
        counts = torch.zeros(num_experts, dtype=torch.float64, device=device)
        sums = torch.zeros_like(counts)
        tokens = counts.new_zeros(1)
        if self._logits:
            rows = len(self._logits[0])
            counted = counted_rows(self._batch, mask, rows, tp=self.mesh.tp, region=self.region)
            counted = counted.to(device, torch.float64)
            per_choice, per_token = counted.repeat_interleave(top_k), counted.float().unsqueeze(-1)
            tokens = (counted.sum() * len(self._logits)).reshape(1)
            for logits in self._logits:
                probabilities = F.softmax(logits.to(device), dim=-1)
                chosen = torch.topk(probabilities, top_k, dim=-1).indices
                counts.index_add_(0, chosen.flatten(), per_choice)
                sums = sums + (probabilities.float() * per_token).sum(0)
        own = torch.cat([counts, sums, tokens])
        return own if self._earlier is None else own + self._earlier


def counted_rows(batch: Batch, mask: Tensor | None, rows: int, *, tp: Axis, region: Parted | None) -> Tensor:
    """Return for each row that this rank's routers get whether it is a token that counts.

    Args:
        batch: the arguments of the running pass.
        mask: 1 for each token that counts, ``[B, S]``; None if all of them do.
        rows: the number of rows that the routers get.
        tp: the axis whose ranks have a run of the rows each, or all of them, which then count on the first rank.
        region: under context parallelism, what knows the tokens of this rank.
    """
    tokens = BatchSchema(batch).tokens
    counted = torch.ones(tokens.shape[:2], device=tokens.device) if mask is None else mask
    if runs_filler(batch.values()):
        counted = torch.zeros_like(counted)
    if region is not None:
        counted = region.parts.take(counted, 1)
    flat = counted.flatten()
    if tp.size == 1:
        return flat
    if rows == len(flat):
        return flat if tp.rank == 0 else torch.zeros_like(flat)
    return F.pad(flat, (0, tp.size * rows - len(flat))).narrow(0, tp.rank * rows, rows)


class _KeepsLogits(ChainStep):
    """The ``forward`` of a router, whose logits go to the load-balancing loss."""

    def __init__(self, balancing: LoadBalancing, place: int | None):
        self.balancing, self.place = balancing, place

    def __call__(self, *args: object, **kwargs: object) -> object:
        output = self.method(*args, **kwargs)
        self.balancing.keep(output if self.place is None else output[self.place])
        return output


class PartedRouterLogits(StandIn):
    """Stands in for the routers' logits of all tokens and layers, of which each rank has its own."""

    MESSAGE = (
        "under tp and cp each rank has the routers' logits of its own tokens only, and under pp those of its own "
        "layers. The loss has the load-balancing loss of all of them already; to read outputs.router_logits, use "
        "tp=1, cp=1 and pp=1"
    )


def _without(output: object, parts: object) -> object:
    """Return the output, with stand-ins for the routers' logits in it."""

    def hidden(value: object) -> object:
        if value is not parts:
            return value
        assert isinstance(parts, tuple)
        return tuple(PartedRouterLogits.of_shape(x.shape, x.dtype, x.device) for x in parts)

    if isinstance(output, tuple | list):
        return rebuilt(output, [hidden(value) for value in output])
    assert isinstance(output, MutableMapping)
    for name, value in list(output.items()):
        output[name] = hidden(value)
    return output


class ExpertCounts(BatchStep):
    """The step of a decoder's forward that counts the tokens of each expert, once somebody has asked for them.

    A layer that backward runs again is not counted again, since it then runs outside of the decoder's forward.

    Args:
        model: the decoder.
        mesh: the axes. Under tp, each rank routes a run of the tokens.
        region: under context parallelism, what knows the tokens of this rank.
    """

    order = StepOrder.ROUTER_LOSS

    def __init__(self, model: nn.Module, *, mesh: Mesh, region: Parted | None):
        super().__init__(model)
        self.mesh, self.region = mesh, region
        self.is_late = False  # whether training passes have run uncounted
        self._totals: dict[nn.Module, Tensor] = {}  # by module of experts, since counting began
        self._taken: Tensor | int = 0  # what ``take`` has returned
        self._batch: Batch | None = None  # the arguments of the running pass
        self._each: dict[torch.Size, Tensor] = {}  # by the shape of choices, how much each of them counts in this pass

    def __call__(self, *args: object, **kwargs: object) -> object:
        if not self.model.training:
            return self.method(*args, **kwargs)
        self.is_late = not self._totals
        with temporarily(self, _batch=self.batch_of(args, kwargs), _each={}):
            return self.method(*args, **kwargs)

    @property
    def is_on(self) -> bool:
        """Whether passes are counted."""
        return bool(self._totals)

    @property
    def sizes(self) -> dict[nn.Module, int]:
        """The number of experts of each module that is counted."""
        return {experts: len(own) - 1 for experts, own in self._totals.items()}

    def begin(self, device: torch.device) -> None:
        """Count the passes from now on.

        Args:
            device: the device of the model.
        """
        for experts in filter(is_experts, self.model.modules()):
            with reading_shards():
                size = global_shape(next(experts.parameters()))[0]
            # A choice of the number behind the last expert means none.
            self._totals[experts] = torch.zeros(size + 1, dtype=torch.int64, device=device)
            add_step(experts, _CountsTokens(self, experts))

    def count(self, experts: nn.Module, choices: Tensor) -> None:
        """Add the choices of the tokens of this rank.

        Args:
            experts: the module of experts.
            choices: the experts of each token, ``[R, k]``.
        """
        if self._batch is None:
            return
        if choices.shape not in self._each:  # layers have the same tokens
            mask = self._batch.get("attention_mask")
            mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
            rows = counted_rows(self._batch, mask, len(choices), tp=self.mesh.tp, region=self.region)
            self._each[choices.shape] = rows.to(choices.device, torch.int64).repeat_interleave(choices.shape[-1])
        self._totals[experts].index_add_(0, choices.flatten(), self._each[choices.shape])

    def own(self) -> Tensor:
        """Return this rank's counts since counting began, of one module of experts behind the other."""
        return torch.cat(list(self._totals.values()))

    def take(self) -> dict[nn.Module, Tensor]:
        """Return the counts of all ranks since the last call, by module of experts; every rank must make the call."""
        own = self.own()
        total, self._taken = own - self._taken, own
        for axis in (self.mesh.tokens, self.mesh.tp, self.mesh.pp):
            total = all_reduce(total, axis)
        return self.by_module(total)

    def by_module(self, counts: Tensor) -> dict[nn.Module, Tensor]:
        """Return what each module of experts has of counts in the form of ``own``."""
        parts = counts.split([len(own) for own in self._totals.values()])
        return {experts: part[:-1] for experts, part in zip(self._totals, parts, strict=True)}


class _CountsTokens(ChainStep):
    """The ``forward`` of a module of experts, whose tokens are counted."""

    def __init__(self, counts: ExpertCounts, experts: nn.Module):
        self.counts, self.experts = counts, experts

    def __call__(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> object:
        self.counts.count(self.experts, top_k_index)
        return self.method(hidden, top_k_index, top_k_weights)
