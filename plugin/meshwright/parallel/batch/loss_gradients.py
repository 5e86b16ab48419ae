"""Compare over dp the gradients that reach losses of the global batch, which are equal on all ranks.

Such a loss has the same value on every rank, so whatever the program multiplies it by must be equal too. A factor that
a rank computes from its own rows would give gradients that belong to no loss.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from meshwright.faults.statement import Statement
from meshwright.parallel.async_numbers import is_deferred, read_later

ADVICE = (
    "The model's loss, and what mw.global_mean returns, is the mean over the rows or labels of all data-parallel ranks "
    "and is equal on each of them, so the number that it is multiplied by must be equal too. A factor from a rank's "
    "own rows, such as their count or their weights, makes a gradient that differs from one device. Leave the factor "
    "out, or take the mean of the rank's own weighted losses and pass the sum of the weights as its count:\n"
    "    loss = model(**batch).loss\n"
    "    loss = mw.global_mean(model, (weights * losses).sum() / weights.sum(), count=weights.sum())"
)
# Relative: a factor that each rank computes from equal values may differ in its last bits.
_TOLERANCE, _OF_FLOAT64 = 1e-5, 1e-11
_KEPT = 1024  # gradients; more than this arrive only if no meeting compares them


class LossGradients:
    """Collects the gradients that backward brings to the losses of the global batch, for the next meeting.

    The host does not wait for a device: it reads the gradients that are there in the meeting after the next.
    """

    def __init__(self) -> None:
        self._made = 0
        self._tolerance = _TOLERANCE  # of the gradients that arrive
        self._arrived: deque[tuple[int, Tensor]] = deque(maxlen=_KEPT)
        self._earlier: tuple[tuple[int, ...], Callable[[], list[float]]] | None = None

    def of_next(self) -> Callable[[Tensor], None]:
        """Return a function that takes the gradient of the next loss. All ranks must compute the same losses."""
        self._made += 1
        return functools.partial(self._arrive, self._made)

    def _arrive(self, number: int, gradient: Tensor) -> None:
        if type(gradient) is Tensor:  # not a fake tensor of a traced step
            self._arrived.append((number, gradient.detach()))
            self._tolerance = _OF_FLOAT64 if gradient.dtype is torch.float64 else _TOLERANCE

    def statement(self) -> Statement:
        """Return a statement of the gradients that have arrived since the last statement."""
        found = dict[int, float]()
        for number, value in self._read():
            found[number] = found.get(number, 0.0) + value
        digits = 7 if self._tolerance == _TOLERANCE else 13  # two more than are compared
        rounded = {number: f"{value:.{digits}g}" for number, value in found.items()}
        distinct = set(rounded.values())
        text = "" if not rounded else f"gradient of the loss {min(distinct)}"
        if len(distinct) > 1:
            text = f"gradients of {len(rounded)} losses {zlib.crc32(repr(sorted(rounded.items())).encode()):08x}"
        return Statement(
            text=text,
            details=lambda: {f"gradient of loss {number}": value for number, value in rounded.items()},
            advice=ADVICE,
            are_close=functools.partial(_are_close, tolerance=self._tolerance),
        )

    def _read(self) -> Iterable[tuple[int, float]]:
        if not self._arrived:
            return ()
        numbers, gradients = zip(*self._arrived, strict=True)
        self._arrived.clear()
        read = read_later(torch.stack([gradient.double() for gradient in gradients]))
        if is_deferred(gradients[0].device):
            earlier, self._earlier = self._earlier, (numbers, read)
            if earlier is None:
                return ()
            numbers, read = earlier
        return zip(numbers, read(), strict=True)


def _are_close(values: Sequence[str], *, tolerance: float) -> bool:
    numbers = [float(value) for value in values]
    first = numbers[0]
    return all(math.isclose(x, first, rel_tol=tolerance) or (math.isnan(x) and math.isnan(first)) for x in numbers)
