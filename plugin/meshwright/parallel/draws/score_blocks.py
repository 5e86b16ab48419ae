"""Blocks of attention's scores, which a rank of cp computes one after the other, and which one device draws at once.

::

    one device    dropout of the probabilities [rows, heads, S queries, S keys]    one draw
    a rank        a block of some queries and the keys that these see              the same draw, its rows and columns
                  the next block                                                   again the same draw
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from torch import Generator, Tensor

from meshwright.parallel.draws.kernels import digest_of
from meshwright.parallel.sequence_parts import TokenRun
from meshwright.temporarily import temporarily


@dataclass(frozen=True)
class ScoreBlock:
    """The place of a block among all scores of an attention.

    Args:
        queries: the places of its queries in the sequence, of which the last ones may lie in the padding.
        keys: those of its keys.
        heads: which of the ranks that share the heads of a rank of tp has them, and the number of these ranks.
    """

    queries: tuple[TokenRun, ...]
    keys: tuple[TokenRun, ...]
    heads: tuple[int, int] = (0, 1)


class ScoreBlocks:
    """The draws of one attention. Each block begins from the same states, and the last one leaves those of one device.

    Args:
        states: the states of the generators before the attention.
        follow: a function that is called before and after these are set again.
    """

    def __init__(self, states: dict[Generator, Tensor], follow: Callable[[], None]):
        self._states, self._follow = states, follow
        self._wholes: dict[Hashable, tuple[Tensor, Tensor]] = {}

    @contextlib.contextmanager
    def at(self, block: ScoreBlock) -> Iterator[None]:
        """Compute a block inside the context."""
        for generator, state in self._states.items():
            generator.set_state(state)
        self._follow()
        with temporarily(_running, blocks=self, block=block):
            yield

    def end(self) -> None:
        """Let go of what was drawn. Backward draws it again."""
        self._wholes.clear()

    def once(self, generator: Generator, what: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Return a whole draw, which is made in the first block that draws it.

        Args:
            generator: the generator.
            what: what is drawn.
            make: a function that draws it.
        """
        key = digest_of(generator), what
        if key not in self._wholes:
            drawn = make()
            self._wholes[key] = drawn, generator.get_state()
        drawn, after = self._wholes[key]
        generator.set_state(after)
        return drawn


class _Running(threading.local):
    blocks: ScoreBlocks | None = None
    block: ScoreBlock | None = None


_running = _Running()


def running_block() -> ScoreBlock | None:
    """Return the block that this thread computes."""
    return _running.block


def running_blocks() -> ScoreBlocks | None:
    """Return the blocks of the attention that this thread computes."""
    return _running.blocks
