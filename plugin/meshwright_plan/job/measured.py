"""What a pass without values has shown of modules for which there is no formula: mixers, and towers."""

from __future__ import annotations

from dataclasses import dataclass

Sizes = tuple[float, float]  # the bytes in 16 and in 32 bits
# By (tp, sp), each weight of a layer: its elements on a rank, and those of the whole weight if its gradient is a sum.
Held = tuple[tuple[tuple[int, bool], tuple[tuple[int, int], ...]], ...]


@dataclass(frozen=True, kw_only=True)
class PerToken:
    """Bytes per token, of which some grow with the tokens of a row, such as those of a mask.

    Args:
        each: the bytes that do not grow.
        longer: the bytes for each token of a row.
    """

    each: Sizes
    longer: Sizes = (0.0, 0.0)

    def of(self, element_bytes: int, length: int) -> float:
        """Return the bytes per token of a row of a length in the dtype of a model."""
        wide = element_bytes >= 4
        return self.each[wide] + self.longer[wide] * length


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """The dtype and the row of a pass, and the shares of its bytes that a rank has.

    Args:
        element_bytes: bytes per element of the model's dtype.
        length: tokens of a row.
        tp: number of ranks of tp.
        own_tokens: share of the tokens that a rank has between the blocks.
        cuts_scores: whether what grows with a row are scores, which tp cuts by heads; otherwise it is a mask.
    """

    element_bytes: int
    length: int
    tp: int
    own_tokens: float
    cuts_scores: bool


@dataclass(frozen=True, kw_only=True)
class MeasuredPart:
    """The bytes per token of a module of a layer.

    Args:
        cut: whether tp cuts the weights; without, a norm gets the tokens of a rank and other modules all of them.
        is_norm: whether the module is a norm.
        saved: bytes that forward saves for backward.
        forward: temporary bytes at the peak of a forward that saves nothing.
        backward: temporary bytes at the peak of backward.
    """

    cut: bool
    is_norm: bool
    saved: PerToken
    forward: PerToken
    backward: PerToken

    def of_rank(self, sizes: PerToken, share: RankShare) -> float:
        """Return the bytes per token on a rank."""
        each = sizes.of(share.element_bytes, 0)
        longer = sizes.of(share.element_bytes, share.length) - each
        part = share.own_tokens if self.is_norm else 1 / share.tp if self.cut else 1.0
        return each * part + longer * (part if share.cuts_scores else 1.0)


@dataclass(frozen=True, kw_only=True)
class MeasuredLayer:
    """The bytes per token of a layer: of its modules in their order, and those between them."""

    parts: tuple[MeasuredPart, ...]
    between: PerToken

    @property
    def blocks(self) -> list[MeasuredPart]:
        return [part for part in self.parts if not part.is_norm]

    def saved(self, share: RankShare, hidden: int) -> tuple[float, float]:
        """Return the bytes per token that forward saves for the last block, and for the others and the norms."""
        last = self.blocks[-1] if len(self.blocks) > 1 else None
        found = [0.0, self.between.of(share.element_bytes, share.length) * share.own_tokens]
        for part in self.parts:
            # A module that stays whole keeps the gathered tokens.
            is_whole = not part.cut and not part.is_norm
            gathered = hidden * share.element_bytes * (1 - share.own_tokens) if is_whole else 0.0
            found[part is not last] += part.of_rank(part.saved, share) + gathered
        return found[0], found[1]

    def working(self, share: RankShare) -> tuple[float, float, float]:
        """Return the temporary bytes per token of forward, and of the backward of the last block and of the others."""
        forward = [part.of_rank(part.forward, share) for part in self.blocks]
        backward = [part.of_rank(part.backward, share) for part in self.blocks]
        return max(forward), backward[-1], max(backward[:-1], default=backward[-1])


@dataclass(frozen=True, kw_only=True)
class TowerShape:
    """The weights beside a decoder, such as those of an encoder of images, and the memory of one image.

    Args:
        parameters: elements of each weight. Every rank of tp holds all of them, and the first stage of pp.
        pixels: bytes of the inputs of one image.
        saved: bytes that forward saves for one image.
        kept: those bytes if backward recomputes the layers of the tower.
        backward: temporary bytes at the peak of backward.
        tokens: tokens of an image in the decoder.
        image: what an image is, for the output; why its memory is not known if ``saved`` is None.
    """

    parameters: tuple[int, ...]
    pixels: Sizes = (0.0, 0.0)
    saved: Sizes | None = None
    kept: Sizes = (0.0, 0.0)
    backward: Sizes = (0.0, 0.0)
    tokens: int = 0
    image: str = ""

    @property
    def elements(self) -> int:
        return sum(self.parameters)
