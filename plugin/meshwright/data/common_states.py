"""The random states of torch, NumPy and Python, and their form as JSON."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwright.data.shuffling import GENERATOR, decoded, encoded
from meshwright.schema import Check, equal, integer, maybe, number, row, that

Random = dict[str, Any]


@dataclass(frozen=True)
class CommonStates:
    """The states that the libraries' own functions draw from on the CPU.

    Args:
        torch: what ``torch.get_rng_state`` returned.
        numpy: what ``numpy.random.get_state`` returned.
        python: what ``random.getstate`` returned.
    """

    torch: Tensor
    numpy: Any
    python: Sequence[Any]

    @staticmethod
    def now() -> CommonStates:
        """Return the present states."""
        return CommonStates(torch.get_rng_state(), np.random.get_state(legacy=True), random.getstate())

    @staticmethod
    def from_json(state: Random) -> CommonStates:
        """Return the states of a JSON that ``FIELDS`` has checked."""
        version, words, gauss = state["python"]
        kind, keys, *rest = state["numpy"]
        return CommonStates(
            decoded(state["torch"]),
            (kind, np.array(keys, dtype=np.uint32), *rest),
            (version, tuple(words), gauss),
        )

    @cached_property
    def json(self) -> Random:
        """The states as JSON, which is made only on demand."""
        version, words, gauss = self.python
        kind, keys, position, has_gauss, cached = self.numpy
        return {
            "python": [version, list(words), gauss],
            "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
            "torch": encoded(self.torch),
        }

    def restore(self) -> None:
        """Set the present states to these."""
        torch.set_rng_state(self.torch)
        np.random.set_state(self.numpy)
        random.setstate(self.python)  # type: ignore[arg-type]


def _are_words(value: object, count: int = 624) -> bool:
    return isinstance(value, list) and len(value) == count and all(type(n) is int and 0 <= n < 2**32 for n in value)


def _are_python_words(value: object) -> bool:
    return (
        isinstance(value, list) and _are_words(value, 625) and value[-1] <= 624
    )  # the last one is the place of the next word


_NORMAL = number(-100, 100)  # a drawn number of the normal distribution, which is never larger than 40

# NumPy and torch read their words at the place that a state gives, without checking it.
FIELDS: dict[str, Check] = {
    "python": row(equal(3), that("625 words and a place", _are_python_words), maybe(_NORMAL)),
    "numpy": row(equal("MT19937"), that("624 words", _are_words), integer(0, 624), integer(0, 1), _NORMAL),
    "torch": GENERATOR,
}
