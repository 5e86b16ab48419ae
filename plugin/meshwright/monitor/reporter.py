"""Rank 0's thread that puts lines together from numbers that the device sends later, so that training waits for
nothing.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.faults.guard import Guard
from meshwright.monitor.figures import Figures, RankFigures, StepFigures


class HostValues:
    """Starts to copy scalars to the host; on CPU they are there at once.

    Args:
        scalars: name -> a scalar tensor, a number, or None if it is unknown.
    """

    def __init__(self, scalars: Mapping[str, Tensor | float | None]) -> None:
        on_device = {name: x.detach() for name, x in scalars.items() if isinstance(x, Tensor) and x.is_cuda}
        # Copied now, since the program may change a learning rate that is a tensor.
        self._known = {name: None if x is None else float(x) for name, x in scalars.items() if name not in on_device}
        self._names = list(on_device)
        self._event: torch.Event | None = None
        if on_device:
            flat = torch.stack([value.reshape(()).double() for value in on_device.values()])
            self._host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            self._host.copy_(flat, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def is_ready(self) -> bool:
        """Whether the numbers have arrived."""
        return self._event is None or bool(self._event.query())

    def numbers(self) -> dict[str, float | None]:
        """Return the numbers; they are valid only after ``is_ready``."""
        if not self._names:
            return self._known
        return {**self._known, **dict(zip(self._names, self._host.tolist(), strict=True))}


logger = logging.getLogger(__name__)

PATIENCE = 30.0  # seconds until a line is shown without the ranks whose figures have not come
_LOOK = 0.005  # seconds between two looks at numbers that the device has not sent yet
_CLOSING = 2.0  # seconds that the end of the program waits for the last line


@dataclass(eq=False)
class PendingRecord:
    """A line whose figures are on their way.

    Args:
        step: the last step of the line.
        count: the number of steps since the start of the program.
        topic: the topic under which the ranks post their figures.
        own: rank 0's figures.
        values: the loss, the norm and the learning rate.
        per_step: mean seconds of a step since the first one.
        max_steps: number of steps of the run, if known.
    """

    step: int
    count: int
    topic: str
    own: RankFigures
    values: HostValues
    per_step: float | None
    max_steps: int | None
    figures: Figures | None = None
    done: threading.Event = field(default_factory=threading.Event)


Show = Callable[[PendingRecord, Figures], None]


class Reporter:
    """Waits for the figures of all ranks in a thread of its own, and shows them.

    It keeps no reference to the model, except for lines that are on their way.

    Args:
        guard: the guard, over which the ranks send their figures; None on one process.
        together: :func:`~meshwright.monitor.figures.together`, given what is the same for all lines.
    """

    def __init__(self, guard: Guard | None, together: Callable[..., Figures]) -> None:
        self._guard, self._together = guard, together
        self._queue: queue.SimpleQueue[tuple[PendingRecord, Show] | None] = queue.SimpleQueue()
        self._process = os.getpid()
        self._thread: threading.Thread | None = None

    def put(self, pending: PendingRecord, show: Show) -> None:
        """Call ``show`` with a line as soon as its figures are there, in the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="meshwright-reporter", daemon=True)
            self._thread.start()
            atexit.register(self.close)
        self._queue.put((pending, show))

    def close(self) -> None:
        """Wait briefly for the lines whose figures have not all arrived."""
        if self._thread is not None and os.getpid() == self._process:
            self._queue.put(None)
            self._thread.join(timeout=_CLOSING)
            self._thread = None
            atexit.unregister(self.close)

    def stop(self) -> None:
        """Tell the thread to end after the lines that it has been given, without waiting for it."""
        atexit.unregister(self.close)
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            pending, show = item
            try:
                pending.figures = self._figures(pending)
                show(pending, pending.figures)
            except Exception as error:  # an error in showing a run must not end the run
                logger.warning("the line of step %d is missing: %s: %s", pending.step, type(error).__name__, error)
            finally:
                pending.done.set()
                del item, pending, show

    def _figures(self, pending: PendingRecord) -> Figures:
        messages = {}
        if self._guard is not None and self._guard.is_current:
            messages = self._guard.take_posted(pending.topic, patience=PATIENCE)
        ranks = {rank: RankFigures(**message) for rank, message in messages.items()}
        ranks[0] = pending.own
        until = time.monotonic() + PATIENCE
        while not pending.values.is_ready and time.monotonic() < until:
            time.sleep(_LOOK)
        last = StepFigures(step=pending.step, **pending.values.numbers())
        return self._together(last, ranks, max_steps=pending.max_steps)
