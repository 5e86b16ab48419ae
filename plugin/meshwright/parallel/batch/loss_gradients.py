"""Losses of the global batch in backward: the factor of their gradients, and what reaches them, compared over dp.

Such a loss has the same value on every rank, so whatever the program multiplies it by must be equal too. A factor that
a rank computes from its own rows would give gradients that belong to no loss.

In backward the loss carries a factor dp, since the gradients of parameters are averaged over dp. What
``torch.autograd.grad`` returns is averaged by nothing, so in its passes the loss carries no factor. An input's gradient
is divided by it in all other passes.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from meshwright.autograd import Node, TensorFunction
from meshwright.faults.statement import Statement
from meshwright.parallel.async_numbers import is_deferred, read_later

logger = logging.getLogger(__name__)

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


# A leaf of the graph of each loss: torch.autograd.grad, which runs what leads to its own inputs, does not reach it.
_PROBE = torch.empty(0, requires_grad=True)


def probe_of(x: Tensor) -> Tensor | None:
    """Return what a function of ``x`` takes as another input, by which its backward knows the kind of its pass."""
    return _PROBE if x.requires_grad else None


class LossGradients:
    """Collects the gradients that backward brings to the losses of the global batch, for the next meeting.

    The host does not wait for a device: it reads the gradients that are there in the meeting after the next.

    Args:
        any_trained: returns whether a function is true of any parameter that is trained, whose gradients are averaged.
        ranks: the number of ranks that have other rows.
    """

    def __init__(self, any_trained: Callable[[Callable[[Tensor], bool]], bool], ranks: int) -> None:
        self._any_trained, self.ranks = any_trained, ranks
        self._pass = -1  # the last pass that reached a loss
        self._is_own = False  # whether the running pass is one of the runtime's, such as that of a stage
        self._has_returned = False  # whether torch.autograd.grad has returned a gradient since the last forward
        self._warned: set[str] = set()
        self._made = 0
        self._tolerance = _TOLERANCE  # of the gradients that arrive
        self._arrived: deque[tuple[int, Tensor]] = deque(maxlen=_KEPT)
        self._earlier: tuple[tuple[int, ...], Callable[[], list[float]]] | None = None

    def enter(self) -> float:
        """Return the loss's share of its factor in the running pass: 1, or 1/dp if nothing averages the gradients."""
        self._pass = torch._C._current_graph_task_id()
        if self._averages():
            return 1.0
        self._has_returned = True
        return 1 / self.ranks

    @contextlib.contextmanager
    def averaging(self) -> Iterator[None]:
        """Let the passes inside be parts of one whose gradients of parameters are averaged."""
        before, self._is_own = self._is_own, True
        try:
            yield
        finally:
            self._is_own = before

    def begin(self) -> None:
        """Called in each forward of the model."""
        self._has_returned = False

    def look_at_pass(self) -> None:
        """Called in a pass that brings gradients to parameters, when the first arrives."""
        if self._has_returned and self._pass != torch._C._current_graph_task_id():
            self._has_returned = False
            self._warn(
                "backward() runs after torch.autograd.grad() of a loss of the global batch, and does not reach that "
                "loss. If it goes on from the gradient that torch.autograd.grad returned, the gradients of the weights "
                "are 1/%d of those of one device. Instead of (g,) = torch.autograd.grad(loss, x), write "
                "loss.backward() with x a leaf, and go on from x.grad"
            )

    def of_input(self, x: Tensor, *, parts: int) -> Tensor:
        """Return an input of the model; in backward its gradient loses the factor that the loss carries.

        No reduction averages the gradient of a leaf. An input that is computed from parameters keeps the factor, since
        their gradients are averaged.

        Args:
            x: the input.
            parts: the number of ranks that each compute the gradient of a part of its tokens, which are added up.
        """
        is_averaged = not x.is_leaf or isinstance(x, nn.Parameter)
        return _OfInput.apply(x, self, 1 / parts, is_averaged, probe_of(x))

    def factor_of_input(self, *, is_averaged: bool) -> float:
        """Return the factor of the gradient that reaches an input in the running pass."""
        averages, is_of_loss = self._averages(), self._pass == torch._C._current_graph_task_id()
        if not (averages and is_averaged) and not is_of_loss:
            self._warn(
                "the gradient of an input of the model is that of a loss that this rank computes of its own rows. If "
                "this loss is a mean over rows, the gradient is %d times that of one device, whose batch has as many "
                "times more rows, and a sum over rows is right. Make the mean one of the global batch first: "
                "loss = meshwright.global_mean(model, loss, count), where count is the number of this rank's rows"
            )
        return 1 / self.ranks if averages and is_of_loss and not is_averaged else 1.0

    def _averages(self) -> bool:
        """Return whether the running pass adds to the gradients of parameters, which are averaged over the ranks."""
        # backward(inputs=...) may name parameters
        return self._is_own or _is_reached(_PROBE) or self._any_trained(_is_reached)

    def _warn(self, text: str) -> None:
        if self.ranks > 1 and text not in self._warned:
            self._warned.add(text)
            logger.warning(text, self.ranks)

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


def _is_reached(leaf: Tensor) -> bool:
    """Return whether the running pass adds to the gradient of a leaf, or returns it."""
    try:
        return torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(leaf).node)
    except RuntimeError:  # torch raises for a leaf whose gradient is returned, not accumulated
        return True


class _OfInput(TensorFunction):
    """Returns an input of the model as it is; backward multiplies its gradient."""

    has_graph = True

    @staticmethod
    def forward(
        ctx: Node, x: Tensor, losses: LossGradients, factor: float, is_averaged: bool, probe: Tensor | None
    ) -> Tensor:
        ctx.losses, ctx.factor, ctx.is_averaged = losses, factor, is_averaged
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Node, grad: Tensor) -> tuple[Tensor | None, ...]:
        factor = ctx.factor * ctx.losses.factor_of_input(is_averaged=ctx.is_averaged)
        return grad if factor == 1 else grad * factor, None, None, None, None
