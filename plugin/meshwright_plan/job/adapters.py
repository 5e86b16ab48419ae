"""Low-rank adapters (LoRA) on a frozen base in the planner: their parameters, and the bytes of a quantised base.

An adapter is what PEFT makes of an ``nn.Linear``: two factors in 32 bits, which read a 32-bit copy of a 16-bit input.
Adapters are on the projections of the attention and of the MLPs that every token takes; experts, towers, embeddings and
the head are frozen without one. A quantised base is what bitsandbytes makes of the same projections: the rest stays in
16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from meshwright.errors import PlanError
from meshwright_plan.job.layer_shape import LayerShape

Quantised = Literal["nf4", "int8"]

ADAPTER_BYTES = 4  # PEFT casts the factors of a 16-bit model to 32 bits (autocast_adapter_dtype)
# Launches of an adapter's forward: two casts, two products, a scaling and a sum, relative to a layer's 50 kernels.
ADAPTED_LAUNCHES = 6 / 50
# Bytes per element of a packed weight: 4 bits and a 32-bit scale for each 64 elements, or 8 bits. The scale for each
# row of an 8-bit weight is left out.
_BLOCK = 64
_PACKED = {"nf4": 0.5 + 4 / _BLOCK, "int8": 1.0}
_DOUBLE = 0.5 + 1 / _BLOCK + 4 / (_BLOCK * 256)  # the scales in 8 bits, with a scale of their own for each 256


@dataclass(frozen=True, kw_only=True)
class Projection:
    """A linear projection of a layer.

    Args:
        inner: width of its input.
        outer: width of its output.
        is_row: whether tp cuts its input; otherwise tp cuts its output.
        in_mlp: whether it is of the MLP.
        source: projections with the same number read the same input.
    """

    inner: int
    outer: int
    is_row: bool
    in_mlp: bool
    source: int

    @property
    def elements(self) -> int:
        return self.inner * self.outer

    def cut(self, tp: int) -> tuple[float, float]:
        """Return the width of the input and of the output on one of ``tp`` ranks."""
        return (self.inner / tp, self.outer) if self.is_row else (self.inner, self.outer / tp)


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Adapters on the projections of a frozen base.

    Args:
        rank: width between the two factors of an adapter.
        quantised: format of the base's projections; None for the dtype of the model.
        double: whether the scales of 4-bit weights are quantised too.

    Raises:
        PlanError: the rank is below one, or the format is unknown.

    Example:
        >>> Lora(rank=16, quantised="nf4").name
        'QLoRA, rank 16, nf4'
    """

    rank: int
    quantised: Quantised | None = None
    double: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 1:
            raise PlanError(f"--lora={self.rank!r} must be the rank of the adapters, a positive integer: --lora 16")
        if self.quantised is not None and self.quantised not in get_args(Quantised):
            raise PlanError(f"--quantised={self.quantised!r} must be nf4 or int8")

    @property
    def name(self) -> str:
        """The method in words."""
        if self.quantised is None:
            return f"LoRA, rank {self.rank}"
        return f"QLoRA, rank {self.rank}, {self.quantised}{' double' if self.double else ''}"

    def packed(self, element_bytes: int) -> float:
        """Return the bytes per element of the base's projections, of a model of ``element_bytes``."""
        if self.quantised is None:
            return element_bytes
        return _DOUBLE if self.quantised == "nf4" and self.double else _PACKED[self.quantised]

    def against_tensor(self, runs: Sequence[LayerShape], tp: int) -> str | None:
        """Return why ``tp`` ranks cannot share a quantised base; None if they can."""
        if self.quantised == "int8":
            return "bitsandbytes quantises each token's activations by all of them, of which a rank has a part"
        widths = sorted({each.inner for run in runs for each in projections(run) if each.is_row})
        cut = next((width for width in widths if width % (tp * _BLOCK)), None)
        if self.quantised is None or cut is None:
            return None
        return f"a rank's part of {cut} packed channels is not a multiple of {_BLOCK}, which share a scale"

    def elements(self, layer: LayerShape, tp: int = 1) -> float:
        """Return the elements of the adapters of one layer on one of ``tp`` ranks.

        Example:
            >>> from meshwright_plan.job.layer_shape import LayerShape
            >>> layer = LayerShape(count=1, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128)
            >>> Lora(rank=8).elements(layer)
            8192.0
        """
        return float(sum(self.rank * sum(each.cut(tp)) for each in projections(layer)))

    def packed_elements(self, layer: LayerShape, tp: int) -> float:
        """Return the elements of one layer that are packed on one of ``tp`` ranks."""
        return 0.0 if self.quantised is None else sum(each.elements for each in projections(layer)) / tp

    def frozen_bytes(self, packed: float, others: float, element_bytes: int) -> float:
        """Return the bytes of packed elements, and of others, which have ``element_bytes``."""
        return packed * self.packed(element_bytes) + others * element_bytes

    def unpacked(self, layer: LayerShape, tp: int, element_bytes: int) -> float:
        """Return the bytes of the largest projection of a layer, which a kernel unpacks for its product."""
        if self.quantised is None:
            return 0.0
        return element_bytes * max((each.elements for each in projections(layer)), default=0) / tp


def trained_bytes(lora: Lora | None, element_bytes: int) -> int:
    """Return the bytes per trained element of a model of ``element_bytes``."""
    return element_bytes if lora is None else ADAPTER_BYTES


def projections(layer: LayerShape) -> Iterator[Projection]:
    """Yield the linear projections of one layer, in the order of the model."""
    if layer.linears:
        for source, (inner, outer, is_row, in_mlp) in enumerate(layer.linears):
            yield Projection(inner=inner, outer=outer, is_row=is_row, in_mlp=in_mlp, source=source)
        return
    hidden, fused = layer.hidden, layer.traits.fused_qkv
    widths = [layer.query_width, layer.kv_width, layer.kv_width]
    for width in [sum(widths)] if fused else widths:
        yield Projection(inner=hidden, outer=width, is_row=False, in_mlp=False, source=0)
    yield Projection(inner=layer.query_width, outer=hidden, is_row=True, in_mlp=False, source=1)
    if layer.ffn:
        ups = [layer.ffn] * layer.mlp_inputs
        for width in [sum(ups)] if fused else ups:
            yield Projection(inner=hidden, outer=width, is_row=False, in_mlp=True, source=2)
        yield Projection(inner=layer.ffn, outer=hidden, is_row=True, in_mlp=True, source=3)


def saved_by_adapters(layer: LayerShape, lora: Lora, tp: int, element_bytes: int) -> tuple[float, float]:
    """Return the bytes per token that adapters keep for backward, of the attention and of the MLP.

    Each keeps its input in 32 bits and the result of its first factor. What a 32-bit model keeps as the input is one
    tensor for all projections that read it, which ``activations`` counts.
    """
    found = [0.0, 0.0]
    for each in projections(layer):
        copied = each.cut(tp)[0] if element_bytes < ADAPTER_BYTES else 0.0
        found[each.in_mlp] += ADAPTER_BYTES * (copied + lora.rank)
    return found[0], found[1]
