"""The measurements of one round of a contest, and the figures of all rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from benchmarks.summary import Ratio


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One training step on one rank.

    Args:
        began, ended: seconds of a clock that all processes of the machine share.
        user, kernel: CPU seconds of the process, outside and inside the kernel, which sends and receives.
        waited: seconds for which the main thread could run and had no core; None where the system does not count it.
        clip: seconds of the call that clips; None if this contender has no such call.
        clip_cpu: CPU seconds of the same call.
        loss: this rank's loss before the update.
        norm: the norm of the gradients, if the call returns it.
    """

    began: float
    ended: float
    user: float
    kernel: float
    waited: float | None
    clip: float | None
    clip_cpu: float
    loss: float
    norm: float | None


@dataclass(frozen=True, kw_only=True)
class Step:
    """One training step of a contender on all of its ranks.

    Args:
        wall: seconds from the start of the first rank to the end of the last.
        user, kernel: CPU seconds of all ranks.
        waited: seconds for which the ranks could run and had no core, summed over the ranks; None if unknown.
        clip: seconds of the call that clips; None if there is none. The shortest of the ranks, since the last rank
            to call does not wait for the others, and the others would wait in the next collective anyway.
        clip_cpu: CPU seconds of that call on all ranks.
    """

    wall: float
    user: float
    kernel: float
    waited: float | None
    clip: float | None
    clip_cpu: float

    @classmethod
    def of_ranks(cls, turns: Sequence[Turn]) -> Step:
        clips = [turn.clip for turn in turns if turn.clip is not None]
        waits = [turn.waited for turn in turns if turn.waited is not None]
        return cls(
            wall=max(turn.ended for turn in turns) - min(turn.began for turn in turns),
            user=sum(turn.user for turn in turns),
            kernel=sum(turn.kernel for turn in turns),
            waited=sum(waits) if len(waits) == len(turns) else None,
            clip=min(clips) if len(clips) == len(turns) else None,
            clip_cpu=sum(turn.clip_cpu for turn in turns),
        )

    @property
    def cpu(self) -> float:
        """CPU seconds of all ranks."""
        return self.user + self.kernel


@dataclass(kw_only=True)
class Round:
    """One step of each contender.

    Args:
        order: the contenders in the order of their steps.
        load_average: the machine's load average over the last minute, when the round began.
        steps: contender -> its step. An interrupted round lacks some.
    """

    order: list[str]
    load_average: float
    steps: dict[str, Step] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The ratio of two contenders' steps, paired within a round.

    Args:
        base: the contender whose step is divided.
        other: the contender by whose step it is divided.
        rounds: the number of rounds in which both took a step.
        wall: the ratio of the wall times.
        cpu: the ratio of the CPU times, which other load changes less.
    """

    base: str
    other: str
    rounds: int
    wall: Ratio
    cpu: Ratio

    @classmethod
    def within(cls, rounds: Sequence[Round], base: str, other: str) -> Comparison | None:
        """Return the comparison of two contenders; None if they never took a step in the same round."""
        pairs = [(one.steps[base], one.steps[other]) for one in rounds if {base, other} <= one.steps.keys()]
        if not pairs:
            return None
        return cls(
            base=base,
            other=other,
            rounds=len(pairs),
            wall=Ratio.of([a.wall / b.wall for a, b in pairs]),
            cpu=Ratio.of([a.cpu / b.cpu for a, b in pairs]),
        )


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The figures of one contender.

    Args:
        wall, user, kernel, waited: medians of the fields of ``Step``.
        clip: the share of a step's wall time spent in the call that clips; None if there is no such call.
        clip_cpu: the share of a step's CPU time, likewise.
    """

    wall: float
    user: float
    kernel: float
    waited: float | None
    clip: Ratio | None
    clip_cpu: Ratio | None

    @classmethod
    def within(cls, rounds: Sequence[Round], name: str) -> Standing | None:
        """Return the figures of a contender; None if it took no step."""
        steps = [one.steps[name] for one in rounds if name in one.steps]
        if not steps:
            return None
        waits = [step.waited for step in steps if step.waited is not None]
        clips = [(step.clip / step.wall, step.clip_cpu / step.cpu) for step in steps if step.clip is not None]
        return cls(
            wall=median(step.wall for step in steps),
            user=median(step.user for step in steps),
            kernel=median(step.kernel for step in steps),
            waited=median(waits) if waits else None,
            clip=Ratio.of([wall for wall, _ in clips]) if clips else None,
            clip_cpu=Ratio.of([cpu for _, cpu in clips]) if clips else None,
        )
