"""Draws of one device: each rank draws the tensor that one device would draw, and keeps the part that it computes with.

::

    one device    dropout on [8 rows, ...]    one draw for rows 0 to 7
    rank 0        dropout on [4 rows, ...]    the same draw, of which it keeps rows 0 to 3
    rank 1        dropout on [4 rows, ...]    the same draw, of which it keeps rows 4 to 7

All ranks draw from torch's own generators, in the program's order, so after a step these have the states of one device.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Generator, Tensor, nn

from meshwright.errors import DivergenceError, PeerFailedError
from meshwright.faults.guard import Guard
from meshwright.faults.interpose import own_collectives
from meshwright.faults.statement import Statement
from meshwright.faults.together import values_of_all
from meshwright.mesh.axes import Axis, Mesh
from meshwright.parallel.autograd_graph import in_backward
from meshwright.parallel.batch.items import BatchFormat
from meshwright.parallel.batch.schema import BatchSchema
from meshwright.parallel.batch.share import share_of
from meshwright.parallel.draws.drawing_time import OWN_DRAWS, DrawingTime
from meshwright.parallel.draws.kernels import (
    Call,
    advance,
    apart,
    digest_of,
    generator_of,
    generators_of,
    hand_draws_to,
    identity_of,
)
from meshwright.parallel.draws.part import DrawnPart, draw_part, is_dense, part_of
from meshwright.parallel.draws.sampling import Generation, RowDraws, samples_tokens
from meshwright.parallel.draws.score_blocks import ScoreBlock, ScoreBlocks, running_block
from meshwright.parallel.draws.sites import BatchSizes, DrawSites, Lines, lines_to, words_for
from meshwright.parallel.dropout_streams import DropoutStreams, Restore, is_capturing
from meshwright.parallel.sequence_parts import Parted, SequenceParts
from meshwright.random_states import HostStates
from meshwright.temporarily import temporarily

logger = logging.getLogger(__name__)

_CURE = (
    f"Seed all ranks alike, torch.manual_seed(0), and draw on all ranks alike between the steps; or pass {OWN_DRAWS}"
)
_MOST = 2**15  # draws whose parts are known again when backward computes a layer again
_FIRST, _EVERY = 3, 50  # the first steps, in which the ranks compare their random states, and every so many

_Parts = dict[ScoreBlock | None, tuple[DrawnPart | None, torch.Size]]  # by the block that draws


@dataclass
class _Pass:
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
            return self.generation.total * self._copies
        share = share_of(self.batch.values())
        return share.total if share is not None and share.held == rows else rows * self.dp.size

    @property
    def _copies(self) -> int:
        """The number of rows of a pass for each row of the call of ``generate`` that runs it."""
        return 1 if self.generation is None else max(1, self.schema.rows // self.generation.held)

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
        first = min(self.dp.rank * self.total // self.dp.size, self.total - held)
        if self.generation is not None:
            first = self.generation.first * self._copies
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
        if given is not None:
            return draw()
        generator = generator_of(args, kwargs)
        with self.lock:
            self.reach(generator, digest_of(generator))
            drawn = draw()
            self.last[generator] = digest_of(generator)
        return drawn


_process = _Drawing()


def draw_rows_from(generator: Generator, rows: RowDraws) -> None:
    """Let a generator of the program draw for all rows of a batch, of which this rank keeps its own."""
    hand_draws_to(_process.draw, (torch.device("cpu"), generator.device))
    _process.of_rows[generator] = rows


def go_on_from(device: torch.device, states: Mapping[Generator, Tensor]) -> None:
    """Set the states of generators, from which the running passes go on to draw on a device."""
    _process.see(device)
    for generator, state in states.items():
        generator.set_state(state)
    _process.follow(device)


def of_micro_batch(number: int) -> contextlib.AbstractContextManager[None]:
    """Let draws inside the context be those of one of several micro-batches whose backwards wait for each other."""
    return temporarily(_process, micro_batch=number)


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
        self._prompts = ""  # a digest of what generate has sampled for, other than the loader's batches
        self._stops = False  # whether a stage waits until all stages of its pipeline stop
        self._cost = DrawingTime()
        self.parted: Parted | None = None  # what knows which tokens this rank of cp has

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
        advice = f"Ranks of tp and cp hold the same activations, for which they must draw the same. {_CURE}"
        return (Statement(text=moment, details=lambda: {what: moment}, advice=advice),)

    def look(self, guard: Guard, device: torch.device) -> None:
        """Look at the random state before a pass. Ranks of tp and cp draw the same for the activations that all hold.

        Args:
            guard: the guard.
            device: the device on which the pass draws.
        """
        if not self.is_on or is_capturing(device):
            return
        axes, is_first = [x for x in (self._mesh.cp, self._mesh.tp) if x.size > 1], self._state is None
        self._state = b"".join(map(digest_of, generators_of(device).values())).hex()
        if is_first and axes and guard.is_current:
            for axis in axes:
                self._compare(guard, axis, self._state)
            if (pp := self._mesh.pp).size > 1 and not guard.agree("draws", f"{not self._stops}", group=pp.group):
                self._stops = True
            if self._stops:
                self.stop()  # all stages alike, before they draw
        self._moment = f"{self._state} after {self._rows} rows" if axes and self._has_drawn else ""

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
                self._compare(guard, axis, f"{drawn}{self._prompts}" if self.is_on else "for itself")
                if self._differs and self._prompts:
                    self._tell_once(
                        "prompts",
                        "generate has sampled on the ranks of dp for prompts that differ, or from random states that "
                        "do, and that are no tensors of a batch of the loader as it yielded them. So the tokens are "
                        "others than on one device, and the ranks draw for themselves from now on. Generate for the "
                        "loader's own tensors, and for the same other prompts on all ranks; or pass %s",
                        OWN_DRAWS,
                    )  # fmt: skip
                self._prompts = ""

    def _compare(self, guard: Guard, axis: Axis, text: str) -> None:
        if not (is_alike := guard.agree("what the forward draws", text, group=axis.group)):
            self._differs = True
            self._stop()
        self._compares &= is_alike and self.is_on

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
        _, outer = _process.innermost(frame) or (None, None)
        generation = None if outer is None else outer.generation
        is_alone = self._mesh.size == self._mesh.pp.size
        current = _Pass(module, batch, self._format, device, self._mesh.dp, is_alone, frame, generation)
        _process.begin(self, current)
        restore = None if self.is_on else self._streams.enter_model(device, trains=trains)
        if self.is_on:
            current.begun = {generator: generator.get_state() for generator in generators_of(device).values()}
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
            elif not is_interrupted and current.drew:
                self._end(current)
            if of_host is not None and current.has_part and not of_host.are_unchanged:
                self._tell_of_host(current.module)

        return end

    @contextlib.contextmanager
    def generating(
        self, model: nn.Module, batch: dict[str, Any], device: torch.device, frame: FrameType, guard: Guard | None
    ) -> Iterator[None]:
        """Sample the tokens of ``generate`` as one device does: for all rows of a loader's batch, of which this rank
        has a part, and for other prompts as they are.

        Args:
            model: the model.
            batch: the arguments by name.
            device: the device on which the tokens are sampled.
            frame: the frame that runs the call.
            guard: the guard, with which the ranks meet that have rows of one batch; None on one process.
        """
        call = Generation.of(model, batch, self._mesh.dp)
        meets = self._may_be_on and call.samples and call.total > call.held and guard is not None and guard.is_current
        state = b"".join(map(digest_of, generators_of(device).values())).hex()
        if meets and guard is not None:
            text = f"{state} for {call.total} rows" if self.is_on else "for itself"
            if not guard.agree("generate", text, group=self._mesh.dp.group):
                self._differs = True
                self.tell_of_states(model)
                self._stop()
        if not self.is_on:
            yield
            return
        if call.samples and not meets and self._mesh.dp.size > 1:
            self._prompts = call.digest(state)
            self._meetings.clear()  # so that the ranks compare them where they meet next
        hand_draws_to(_process.draw, (torch.device("cpu"), device))
        current = _Pass(model, batch, self._format, device, self._mesh.dp, call.total == call.held, frame, call)
        _process.begin(self, current)
        failure: Exception | None = None
        try:
            yield
        except (DivergenceError, PeerFailedError):
            raise
        except Exception as error:  # which the program may catch on this rank alone
            failure = error
        finally:
            with _process.lock:
                _process.see(device)
                _process.passes.pop(frame, None)
        self._is_known &= current.is_seen
        if meets:
            self._follow_longest(current, has_failed=failure is not None)
        if not self._is_known:
            self._tell_of_sampling()
            self._stop()
        if failure is not None:
            raise failure

    def _follow_longest(self, current: _Pass, *, has_failed: bool) -> None:
        """Go on from the random state of the rank of dp that has sampled the longest text, as one device does."""
        generators = generators_of(current.device)
        states = {kind: generator.get_state() for kind, generator in generators.items()}
        own = -1 if has_failed else current.drew, self._is_known, states
        with own_collectives():
            of_ranks = values_of_all(own, self._mesh.dp.group)
        self._is_known = all(is_known for _, is_known, _ in of_ranks)
        _, _, states = max(of_ranks, key=lambda of_rank: of_rank[0])
        for kind, generator in generators.items():
            generator.set_state(states[kind])
        _process.follow(current.device)

    def _tell_of_sampling(self) -> None:
        self._tell_once(
            "sampling",
            "generate draws random numbers that are not those of its tokens, as a processor of logits may, or inside "
            "of a kernel. So the ranks sample others than one device from now on. Draw them from a torch.Generator of "
            "their own; or pass %s, which says nothing",
            OWN_DRAWS,
        )

    def _count_pass(self) -> int:
        self._passes += 1
        return self._passes

    def begin_slice(self, rows: range) -> None:
        """Begin a micro-batch of the running pass, which draws what the whole pass draws, and has some of its rows."""
        if (current := self.running()) is None:
            return
        is_first, current.part = current.part is None, rows  # several may begin at row 0, with no rows
        if is_first:
            current.states = {generator: generator.get_state() for generator in generators_of(current.device).values()}
        else:
            go_on_from(current.device, current.states)

    def running(self) -> _Pass | None:
        """Return this model's pass that runs, if it draws what one device draws."""
        owner, current = _process.innermost(sys._getframe(1)) or (None, None)
        return current if owner is self and self.is_on else None

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
        if current.generates:
            return self._as_sampled(current, kernel, args, kwargs)
        current.drew += 1
        generator, x = generator_of(args, kwargs), kwargs.get("out", args[0])
        if kwargs.get("generator") is not None and generator not in current.states:
            current.states[generator] = generator.get_state()
        lines = lines_to(sys._getframe(1), current.frame)
        part = self._part(current, lines, x)
        if part is not None and not part.is_whole and "out" in kwargs:
            part = None  # a part of a permutation of all rows is none of a rank's rows
        if current.carried is not None and identity_of(generator) not in current.carried:
            self._tell_once(
                "apart",
                "%s draws from a torch.Generator that no module has as an attribute, so the stages of the pipeline "
                "cannot hand on its state, and draw others than one device from the next pass on. Make it an attribute "
                "of the model, model.generator = generator; or pass %s, which says nothing",
                words_for(lines), OWN_DRAWS,
            )  # fmt: skip
            self._is_known = False
        elif part is None:
            self._tell_of_unplaced(lines, x)

        def draw() -> Any:
            state = digest_of(generator)
            if part is not None and part.is_whole:
                # Of another pass from the same state, as of a program that seeds again.
                _process.parts.pop((state, _process.micro_batch), None)
                return kernel(*args, **kwargs)  # which backward repeats if it computes the layer again
            start = time.perf_counter()
            _process.keep(state, part, x.shape)
            drawn = draw_part(part, kernel, args, kwargs)
            if part is not None:
                self._cost.add((time.perf_counter() - start) * (1 - x.numel() / math.prod(part.shape)))
            return drawn

        return draw

    def _as_sampled(
        self, current: _Pass, kernel: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], Any]:
        """Return a function that makes a draw of ``generate`` between the passes of the model."""
        call = current.generation
        assert call is not None
        if kwargs.get("generator") is not None or call.held == call.total:
            return functools.partial(kernel, *args, **kwargs)
        current.drew += 1
        part = call.part(args[0].shape) if samples_tokens(sys._getframe(1)) and is_dense(args[0]) else None
        if part is None:
            self._is_known = False
            return functools.partial(kernel, *args, **kwargs)
        return functools.partial(draw_part, part, kernel, args, kwargs)

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
        if current.is_whole:
            return DrawnPart(tuple(x.shape), ())
        if not is_dense(x):
            return None
        sizes, tp, cp = current.sizes, self._mesh.tp, self._mesh.cp
        parts_of_rows = SequenceParts(cp) if self.parted is None else self.parted.parts
        of = functools.partial(
            part_of, rows=current.rows, total=current.total, lengths=sizes.lengths, tp=tp, parts=parts_of_rows,
            block=running_block(), shares_tokens=self._shares_tokens,
        )  # fmt: skip
        for _ in range(2):
            forms = self._sites.find(lines, sizes, is_inner=running_block() is not None)
            if forms == {None} and tp.size * cp.size == 1:  # a rank has all of a row, whatever its sizes
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
        """Tell that a draw cannot be placed. The ranks have the same states again after it, and after the pass."""
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
            for generator, state in current.begun.items():  # some ranks may have drawn more often
                generator.set_state(state)
                with apart():
                    advance(generator)
            _process.follow(current.device)
            self._stop()

    def _stop(self) -> None:
        """Stop, or wait until the stages of the pipeline do so together."""
        self._stops = True
        if self._mesh.pp.size == 1:
            self.stop()

    def stop(self) -> None:
        """Let the ranks draw from streams of their own from the next pass on."""
        self.is_on, self._streams.is_on = False, True

    def marks_of(self, current: _Pass) -> tuple[bool, bool]:
        """Return whether a pass has drawn so far, and whether the stages must stop."""
        _process.see(current.device)
        return bool(current.drew), self._stops or not (self._is_known and current.is_seen)

    def _tell_once(self, about: str, text: str, *values: object) -> None:
        if about not in self._logged:
            self._logged.add(about)
            logger.warning(text, *values)  # perhaps on this rank alone; equal texts are printed once


def score_blocks(device: torch.device) -> ScoreBlocks | None:
    """Return what draws for the blocks of an attention that runs now; None if each draws for itself.

    Args:
        device: the device of the scores.
    """
    generators = generators_of(device).values()
    if in_backward():  # which restores the state of the pass that runs, if one does
        known = [_process.of_state(generator) for generator in generators]
        is_on = any(block is not None for parts in known for block in parts)
    else:
        found = _process.innermost(sys._getframe(1))
        is_on = found is not None and found[0].is_on
        if is_on:
            _process.see(device)

    def follow() -> None:
        if not in_backward():
            _process.follow(device)

    return ScoreBlocks({x: x.get_state() for x in generators}, follow) if is_on else None
