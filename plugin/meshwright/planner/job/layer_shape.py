"""Describe one decoder layer by its sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from meshwright.errors import PlanError
from meshwright.planner.job.experts import ExpertShape
from meshwright.planner.job.family_traits import Traits
from meshwright.planner.job.measured import Held, MeasuredLayer


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """A run of decoder layers of one kind: their number, and the sizes that decide the memory and time of each.

    Args:
        count: number of layers in the run.
        hidden: width of the residual stream.
        heads: number of query heads.
        kv_heads: number of key and value heads; equal to ``heads`` without grouped-query attention.
        head_dim: width of one head.
        ffn: width of the MLP that every token takes; 0 if there are experts alone.
        gated: whether the MLP has a gate projection besides up and down.
        window: largest number of tokens that a query attends to; None for all tokens before it.
        windowed: share of the layers with that window; the other layers have no window.
        biases: bias elements per layer.
        norms: elements of the norm weights per layer.
        traits: properties of the family's code that decide what backward needs.
        experts: the experts that each token takes a few of; None in a dense layer.
        projections: elements of the attention's matrices, if they are not those of q, k, v and o.
        linears: of each linear projection, the widths in and out, whether tp cuts the input, and whether it is of the
            MLP, if they are not q, k, v, o and those of the MLP.
        measured: the memory of the layer's modules, if there is no formula for them.
        held: the weights of the layer by tp and sp, if there is no formula for them: their elements on a rank, and
            those of the whole weight if its gradient is a sum over tp.
    """

    count: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool = True
    window: int | None = None
    windowed: float = 0.0
    biases: int = 0
    norms: int | None = None
    traits: Traits = field(default_factory=Traits)
    experts: ExpertShape | None = None
    projections: int | None = None
    linears: tuple[tuple[int, int, bool, bool], ...] = ()
    measured: MeasuredLayer | None = None
    held: Held = ()

    def held_by(self, tp: int, sequence_parallel: bool) -> tuple[tuple[int, int], ...]:
        """Return the weights of a rank.

        Raises:
            PlanError: if it is not known how ranks share them.
        """
        for key, weights in self.held:
            if key == (tp, sequence_parallel and tp > 1):
                return weights
        raise PlanError(f"the planner has no estimate for the layers of this model under tp={tp}; use a smaller tp")

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    def local_kv_width(self, tp: int) -> int:
        """Return the width of the keys on one of ``tp`` ranks; several ranks share a key head if there are too few.

        Example:
            >>> layer = LayerShape(count=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336)
            >>> layer.local_kv_width(8), layer.local_kv_width(16)
            (128, 128)
        """
        local = max(1, self.heads // tp)
        return local // math.gcd(self.heads // self.kv_heads, local) * self.head_dim

    @property
    def attention_parameters(self) -> int:
        """Elements of q, k, v and o in one layer."""
        if self.projections is not None:
            return self.projections
        return self.hidden * (2 * self.query_width + 2 * self.kv_width)

    @property
    def mlp_inputs(self) -> int:
        """The number of the MLP's input projections."""
        return 2 if self.gated else 1

    @property
    def mlp_parameters(self) -> int:
        """Elements of the MLP's matrices in one layer."""
        return self.hidden * self.ffn * (self.mlp_inputs + 1)

    @property
    def norm_parameters(self) -> int:
        """Elements of a layer's norms, which tensor parallelism replicates."""
        return 2 * self.hidden if self.norms is None else self.norms

    @property
    def router_parameters(self) -> int:
        """Elements of a layer's router, which every rank holds."""
        return 0 if self.experts is None else self.experts.router

    @property
    def expert_parameters(self) -> int:
        """Elements of all experts of a layer, which ep spreads over ranks."""
        return 0 if self.experts is None else self.experts.elements

    @property
    def active_matrices(self) -> int:
        """Elements of the matrices that a token is multiplied by."""
        active = 0 if self.experts is None else self.experts.active + self.experts.router
        return self.attention_parameters + self.mlp_parameters + active

    @property
    def dense_parameters(self) -> int:
        """Elements of one layer beside its experts."""
        dense = self.attention_parameters + self.mlp_parameters + self.norm_parameters + self.biases
        return dense + self.router_parameters

    @property
    def parameters(self) -> int:
        """Elements of one layer."""
        return self.dense_parameters + self.expert_parameters

    def rank_parameters(self, tp: int, ep: int) -> tuple[float, float]:
        """Return the elements of one layer on a rank beside its experts, as if tp cut all of them, and of its experts.

        Example:
            >>> experts = ExpertShape(count=8, chosen=2, hidden=64, width=32)
            >>> layer = LayerShape(count=2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=0, experts=experts)
            >>> layer.rank_parameters(2, 4)
            (8256.0, 12288.0)
        """
        return self.dense_parameters / tp, self.expert_parameters / ep

    def attended(self, seq_len: int) -> float:
        """Return the mean number of positions that a query attends to, averaged over the layers."""
        full = (seq_len + 1) / 2
        if self.window is None or self.window >= seq_len:
            return full
        windowed = self.window * (1 - self.window / (2 * seq_len)) + 0.5
        return self.windowed * windowed + (1 - self.windowed) * full
