"""Describes one decoder layer by its sizes, with its experts if it has some.

Of experts the planner counts the parameters, the rows that reach a rank, and the bytes that travel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from meshwright.errors import PlanError
from meshwright.planner.job.family_traits import Traits
from meshwright.planner.job.measured import Held, MeasuredLayer

# Kernels of a layer with experts beyond those of a dense layer, relative to these: the router's softmax and choice, the
# sort by expert, the counts, the gathers before and after each exchange, and the weighted sum.
ROUTED_LAUNCHES = 0.8
# Elements moved through memory for each row of an expert and unit of width, forward: a gather into the order of the
# experts, the same on arrival, and after the experts the way back, the product with the router's weights and their sum.
_MOVED = 10


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """The experts of one layer, of which each token takes a few.

    Args:
        count: number of experts.
        chosen: number of experts that each token takes.
        hidden: width of the rows that experts take and return.
        width: width inside of an expert.
        gated: whether an expert has a gate projection besides up and down.
        biases: bias elements of an expert.
        router: elements of the router and of other weights for each token, which every rank holds.

    Example:
        >>> experts = ExpertShape(count=128, chosen=8, hidden=2048, width=768, router=128 * 2048)
        >>> experts.elements, experts.active
        (603979776, 37748736)
    """

    count: int
    chosen: int
    hidden: int
    width: int
    gated: bool = True
    biases: int = 0
    router: int = 0

    @property
    def inputs(self) -> int:
        """The number of an expert's input projections."""
        return 2 if self.gated else 1

    @property
    def each(self) -> int:
        """Elements of one expert."""
        return self.hidden * self.width * (self.inputs + 1) + self.biases

    @property
    def elements(self) -> int:
        """Elements of all experts."""
        return self.count * self.each

    @property
    def active(self) -> int:
        """Elements of the experts that a token takes."""
        return min(self.chosen, self.count) * self.each

    def rows(self, tokens: float, ranks: int, load: float) -> float:
        """Return the rows that the experts of the fullest of ``ranks`` ranks get from ``tokens`` tokens of each rank.

        Args:
            tokens: tokens of a rank.
            ranks: number of ranks that share the experts; a rank that holds them all gets its own tokens.
            load: rows of the fullest rank, relative to the mean.
        """
        return tokens * self.chosen * (load if ranks > 1 else 1.0)

    def reached(self, ranks: float) -> float:
        """Return how many of ``ranks`` ranks or nodes a token reaches on average: each that holds some of its experts.

        Example:
            >>> round(ExpertShape(count=128, chosen=8, hidden=2048, width=768).reached(8), 2)
            5.25
        """
        return ranks * (1 - (1 - 1 / ranks) ** self.chosen)

    def sent_bytes(self, tokens: float, ranks: int, element_bytes: int, load: float) -> float:
        """Return the bytes of one exchange: those of a token for each rank that it reaches. ``1 / ranks`` of them stay.

        A layer has two exchanges in forward, two in backward, and those of forward again if it is recomputed.

        Example:
            >>> experts = ExpertShape(count=128, chosen=8, hidden=2048, width=768)
            >>> round(experts.sent_bytes(16384, 8, 2, 1.0) * 7 / 8 / 1e6)
            308
        """
        return load * tokens * self.reached(ranks) * self.hidden * element_bytes if ranks > 1 else 0.0

    def moved(self, rows: float) -> float:
        """Return the bytes of 16-bit elements that forward moves through memory beside the matmuls of ``rows`` rows."""
        return rows * (2 * _MOVED * self.hidden + self.width * (2 + 2 * self.inputs))

    def saved(self, rows: float, element_bytes: int) -> float:
        """Return the bytes that experts keep for backward: the rows in and out, what the gate reads, and its result."""
        return rows * (2 * self.hidden + (self.inputs + 1) * self.width) * element_bytes

    def working(self, rows: float) -> float:
        """Return the elements of the largest temporary tensors of a forward or backward of ``rows`` rows."""
        return rows * (3 * self.width + 2 * self.hidden)


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
