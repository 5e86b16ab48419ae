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
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import DivergenceError, PeerFailedError
from meshwright.faults.guard import Guard
from meshwright.faults.interpose import own_collectives
from meshwright.faults.statement import Statement
from meshwright.faults.together import values_of_all
from meshwright.mesh.axes import Axis, Mesh
from meshwright.parallel.batch.items import BatchFormat
from meshwright.parallel.draws.kernels import (
    Call,
    advance,
    apart,
    digest_of,
    generator_of,
    generators_of,
    hand_draws_to,
    identity_of,
    is_given,
)
from meshwright.parallel.draws.part import DrawnPart, draw_part, is_dense, part_of
from meshwright.parallel.draws.passes import OWN_DRAWS, DrawingPass, DrawingTime, go_on_from, process
from meshwright.parallel.draws.sampling import Generation, samples_tokens
from meshwright.parallel.draws.score_blocks import running_block
from meshwright.parallel.draws.sites import DrawSites, Lines, lines_to, words_for
from meshwright.parallel.dropout_streams import DropoutStreams, Restore, is_capturing
from meshwright.parallel.sequence_parts import Parted, SequenceParts
from meshwright.random_states import HostStates
from meshwright.temporarily import temporarily

logger = logging.getLogger(__name__)

_CURE = (
    f"Seed all ranks alike, torch.manual_seed(0), and draw on all ranks alike between the steps; or pass {OWN_DRAWS}"
)
_FIRST, _EVERY = 3, 50  # the first steps, in which the ranks compare their random states, and every so many


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
        self._mesh, self._streams, self._format = mesh, streams, format
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
    def is_on(self) -> bool:
        """Whether the ranks draw as one device does, in this pass or the next one."""
        return not self._streams.is_on

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
        if not self.is_on:
            advice = f"This rank alone has drawn what it could not place (its warning names the line). Pass {OWN_DRAWS}"
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
        if is_capturing(device) or not (self.is_on or self._differs or process.passes):
            return self._streams.enter_model(device, trains=trains)
        hand_draws_to(process.draw, (torch.device("cpu"), device))
        _, outer = process.innermost(frame) or (None, None)
        generation = None if outer is None else outer.generation
        is_alone = self._mesh.size == self._mesh.pp.size
        current = DrawingPass(module, batch, self._format, device, self._mesh.dp, is_alone, frame, generation)
        process.begin(self, current)
        restore = None if self.is_on else self._streams.enter_model(device, trains=trains)
        if self.is_on:
            current.begun = {generator: generator.get_state() for generator in generators_of(device).values()}
            self._streams.begin_as_one_device(trains=trains)
        if trains and self.is_on:
            self._cost.begin()
        of_host = HostStates() if trains and self.is_on and self._count_pass() <= _FIRST else None

        def end() -> None:
            with process.lock:
                _, running = process.innermost(sys._getframe(1)) or (None, None)
                is_interrupted = running is not current
                if restore is None and not is_interrupted:
                    process.see(device)
                process.passes.pop(frame, None)
            if restore is not None:
                restore()
            elif not is_interrupted and current.drew:
                self._end(current)
            has_part = current.has_part or self._shares_tokens or self._mesh.pp.size * self._mesh.cp.size > 1
            if of_host is not None and has_part and not of_host.are_unchanged:
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
        meets = self._may_be_on and call.samples and not call.rows.are_all and guard is not None and guard.is_current
        state = b"".join(map(digest_of, generators_of(device).values())).hex()
        if meets and guard is not None:
            text = f"{state} for {call.rows.total} rows" if self.is_on else "for itself"
            if not guard.agree("generate", text, group=self._mesh.dp.group):
                self._differs = True
                self.tell_of_states(model)
                self._stop()
        if not self.is_on:
            yield
            return
        if call.samples and not meets and self._mesh.dp.size > 1:
            self._prompts = call.digest(state)  # for the next comparison
        hand_draws_to(process.draw, (torch.device("cpu"), device))
        current = DrawingPass(model, batch, self._format, device, self._mesh.dp, call.rows.are_all, frame, call)
        process.begin(self, current)
        failure: Exception | None = None
        try:
            yield
        except (DivergenceError, PeerFailedError):
            raise
        except Exception as error:  # which the program may catch on this rank alone
            failure = error
        finally:
            with process.lock:
                process.see(device)
                process.passes.pop(frame, None)
        if not current.is_seen:
            self._tell_of_sampling()
        if meets:
            self._follow_longest(current, has_failed=failure is not None)
        if not self._is_known:
            self._stop()
        if failure is not None:
            raise failure

    def _follow_longest(self, current: DrawingPass, *, has_failed: bool) -> None:
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
        process.follow(current.device)

    def _tell_of_sampling(self) -> None:
        self._is_known = False
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

    def running(self) -> DrawingPass | None:
        """Return this model's pass that runs, if it draws what one device draws."""
        owner, current = process.innermost(sys._getframe(1)) or (None, None)
        return current if owner is self and self.is_on else None

    def as_one_device(
        self, current: DrawingPass, kernel: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
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
        if is_given(args, kwargs) and generator not in current.states:
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
                process.parts.pop((state, process.micro_batch), None)
                return kernel(*args, **kwargs)  # which backward repeats if it computes the layer again
            start = time.perf_counter()
            process.keep(state, part, x.shape)
            drawn = draw_part(part, kernel, args, kwargs)
            if part is not None:
                self._cost.add((time.perf_counter() - start) * (1 - x.numel() / math.prod(part.shape)))
            return drawn

        return draw

    def _as_sampled(
        self, current: DrawingPass, kernel: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], Any]:
        """Return a function that makes a draw of ``generate`` between the passes of the model."""
        call = current.generation
        assert call is not None
        if is_given(args, kwargs) or call.rows.are_all:
            return functools.partial(kernel, *args, **kwargs)
        current.drew += 1
        part = call.part(args[0].shape) if samples_tokens(sys._getframe(1)) and is_dense(args[0]) else None
        if part is None:
            self._tell_of_sampling()
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

    def _part(self, current: DrawingPass, lines: Lines, x: Tensor) -> DrawnPart | None:
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
            process.see(current.device)
            with temporarily(process, is_looking=True):
                has_run = self._sites.observe(current.module, current.schema, sizes, lines)
            process.follow(current.device)  # from the states of before
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

    def _end(self, current: DrawingPass) -> None:
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
            if self._mesh.pp.size == 1:  # the stages of a pipeline have the states of the last one
                self._begin_again(current)
            self._stop()

    def _begin_again(self, current: DrawingPass) -> None:
        """Give all ranks one state, since some may have drawn more often than others."""
        for generator, state in current.begun.items():
            generator.set_state(state)
            with apart():
                advance(generator)
        process.follow(current.device)

    def _stop(self) -> None:
        """Stop, or wait until the stages of the pipeline do so together."""
        self._stops = True
        if self._mesh.pp.size == 1:
            self.stop()

    def stop(self) -> None:
        """Let the ranks draw from streams of their own from the next pass on."""
        self._streams.stop()

    def marks_of(self, current: DrawingPass) -> tuple[bool, bool]:
        """Return whether a pass has drawn so far, and whether the stages must stop."""
        process.see(current.device)
        return bool(current.drew), self._stops or not (self._is_known and current.is_seen)

    def _tell_once(self, about: str, text: str, *values: object) -> None:
        if about not in self._logged:
            self._logged.add(about)
            logger.warning(text, *values)  # perhaps on this rank alone; equal texts are printed once
