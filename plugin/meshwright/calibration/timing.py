"""Time many small pieces of work in turn, on all processes at once, until the time is used up."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from meshwright.faults.together import texts_of_all
from meshwright.planner.machine.hardware import Measurement

Run = Callable[[], object]

SAMPLE = 0.01  # shortest sample in seconds; shorter samples measure the clock and the scheduler
_CROWDED_SAMPLE = 0.2  # the same, if processes wait for cores: many times the few milliseconds that one keeps a core
_SHORTEST = 5e-5  # seconds of the shortest run of which a sample is full; shorter runs repeat no more often
_ROUNDS = 3  # least number of rounds, even if the time is up


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One piece of work to measure.

    Args:
        kind: name of the work.
        make: function that allocates the tensors and returns the work. It is called for each sample, so the memory is
            held for one sample only.
        sizes: name -> size.
    """

    kind: str
    make: Callable[[], Run]
    sizes: Mapping[str, int] = field(default_factory=dict)


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished its queued work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def seconds_of(run: Run, device: torch.device, repeats: int = 1) -> float:
    """Return the mean seconds of one run over ``repeats`` runs."""
    synchronise(device)
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    synchronise(device)
    return (time.perf_counter() - start) / repeats


def sample_seconds(probes: int, *, seconds: float, is_crowded: bool) -> float:
    """Return the shortest sample that measures what a process gets of the machine.

    If processes wait for cores, a sample that fits into the time for which one of them keeps a core would show the rate
    of a core that it has alone. A longer one shows its share.

    Args:
        probes: number of probes, each of which is sampled at least three times.
        seconds: time to spend.
        is_crowded: whether the processes have more threads than there are cores.

    Example:
        >>> sample_seconds(50, seconds=65, is_crowded=True), sample_seconds(50, seconds=65, is_crowded=False)
        (0.2, 0.01)
    """
    if not is_crowded:
        return SAMPLE
    # Half of the time is left for allocating, for the run before each sample and for waiting.
    return max(SAMPLE, min(_CROWDED_SAMPLE, seconds / (2 * _ROUNDS * max(1, probes))))


def measure(
    probes: Sequence[Probe],
    device: torch.device,
    *,
    seconds: float,
    sample: float = SAMPLE,
    tick: Callable[[str], None] = lambda _: None,
) -> list[Measurement]:
    """Time every probe on all processes at once and return the medians, the same on every process.

    The probes take turns, round after round, so that a busy period of the machine affects all probes a little instead
    of one probe fully.

    Args:
        probes: the probes, the same on every process.
        device: the device that they run on.
        seconds: time to spend; at least three rounds are run.
        sample: seconds that a sample lasts at least; a shorter run is repeated.
        tick: function that is called before each sample with the kind of its probe.
    """
    start, rounds = time.perf_counter(), 0
    samples: list[list[float]] = [[] for _ in probes]
    repeats = [0] * len(probes)
    while _agreed(float(rounds < _ROUNDS or _is_time_left(start, seconds, rounds))) > 0:
        for index, probe in enumerate(probes):
            tick(probe.kind)
            run = probe.make()
            run()
            if not repeats[index]:
                once = _agreed(seconds_of(run, device))
                repeats[index] = max(1, int(sample / max(once, _SHORTEST)))
            _agreed(0.0)  # all processes begin at the same time
            samples[index].append(seconds_of(run, device, repeats[index]))
            del run
        rounds += 1
    return [_measurement(probe, pooled) for probe, pooled in zip(probes, _pooled(samples), strict=True)]


def _measurement(probe: Probe, samples: Sequence[float]) -> Measurement:
    low, middle, high = statistics.quantiles(samples, n=4)
    return Measurement(
        kind=probe.kind, sizes=probe.sizes, seconds=middle, fastest=min(samples), spread=(high - low) / 2 / middle
    )


def _is_time_left(start: float, seconds: float, rounds: int) -> bool:
    used = time.perf_counter() - start
    return used + used / rounds <= seconds


def _agreed(value: float) -> float:
    """Return the largest value of all processes, so that all processes run the same number of rounds."""
    if not dist.is_initialized():
        return value
    largest = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def _pooled(samples: list[list[float]]) -> list[list[float]]:
    if not dist.is_initialized():
        return samples
    gathered: list[list[list[float]]] = [json.loads(text) for text in texts_of_all(json.dumps(samples))]
    return [list(itertools.chain(*columns)) for columns in zip(*gathered, strict=True)]
