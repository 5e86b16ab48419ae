"""What the measured times say: medians, and ratios that are paired within a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.contenders import ONE_PROCESS


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """The quotients of two contenders' times, one a round, summarised."""

    median: float
    low: float
    high: float

    @classmethod
    def paired(cls, numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
        """The ratio of step times that were taken in the same rounds."""
        quotients = [a / b for a, b in zip(numerators, denominators, strict=True)]
        return cls(median=median(quotients), low=min(quotients), high=max(quotients))

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}-{self.high:.3f})"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One contest in figures.

    Attributes:
        median_seconds: contender -> seconds a step.
        ratio: base -> contender -> base / contender. The bases are this project's contenders, or the one
            process when none of them ran.
        efficiency: contender -> one process / (processes x contender); empty without the one process.
    """

    median_seconds: dict[str, float]
    ratio: dict[str, dict[str, Ratio]]
    efficiency: dict[str, Ratio]


def summarise(seconds: dict[str, list[float]], *, processes: int) -> Summary:
    """Summarise step times in seconds, contender -> one a round; ``processes`` is how many each uses."""
    bases = [name for name in seconds if name.startswith("ours")] or [ONE_PROCESS]
    one = seconds.get(ONE_PROCESS, [])
    return Summary(
        median_seconds={name: median(times) for name, times in seconds.items()},
        ratio={
            base: {name: Ratio.paired(seconds[base], seconds[name]) for name in seconds if name != base}
            for base in bases
            if base in seconds
        },
        efficiency={
            name: Ratio.paired(one, [processes * time for time in times])
            for name, times in seconds.items()
            if one and name != ONE_PROCESS
        },
    )
