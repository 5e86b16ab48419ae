"""Count how many tokens of the global batch were routed to each expert."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwright.layout.tensor_layout import global_shape
from meshwright.mesh.axes import Mesh
from meshwright.parallel.batch.schema import Batch
from meshwright.parallel.collectives import all_reduce
from meshwright.parallel.experts.load_balancing import counted_rows
from meshwright.parallel.method_chain import BatchStep, ChainStep, StepOrder, add_step
from meshwright.parallel.sequence_parts import Parted
from meshwright.parallel.shards.reads import reading_shards
from meshwright.roles.blocks.experts import is_experts
from meshwright.temporarily import temporarily


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
