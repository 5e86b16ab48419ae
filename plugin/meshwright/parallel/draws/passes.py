"""The passes that run in this process, its draws, which belong to them, and the time that these take."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Generator, Tensor, nn

from meshwright.mesh.axes import Axis
from meshwright.parallel.autograd_graph import in_backward
from meshwright.parallel.batch.items import BatchFormat
from meshwright.parallel.batch.schema import BatchSchema
from meshwright.parallel.batch.share import first_row, share_of
from meshwright.parallel.draws.kernels import Call, digest_of, generator_of, generators_of, hand_draws_to, is_given
from meshwright.parallel.draws.part import DrawnPart, draw_part
from meshwright.parallel.draws.sampling import Generation, RowDraws
from meshwright.parallel.draws.score_blocks import ScoreBlock, ScoreBlocks, running_block
from meshwright.parallel.draws.sites import BatchSizes
from meshwright.progress import is_first_rank
from meshwright.temporarily import temporarily

logger = logging.getLogger(__name__)

OWN_DRAWS = "ToDistributedConfig(draws='rank')"  # what to write instead
_TIMED, _SHARE = 5, 0.02  # the first steps, and the part of their time of which a line tells
_MOST = 2**15  # draws whose parts are known again when backward computes a layer again

_Parts = dict[ScoreBlock | None, tuple[DrawnPart | None, torch.Size]]  # by the block that draws


class DrawingModel(Protocol):
    """What draws for the passes of a model."""

    @property
    def is_on(self) -> bool:
        """Whether the ranks draw as one device does."""

    def as_one_device(
        self, current: DrawingPass, kernel: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], Any]:
        """Return a function that makes a draw of a pass."""

    def tell_of_states(self, module: nn.Module) -> None:
        """Tell that ranks draw for themselves, if they differ."""


@dataclass
class DrawingPass:
    """A forward pass that runs.

    Args:
        module: what was called.
        batch: its arguments by name.
        format: what they mean.
        device: the device on which it draws.
        dp: the axis over which the rows of the global batch are split.
        is_alone: whether no other rank runs what this one runs, apart from other stages of a pipeline.
        states: the states of torch's generators before the first micro-batch, and those of the program's own generators
            before the pass has drawn from them.
        frame: the frame that runs it, which a draw of the pass has on its stack.
        generation: the call of ``generate`` that it is, or that has called it; None outside of one.
        carried: the generators whose states travel through the stages of a pipeline; None without stages.
        begun: the states of torch's generators before the pass.
        part: which of this rank's rows run now; None for all.
        drew: how often it has drawn.
        is_seen: whether all that it has drawn was seen.
    """

    module: nn.Module
    batch: dict[str, Any]
    format: BatchFormat
    device: torch.device
    dp: Axis
    is_alone: bool
    frame: FrameType
    generation: Generation | None = None
    thread: int = field(default_factory=threading.get_ident)
    states: dict[Generator, Tensor] = field(default_factory=dict)
    carried: Collection[int] | None = None
    begun: dict[Generator, Tensor] = field(default_factory=dict)
    part: range | None = None
    drew: int = 0
    is_seen: bool = True

    @property
    def generates(self) -> bool:
        """Whether it is a call of ``generate`` itself, which samples tokens between the passes of the model."""
        return self.generation is not None and self.generation.batch is self.batch

    @functools.cached_property
    def schema(self) -> BatchSchema:
        """What the arguments hold."""
        return BatchSchema(self.batch, self.format)

    @functools.cached_property
    def sizes(self) -> BatchSizes:
        """The sizes of the arguments."""
        return BatchSizes.of(self.schema)

    @functools.cached_property
    def total(self) -> int:
        """The number of rows of the global batch."""
        rows = self.schema.rows
        if self.generation is not None:
            return self.generation.rows.total * self._copies
        share = share_of(self.batch.values())
        return share.total if share is not None and share.held == rows else rows * self.dp.size

    @property
    def _copies(self) -> int:
        """The number of rows of a pass for each row of the call of ``generate`` that runs it."""
        return 1 if self.generation is None else max(1, self.schema.rows // self.generation.rows.held)

    @property
    def is_whole(self) -> bool:
        """Whether what runs now is all that one device runs, so that it draws alike also inside of kernels."""
        return self.is_alone and len(self.rows) == self.total

    @property
    def has_part(self) -> bool:
        """Whether it does not run all rows of the global batch at once."""
        return self.dp.size > 1 or (self.part is not None and len(self.part) < self.schema.rows)

    @property
    def rows(self) -> range:
        """The rows of the global batch that run now."""
        held = self.schema.rows
        first = first_row(self.dp, held, self.total)
        if self.generation is not None:
            first = self.generation.rows.first * self._copies
        if self.part is None:
            return range(first, first + held)
        low = min(self.part.start, held - 1)  # a micro-batch without rows has one that does not count
        return range(first + low, first + max(low + 1, self.part.stop))


class Drawing:
    """What draws now in this process."""

    def __init__(self) -> None:
        # The passes that run, by their frames. A draw belongs to the innermost pass on its own stack, so those of other
        # threads, and those after a pass that was interrupted, belong to none.
        self.passes: dict[FrameType, tuple[DrawingModel, DrawingPass]] = {}
        # By generator, the digest of its state after the last draw of any thread, while passes run.
        self.last: dict[Generator, bytes] = {}
        self.is_looking = False  # whether a pass without values runs, of which threads may draw
        self.lock = threading.RLock()  # so that a digest is that of the state after a draw
        # By the generator's state before a draw: the part of the draw, None if it is not known, and the shape of what a
        # rank keeps. Backward computes a layer again from the same state. The micro-batches of a pass begin from one
        # state. All except the last run their backward at once, or in a pipeline later, so there each has its own.
        self.parts: dict[tuple[bytes, int | None], _Parts] = {}
        self.micro_batch: int | None = None  # the one of a pipeline that runs
        self.of_rows: MutableMapping[Generator, RowDraws] = weakref.WeakKeyDictionary()  # the program's own

    def keep(self, state: bytes, part: DrawnPart | None, shape: torch.Size) -> None:
        of_state = self.parts.pop((state, self.micro_batch), {})
        while len(self.parts) >= _MOST:
            del self.parts[next(iter(self.parts))]
        self.parts[state, self.micro_batch] = {**of_state, running_block(): (part, shape)}

    def of_state(self, generator: Generator) -> _Parts:
        """Return the parts of the draws that were made from a generator's state, by the blocks that drew."""
        return self.parts.get((digest_of(generator), self.micro_batch), {}) if self.parts else {}

    def innermost(self, frame: FrameType | None) -> tuple[DrawingModel, DrawingPass] | None:
        """Return the pass that has called a frame."""
        while self.passes and frame is not None:
            if (found := self.passes.get(frame)) is not None:
                return found
            frame = frame.f_back
        return None

    def begin(self, draws: DrawingModel, current: DrawingPass) -> None:
        """Begin a pass, after which nothing of this thread runs that it is not inside of."""
        thread, running, frame = current.thread, set(), current.frame.f_back
        while self.passes and frame is not None:
            running.add(frame)
            frame = frame.f_back
        with self.lock:
            self.passes = {x: of for x, of in self.passes.items() if of[1].thread != thread or x in running}
            if not self.passes:
                self.last.clear()
            self.see(current.device)
            self.passes[current.frame] = draws, current

    def see(self, device: torch.device) -> None:
        """Note if the generators have drawn without a call of this object, as in a kernel."""
        for generator in generators_of(device).values():
            self.reach(generator, digest_of(generator))

    def follow(self, device: torch.device) -> None:
        """Go on from states that the runtime has set."""
        self.last.update({generator: digest_of(generator) for generator in generators_of(device).values()})

    def reach(self, generator: Generator, state: bytes) -> None:
        """Note the state of a generator before a draw, or where no draw has happened since the last one."""
        if self.last.get(generator, state) != state and not self.is_looking:
            for _, current in self.passes.values():
                current.drew = max(1, current.drew)
                current.is_seen &= current.is_whole
        self.last[generator] = state

    def draw(self, kernel: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a draw of this process."""
        given = kwargs.get("generator")
        if given is not None and (rows := self.of_rows.get(given)) is not None:
            return rows.draw(kernel, args, kwargs)
        if in_backward():
            part, shape = self.of_state(generator_of(args, kwargs)).get(running_block(), (None, None))
            is_known = kwargs.get("out", args[0]).shape == shape
            return draw_part(part, kernel, args, kwargs) if is_known else kernel(*args, **kwargs)
        if not self.passes:
            return kernel(*args, **kwargs)
        draw: Callable[[], Any] = functools.partial(kernel, *args, **kwargs)
        running = self.innermost(sys._getframe(1))
        if running is not None:
            draws, current = running
            if not draws.is_on:
                draws.tell_of_states(current.module)
                return draw()
            draw = draws.as_one_device(current, kernel, args, kwargs)
        if is_given(args, kwargs):
            return draw()
        generator = generator_of(args, kwargs)
        with self.lock:
            self.reach(generator, digest_of(generator))
            drawn = draw()
            self.last[generator] = digest_of(generator)
        return drawn


process = Drawing()


def draw_rows_from(generator: Generator, rows: RowDraws) -> None:
    """Let a generator of the program draw for all rows of a batch, of which this rank keeps its own."""
    hand_draws_to(process.draw, (torch.device("cpu"), generator.device))
    process.of_rows[generator] = rows


def go_on_from(device: torch.device, states: Mapping[Generator, Tensor]) -> None:
    """Set the states of generators, from which the running passes go on to draw on a device."""
    process.see(device)
    for generator, state in states.items():
        generator.set_state(state)
    process.follow(device)


def of_micro_batch(number: int) -> contextlib.AbstractContextManager[None]:
    """Let draws inside the context be those of one of several micro-batches whose backwards wait for each other."""
    return temporarily(process, micro_batch=number)


def score_blocks(device: torch.device) -> ScoreBlocks | None:
    """Return what draws for the blocks of an attention that runs now; None if each draws for itself.

    Args:
        device: the device of the scores.
    """
    generators = generators_of(device).values()
    if in_backward():  # which restores the state of the pass that runs, if one does
        known = [process.of_state(generator) for generator in generators]
        is_on = any(block is not None for parts in known for block in parts)
    else:
        found = process.innermost(sys._getframe(1))
        is_on = found is not None and found[0].is_on
        if is_on:
            process.see(device)

    def follow() -> None:
        if not in_backward():
            process.follow(device)

    return ScoreBlocks({x: x.get_state() for x in generators}, follow) if is_on else None


class DrawingTime:
    """Tells once if the parts of other ranks take a noticeable part of the first steps."""

    def __init__(self) -> None:
        self._steps, self._start, self._spent = 0, 0.0, 0.0

    def begin(self) -> None:
        """Begin a training pass."""
        if self._steps > _TIMED:
            return
        now = time.perf_counter()
        if self._steps == 1:  # the first step finds the forms of the draws
            self._start, self._spent = now, 0.0
        self._steps += 1
        share = self._spent / max(now - self._start, 1e-9)
        if self._steps > _TIMED and share > _SHARE and is_first_rank():
            logger.info(
                "each rank draws the random numbers of the whole batch, so that they are those of one device, which "
                "takes %.0f %% of a step. %s draws those of the rank's rows alone",
                100 * share, OWN_DRAWS,
            )  # fmt: skip

    def add(self, seconds: float) -> None:
        """Add time that the parts of other ranks have taken."""
        if self._steps <= _TIMED:
            self._spent += seconds
