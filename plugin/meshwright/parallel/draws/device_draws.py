"""Draws of one device: each rank draws the tensor that one device would draw, and keeps the part that it computes with.

::

    one device    dropout on [8 rows, ...]    one draw for rows 0 to 7
    rank 0        dropout on [4 rows, ...]    the same draw, of which it keeps rows 0 to 3
    rank 1        dropout on [4 rows, ...]    the same draw, of which it keeps rows 4 to 7

All ranks draw from torch's own generators, in the program's order, so after a step these have the states of one device.
"""

from __future__ import annotations

import functools
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Generator, Tensor, nn

from meshwright.faults.guard import Guard
from meshwright.faults.statement import Statement
from meshwright.mesh.axes import Axis, Mesh
from meshwright.parallel.autograd_graph import in_backward
from meshwright.parallel.batch.items import BatchFormat
from meshwright.parallel.batch.schema import BatchSchema
from meshwright.parallel.batch.share import share_of
from meshwright.parallel.draws.drawing_time import OWN_DRAWS, DrawingTime
from meshwright.parallel.draws.kernels import (
    Call,
    digest_of,
    generator_of,
    generators_of,
    hand_draws_to,
)
from meshwright.parallel.draws.part import DrawnPart, draw_part, is_dense, part_of
from meshwright.parallel.draws.sites import BatchSizes, DrawSites, Lines, lines_to, words_for
from meshwright.parallel.dropout_streams import DropoutStreams, Restore, is_capturing
from meshwright.random_states import HostStates
from meshwright.temporarily import temporarily

logger = logging.getLogger(__name__)

_CURE = (
    f"Seed all ranks alike, torch.manual_seed(0), and draw on all ranks alike between the steps; or pass {OWN_DRAWS}"
)
_MOST = 2**15  # draws whose parts are known again when backward computes a layer again
_FIRST, _EVERY = 3, 50  # the first steps, in which the ranks compare their random states, and every so many


@dataclass
class _Pass:
    """A forward pass that runs.

    Args:
        module: what was called.
        batch: its arguments by name.
        format: what they mean.
        device: the device on which it draws.
        dp: the axis over which the rows of the global batch are split.
        states: the states of torch's generators before the first micro-batch.
        given: the program's own generators that the pass has drawn from, with their states before.
        frame: the frame that runs it, which a draw of the pass has on its stack.
        part: which of this rank's rows run now; None for all.
        drew: whether it has drawn.
        is_seen: whether all that it has drawn was seen.
    """

    module: nn.Module
    batch: dict[str, Any]
    format: BatchFormat
    device: torch.device
    dp: Axis
    frame: FrameType
    thread: int = field(default_factory=threading.get_ident)
    states: dict[str, Tensor] = field(default_factory=dict)
    given: dict[Generator, Tensor] = field(default_factory=dict)
    part: range | None = None
    drew: bool = False
    is_seen: bool = True

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
        share, rows = share_of(self.batch.values()), self.schema.rows
        return share.total if share is not None and share.held == rows else rows * self.dp.size

    @property
    def has_part(self) -> bool:
        """Whether it does not run all rows of the global batch at once."""
        return self.dp.size > 1 or (self.part is not None and len(self.part) < self.schema.rows)

    @property
    def rows(self) -> range:
        """The rows of the global batch that run now."""
        held = self.schema.rows
        first = min(self.dp.rank * self.total // self.dp.size, self.total - held)
        if self.part is None:
            return range(first, first + held)
        low = min(self.part.start, held - 1)  # a micro-batch without rows has one that does not count
        return range(first + low, first + max(low + 1, self.part.stop))


class _Drawing:
    """What draws now in this process."""

    def __init__(self) -> None:
        # The passes that run, by their frames. A draw belongs to the innermost pass on its own stack, so those of other
        # threads, and those after a pass that was interrupted, belong to none.
        self.passes: dict[FrameType, tuple[DeviceDraws, _Pass]] = {}
        # By generator, the digest of its state after the last draw of any thread, while passes run.
        self.last: dict[Generator, bytes] = {}
        self.is_looking = False  # whether a pass without values runs, of which threads may draw
        self.lock = threading.RLock()  # so that a digest is that of the state after a draw
        # By the generator's state before a draw: the part of the draw, and the shape of what a rank keeps. Backward
        # computes a layer again from the same state. The micro-batches of a pass begin from one state, but all except
        # the last run their backward at once.
        self.parts: dict[bytes, tuple[DrawnPart, torch.Size]] = {}

    def keep(self, state: bytes, part: DrawnPart, shape: torch.Size) -> None:
        self.parts.pop(state, None)
        while len(self.parts) >= _MOST:
            del self.parts[next(iter(self.parts))]
        self.parts[state] = part, shape

    def innermost(self, frame: FrameType | None) -> tuple[DeviceDraws, _Pass] | None:
        """Return the pass that has called a frame."""
        while self.passes and frame is not None:
            if (found := self.passes.get(frame)) is not None:
                return found
            frame = frame.f_back
        return None

    def begin(self, draws: DeviceDraws, current: _Pass) -> None:
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
                current.is_seen = False
        self.last[generator] = state

    def draw(self, kernel: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a draw of this process."""
        if in_backward():
            part, shape = (self.parts and self.parts.get(digest_of(generator_of(args, kwargs)))) or (None, None)
            is_known = part is not None and kwargs.get("out", args[0]).shape == shape
            return draw_part(part, kernel, args, kwargs) if part and is_known else kernel(*args, **kwargs)
        if not self.passes:
            return kernel(*args, **kwargs)
        draw: Callable[[], Any] = functools.partial(kernel, *args, **kwargs)
        found = self.innermost(sys._getframe(1))
        if found is not None:
            draws, current = found
            if not draws.is_on:
                draws.tell_of_states(current.module)
                return draw()
            draw = draws.as_one_device(current, kernel, args, kwargs)
        if kwargs.get("generator") is not None:
            return draw()
        generator = generator_of(args, kwargs)
        with self.lock:
            self.reach(generator, digest_of(generator))
            drawn = draw()
            self.last[generator] = digest_of(generator)
        return drawn


_process = _Drawing()


class DeviceDraws:
    """What a model's forward passes draw.

    Args:
        mesh: the axes.
        streams: the streams from which ranks draw where ``is_on`` is False.
        format: what the inputs of the model mean.
        is_on: whether the ranks draw as one device does.
        shares_tokens: whether ranks of tp have parts of the tokens.
        wholes: for modules that have read the sizes of a rank's part: what they had read of the whole.
    """

    def __init__(
        self,
        *,
        mesh: Mesh,
        streams: DropoutStreams,
        format: BatchFormat,
        is_on: bool,
        shares_tokens: bool,
        wholes: Mapping[nn.Module, Mapping[str, Any]],
    ) -> None:
        self.is_on, self._mesh, self._streams, self._format = is_on, mesh, streams, format
        self._sites, self._shares_tokens = DrawSites(wholes), shares_tokens
        self._is_known = True
        streams.is_on = not is_on
        self._logged: set[str] = set()
        self._passes = 0  # that train
        self._state: str | None = None  # before the last pass
        self._moment, self._rows = "", 0
        self._meetings: dict[str, int] = {}
        self._may_be_on, self._compares, self._has_drawn, self._differs = is_on, is_on, False, False
        self._cost = DrawingTime()

    @property
    def moment(self) -> str:
        """What must be equal on all ranks before each step."""
        return self._streams.moment

    @property
    def statements(self) -> tuple[Statement, ...]:
        """What ranks that hold the same activations say before each step. Those of dp may go on with other masks."""
        if not self._may_be_on:
            return ()
        moment = self._moment if self.is_on else "draws for itself"
        what = "what draws='device' draws from (the random state, the rows of the last batch)"
        advice = f"The ranks of tp hold the same activations, for which they must draw the same. {_CURE}"
        return (Statement(text=moment, details=lambda: {what: moment}, advice=advice),)

    def look(self, guard: Guard, device: torch.device) -> None:
        """Look at the random state before a pass. Ranks of tp hold the same activations, and draw the same for these.

        Args:
            guard: the guard.
            device: the device on which the pass draws.
        """
        if not self.is_on or is_capturing(device):
            return
        tp, is_first = self._mesh.tp, self._state is None
        self._state = b"".join(map(digest_of, generators_of(device).values())).hex()
        if tp.size > 1 and is_first and guard.is_current:
            self._compare(guard, tp, self._state)
        self._moment = f"{self._state} after {self._rows} rows" if tp.size > 1 and self._has_drawn else ""

    def meet_over(self, guard: Guard, axis: Axis) -> None:
        """Compare what ranks draw from and for how many rows, where they reduce their gradients: in the first steps
        and every few steps. Ranks of dp may have run unequally many passes before.

        Args:
            guard: the guard.
            axis: the axis of the ranks.
        """
        if self._compares and guard.is_current:
            self._meetings[axis.name] = count = self._meetings.get(axis.name, 0) + 1
            if count <= _FIRST or count % _EVERY == 0:
                drawn = f"{self._state} for {self._rows} rows" if self._has_drawn else "nothing"
                self._compare(guard, axis, drawn if self.is_on else "for itself")

    def _compare(self, guard: Guard, axis: Axis, text: str) -> None:
        if not guard.agree("what the forward draws", text, group=axis.group):
            self._differs = True
            self._stop()
        self._compares &= self.is_on

    def enter_model(
        self, module: nn.Module, batch: dict[str, Any], device: torch.device, frame: FrameType, *, trains: bool
    ) -> Restore:
        """Begin a forward pass.

        Args:
            module: the module that is called.
            batch: its arguments by name.
            device: the device on which the pass draws.
            frame: the frame that runs the pass.
            trains: whether the pass trains.

        Returns:
            A function that ends the pass.
        """
        if is_capturing(device) or not (self.is_on or self._differs or _process.passes):
            return self._streams.enter_model(device, trains=trains)
        hand_draws_to(_process.draw, (torch.device("cpu"), device))
        current = _Pass(module, batch, self._format, device, self._mesh.dp, frame)
        _process.begin(self, current)
        restore = None if self.is_on else self._streams.enter_model(device, trains=trains)
        if self.is_on:
            self._streams.count(trains=trains)
        if trains and self.is_on:
            self._cost.begin()
        of_host = HostStates() if trains and self.is_on and self._count_pass() <= _FIRST else None

        def end() -> None:
            with _process.lock:
                _, running = _process.innermost(sys._getframe(1)) or (None, None)
                is_interrupted = running is not current
                if restore is None and not is_interrupted:
                    _process.see(device)
                _process.passes.pop(frame, None)
            if restore is not None:
                restore()
            elif not is_interrupted and (current.drew or not current.is_seen):
                self._end(current)
            if of_host is not None and current.has_part and not of_host.are_unchanged:
                self._tell_of_host(current.module)

        return end

    def _count_pass(self) -> int:
        self._passes += 1
        return self._passes

    def begin_slice(self, rows: range) -> None:
        """Begin a micro-batch of the running pass, which draws what the whole pass draws, and has some of its rows."""
        owner, current = _process.innermost(sys._getframe(1)) or (None, None)
        if current is None or owner is not self or not self.is_on:
            return
        is_first, current.part = current.part is None, rows  # several may begin at row 0, with no rows
        generators = generators_of(current.device)
        if is_first:
            current.states = {kind: generator.get_state() for kind, generator in generators.items()}
            return
        for given, state in current.given.items():
            given.set_state(state)
        _process.see(current.device)
        for kind, generator in generators.items():
            generator.set_state(current.states[kind])
        _process.follow(current.device)

    def as_one_device(
        self, current: _Pass, kernel: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], Any]:
        """Return a function that makes a draw of a pass.

        Args:
            current: the pass.
            kernel: the operation's own kernel.
            args: its arguments.
            kwargs: its arguments by name.
        """
        current.drew = True
        generator, x = generator_of(args, kwargs), kwargs.get("out", args[0])
        if kwargs.get("generator") is not None and generator not in current.given:
            current.given[generator] = generator.get_state()
        lines = lines_to(sys._getframe(1), current.frame)
        part = self._part(current, lines, x)
        if part is not None and not part.is_whole and "out" in kwargs:
            part = None  # a part of a permutation of all rows is none of a rank's rows
        if part is None:
            self._tell_of_unplaced(lines, x)

        def draw() -> Any:
            state = digest_of(generator)
            if part is None or part.is_whole:
                _process.parts.pop(state, None)  # of another pass from the same state, as of a program that seeds again
                return kernel(*args, **kwargs)  # which backward repeats if it computes the layer again
            start = time.perf_counter()
            _process.keep(state, part, x.shape)
            drawn = draw_part(part, kernel, args, kwargs)
            self._cost.add((time.perf_counter() - start) * (1 - x.numel() / math.prod(part.shape)))
            return drawn

        return draw

    def tell_of_states(self, module: nn.Module) -> None:
        """Tell that ranks draw for themselves, if they differ."""
        if self._differs:
            self._differs = False
            self._tell_once(
                "states",
                "the forward of %s draws random numbers, and the ranks differ in torch's random state or in the number "
                "of their rows, so they draw others than one device. %s, which says nothing",
                type(module).__name__, _CURE,
            )  # fmt: skip

    def _tell_of_host(self, module: nn.Module) -> None:
        """Tell that a forward draws what torch does not draw."""
        self._tell_once(
            "host",
            "the forward of %s draws random numbers by numpy or by Python's random module, and each rank and each "
            "micro-batch draws for its own rows, so they are others than those of one device. Draw them by torch, or "
            "pass what they decide to the model, such as mask_time_indices; %s, which says nothing",
            type(module).__name__, f"or pass {OWN_DRAWS}",
        )  # fmt: skip

    def _part(self, current: _Pass, lines: Lines, x: Tensor) -> DrawnPart | None:
        """Return the part of a draw that this rank keeps; None if it is not known."""
        if not is_dense(x):
            return None
        sizes, tp = current.sizes, self._mesh.tp
        of = functools.partial(
            part_of, rows=current.rows, total=current.total, lengths=sizes.lengths, tp=tp,
            shares_tokens=self._shares_tokens,
        )  # fmt: skip
        for _ in range(2):
            forms = self._sites.find(lines, sizes)
            if forms == {None} and tp.size == 1:  # a rank has all of a row, whatever its sizes
                forms = self._sites.find_alike(lines, sizes, x.shape, len(current.rows))
            parts = {of(form, x.shape) for form in forms if form is not None and len(form) == x.ndim} - {None}
            if len(parts) == 1 and None not in forms:
                return parts.pop()
            start = time.perf_counter()
            _process.see(current.device)
            with temporarily(_process, is_looking=True):
                has_run = self._sites.observe(current.module, current.schema, sizes, lines)
            _process.follow(current.device)  # from the states of before
            self._cost.add(time.perf_counter() - start)
            if not has_run:
                return None
        return None

    def _tell_of_unplaced(self, lines: Lines, x: Tensor) -> None:
        """Tell that a draw cannot be placed. All ranks draw the same until the pass has ended."""
        why = "" if self._sites.failure is None else f" ({self._sites.failure})"
        self._tell_once(
            "unplaced",
            "%s draws random numbers of shape %s, and it is not known which of them belong to which rows of the "
            "batch%s. So the ranks draw others than one device from the next pass on, and the losses are as good. To "
            "compare the two, draw numbers with a dim of the rows in the model's forward, or pass them to the model; "
            "%s says nothing",
            words_for(lines), tuple(x.shape), why, OWN_DRAWS,
        )  # fmt: skip
        self._is_known = False

    def _end(self, current: _Pass) -> None:
        self._has_drawn, self._rows = True, current.total
        if not current.is_seen:
            self._tell_once(
                "unseen",
                "the forward of %s draws random numbers inside of a kernel, such as an attention with dropout on CUDA "
                "or an LSTM with dropout, where a rank cannot draw for all rows; or it sets torch's random state, as "
                "torch.manual_seed and torch.random.fork_rng do. So the ranks draw others than one device from the "
                "next pass on. For attention use attn_implementation='eager'; or pass %s, which says nothing",
                type(current.module).__name__, OWN_DRAWS,
            )  # fmt: skip
            self._is_known = False
        if not self._is_known:
            self._stop()

    def _stop(self) -> None:
        """Let the ranks draw from streams of their own from the next pass on."""
        self.is_on, self._streams.is_on = False, True

    def _tell_once(self, about: str, text: str, *values: object) -> None:
        if about not in self._logged:
            self._logged.add(about)
            logger.warning(text, *values)  # perhaps on this rank alone; equal texts are printed once
