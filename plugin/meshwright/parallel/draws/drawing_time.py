"""The time that a rank draws for other ranks, of which a line tells where it is much of a step."""

from __future__ import annotations

import logging
import time

from meshwright.progress import is_first_rank

logger = logging.getLogger(__name__)

OWN_DRAWS = "ToDistributedConfig(draws='rank')"  # what to write instead
_TIMED, _SHARE = 5, 0.02  # the first steps, and the part of their time of which a line tells


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
