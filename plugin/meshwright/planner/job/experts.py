"""The experts of a layer in the planner: their parameters, the rows that reach a rank, and the bytes that travel."""

from __future__ import annotations

from dataclasses import dataclass

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
