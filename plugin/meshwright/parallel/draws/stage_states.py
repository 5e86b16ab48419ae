"""The states of the generators, on their way through the stages of a pipeline.

::

    stage 0      start -> embedding, layers 0 and 1 -> a
    stage 1                                            a -> layers 2 and 3, head, loss -> b
    all stages                                                                            b

All micro-batches of a pass begin from the states at its start, so each of them comes to a stage in the same states, and
the first one alone carries them. The states after the last stage are those of one device after the pass.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Generator, Tensor, nn

from meshwright.errors import PlanError
from meshwright.parallel.async_numbers import is_deferred, read_later
from meshwright.parallel.draws.device_draws import DeviceDraws
from meshwright.parallel.draws.kernels import generators_of, identity_of
from meshwright.parallel.draws.passes import go_on_from, of_micro_batch
from meshwright.parallel.dropout_streams import Rates

logger = logging.getLogger(__name__)

_MARKS = 2  # behind the states: whether a stage has drawn, and whether one has drawn what cannot be placed


class StageStates:
    """What the stages of a pipeline know of what their passes draw.

    Args:
        draws: what the model's passes draw.
        rates: the model's rates of dropout.
    """

    def __init__(self, draws: DeviceDraws, rates: Rates):
        self._draws, self._rates = draws, rates
        self._drew: dict[Hashable, bool] = {}  # by the kind of a pass, whether a stage has drawn in the last one
        self._has_told = False
        self._late: deque[tuple[Hashable, Callable[[], Any]]] = deque()

    def begin(self, kind: Hashable, rows: Sequence[range | None]) -> PassStates:
        """Begin a pass.

        Args:
            kind: what decides whether the pass draws, the same on all stages, beside the rates of dropout. The first
                pass of a kind shows whether any stage draws, and later ones carry states if one has.
            rows: the rows of each micro-batch; None for all.
        """
        carries = self._drew.get(kind, True) or self._rates.is_any_on()
        return PassStates(self, self._draws, kind, rows, carries=carries)

    def end(self, kind: Hashable, *, drew: bool, stops: bool) -> None:
        """Take what all stages know after a pass that has carried states."""
        self._drew[kind] = drew
        if stops:
            self._draws.stop()

    def tell_of_late(self, name: str) -> None:
        """Tell once that a model draws whose stages expected it not to."""
        if not self._has_told:
            self._has_told = True
            logger.warning(
                "the forward of %s draws random numbers, and drew none on any stage of the pipeline in its first pass "
                "with such arguments. So the stages draw others than one device in this pass, and those of one device "
                "from the next pass on. Draw in each pass; or write draws='rank', which says nothing",
                name,
            )  # fmt: skip

    def see_late(self, kind: Hashable, count: Tensor) -> None:
        """Take the number of stages that have drawn in a pass without states; the next one of its kind has states."""
        self._late.append((kind, read_later(count)))
        while len(self._late) > is_deferred(count.device):
            late, read = self._late.popleft()
            self._drew[late] = self._drew[late] or bool(read())


class PassStates:
    """The states of one pass.

    Args:
        stages: what passes have shown.
        draws: what the model's passes draw.
        kind: see :meth:`StageStates.begin`.
        rows: see there.
        carries: whether the first micro-batch carries the states, if the stages draw as one device does.
    """

    def __init__(
        self, stages: StageStates, draws: DeviceDraws, kind: Hashable, rows: Sequence[range | None], *, carries: bool
    ):
        self._stages, self._draws, self._kind, self._rows = stages, draws, kind, rows
        self._pass = draws.running()
        self.carries = carries and self._pass is not None
        self._generators: Collection[Generator] = ()
        if self._pass is not None and carries:
            self._pass.carried = found = _generators(self._pass.module, self._pass.device)
            self._generators = found.values()
        self._start = self._now()
        self._before: dict[int, Tensor] = {}  # by stage, the states with which its layers begin
        self._after: dict[int, Tensor] = {}  # by stage, those with which they end

    @property
    def size(self) -> int:
        """The number of bytes that cross."""
        return len(self._start)

    @property
    def are_late(self) -> bool:
        """Whether this rank has drawn in a pass that carries no states, of which a warning tells once."""
        is_late = self._pass is not None and not self.carries and self._draws.marks_of(self._pass)[0]
        if is_late and self._pass is not None:
            self._stages.tell_of_late(type(self._pass.module).__name__)
        return is_late

    @contextlib.contextmanager
    def of_micro_batch(self, number: int) -> Iterator[None]:
        """Let draws inside the context be those of a micro-batch, also in a backward that computes it again."""
        if self._pass is None:
            yield
            return
        self._pass.part = self._rows[number]
        with of_micro_batch(number):
            yield

    def begin(self) -> None:
        """Begin a stage's forward on a micro-batch, which runs what comes before the layers too."""
        self._go_on_from(self._start)

    def enter_layers(self, stage: int) -> None:
        """Go on from the states with which the layers of a later stage than the first begin."""
        if self.carries:
            self._go_on_from(self._before[stage])

    def leave_layers(self, stage: int) -> None:
        """Keep the states with which the layers of a stage end; of the last stage those after its loss."""
        if self.carries and stage not in self._after:
            assert self._pass is not None
            self._after[stage] = self._now()
            marks = self._before.get(stage, self._start)[-_MARKS:]
            self._after[stage][-_MARKS:] = marks | torch.tensor(self._draws.marks_of(self._pass), device="cpu")

    def end_stage(self, stage: int) -> None:
        """End a stage, whose last layer has run: with its end the states cross.

        Raises:
            PlanError: if it has not.
        """
        if self.carries and stage not in self._after:
            raise PlanError(
                f"the last layer of pipeline stage {stage} did not run in this pass, so the next stage does not know "
                "which random numbers follow. Skip what is inside of a layer and not its call, or use pp=1"
            )

    def after(self, stage: int) -> Tensor:
        """Return what crosses to the next stage, also from one that has failed."""
        return self._after.get(stage, self._before.get(stage, self._start))

    def arrive(self, stage: int, states: Tensor) -> None:
        """Take what has crossed to a stage."""
        self._before[stage] = states

    def end(self, states: Tensor) -> None:
        """Go on after the pass from the states after the last stage."""
        self._go_on_from(states)
        self._start, self._before, self._after = states.new_empty(0), {}, {}
        drew, stops = map(bool, states[-_MARKS:].tolist())
        self._stages.end(self._kind, drew=drew, stops=stops)

    def see_late(self, count: Tensor) -> None:
        """Take the number of stages that have drawn late."""
        if self._pass is not None and not self.carries:
            self._stages.see_late(self._kind, count)

    def _now(self) -> Tensor:
        return torch.cat(
            [
                *(generator.get_state() for generator in self._generators),
                torch.zeros(_MARKS, dtype=torch.uint8, device="cpu"),
            ]
        )

    def _go_on_from(self, states: Tensor) -> None:
        if self.carries:
            assert self._pass is not None
            sizes = [generator.get_state().numel() for generator in self._generators]
            parts = map(Tensor.clone, states[:-_MARKS].split(sizes))
            go_on_from(self._pass.device, dict(zip(self._generators, parts, strict=True)))


def _generators(module: nn.Module, device: torch.device) -> dict[int, Generator]:
    """Return the generators from which stages draw: torch's own, and those that modules have as attributes."""
    found = {identity_of(generator): generator for generator in generators_of(device).values()}
    for part in module.modules():
        found |= {identity_of(value): value for value in vars(part).values() if isinstance(value, Generator)}
    return found
