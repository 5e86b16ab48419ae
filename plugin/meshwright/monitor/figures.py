"""The figures of one interval of training, of ranks and of experts, and the line that shows them."""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

import torch
from torch import Tensor, nn

from meshwright.parallel.experts.load_balancing import ExpertCounts
from meshwright.printable import printable_lines
from meshwright_plan.formatting import memory, seconds


class ExpertLoad:
    """This rank's counts of the tokens of each expert, for the lines of a run.

    Args:
        model: the model that the program has, whose names of modules are shown.
        counts: what counts the tokens.
        device: the device of this rank.
    """

    def __init__(self, model: nn.Module, counts: ExpertCounts, device: torch.device):
        self._counts, self._before = counts, torch.zeros((), dtype=torch.int64, device=device)
        self._sent: tuple[Tensor, torch.Event] | None = None
        if not counts.is_on:
            counts.begin(device)
        names = {module: name for name, module in model.named_modules()}
        self._names = {module: names.get(module, "") for module in counts.sizes}

    def take(self) -> dict[str, list[int]]:
        """Return the tokens of each expert by the name of its module, since the last call.

        On CUDA they are those of the call before, which have reached the host by now, so that it does not wait.
        """
        own = self._counts.own()
        new, self._before = own - self._before, own
        if new.is_cuda:
            sent, host = self._sent, torch.empty(new.shape, dtype=new.dtype, pin_memory=True)
            host.copy_(new, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._sent = (host, event)
            if sent is None or not sent[1].query():
                return {}
            new = sent[0]
        return {self._names[experts]: part.tolist() for experts, part in self._counts.by_module(new).items()}


def fullest_loads(of_ranks: Sequence[Mapping[str, Sequence[int]]], ep: int) -> tuple[dict[str, float], float | None]:
    """Return the load of each layer's fullest expert, and the load of the fullest of the ranks that share experts.

    A load is a number of tokens relative to the mean.

    Args:
        of_ranks: for each rank, what :meth:`ExpertLoad.take` has returned.
        ep: the number of ranks that share the experts of a layer.

    Example:
        >>> fullest_loads([{"layers.0": [3, 1, 0, 0]}, {"layers.0": [1, 1, 1, 1]}], 2)
        ({'layers.0': 2.0}, 1.5)
    """
    sums: dict[str, list[int]] = {}
    for of_rank in of_ranks:
        for name, counts in of_rank.items():
            sums[name] = [sum(pair) for pair in itertools.zip_longest(sums.get(name, ()), counts, fillvalue=0)]
    routed = {name: counts for name, counts in sums.items() if any(counts)}
    experts = {name: max(counts) * len(counts) / sum(counts) for name, counts in routed.items()}
    if ep == 1 or not routed:
        return experts, None
    ranks = [0] * ep
    for counts in routed.values():
        each = ceil(len(counts) / ep)
        for rank in range(ep):
            ranks[rank] += sum(counts[rank * each : (rank + 1) * each])
    return experts, max(ranks) * ep / sum(ranks)


PARTS = ("forward", "backward", "optimizer", "between")  # the parts of a step, in order


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """The measurements of one rank between two lines.

    Args:
        seconds: the host's seconds between the two lines.
        steps: number of optimizer steps.
        tokens: tokens of this rank's rows.
        flops: floating-point operations of forward and backward for these tokens, over all ranks that share them.
        waited: seconds in which the host waited for other ranks, at meetings and in collectives.
        peak: the largest memory of this rank so far, in bytes.
        read: seconds in which the program waited for its data.
        parts: part of a step -> seconds per step.
        experts: module of experts -> the tokens of each expert that this rank has routed.
    """

    seconds: float
    steps: int
    tokens: int
    flops: float
    waited: float
    peak: float
    read: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    experts: Mapping[str, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of one interval over all ranks.

    Args:
        step: the last step of the interval.
        loss: the loss of that step; None if the model returns none.
        norm: the gradient norm before clipping; None if the program does not clip.
        lr: the learning rate of the optimizer's first group.
        tokens: tokens of the interval, each counted once.
        seconds_per_step: seconds per optimizer step.
        tokens_per_second: tokens per second over all ranks.
        ranks: number of ranks.
        mfu: model FLOPs per second divided by the devices' peak; None if the peak or the model's sizes are unknown.
        peak: rank -> the largest memory so far, in bytes.
        slowest: the rank for which the others wait.
        behind: seconds per step by which that rank is later than the median of the others.
        parts: part of a step -> seconds per step, the mean over the ranks.
        waited: seconds per step in which a rank waits for others, the mean over the ranks.
        busy: rank -> seconds per step in which it did not wait for other ranks.
        read: rank -> seconds per step in which it waited for its data.
        left: seconds until ``max_steps``; None if that is not set.
        expert_load: module of experts -> the tokens of its fullest expert, relative to the mean.
        rank_load: the tokens of the fullest of the ranks that share experts, relative to the mean; None without ep.
    """

    step: int
    loss: float | None
    norm: float | None
    lr: float | None
    tokens: int
    seconds_per_step: float
    tokens_per_second: float
    ranks: int
    mfu: float | None
    peak: Mapping[int, float]
    slowest: int | None
    behind: float
    parts: Mapping[str, float]
    waited: float
    busy: Mapping[int, float] = field(default_factory=dict)
    read: Mapping[int, float] = field(default_factory=dict)
    left: float | None = None
    expert_load: Mapping[str, float] = field(default_factory=dict)
    rank_load: float | None = None

    @property
    def fullest(self) -> int:
        """The rank with the largest memory."""
        return max(self.peak, key=lambda rank: self.peak[rank])

    def as_logs(self) -> dict[str, float]:
        """Return the figures for a tracker, as numbers under stable names; see docs/monitoring.md."""
        found: dict[str, float | None] = {
            "seconds_per_step": self.seconds_per_step,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_per_device": self.tokens_per_second / self.ranks,
            "mfu": self.mfu,
            "peak_memory_gib": self.peak[self.fullest] / 2**30,
            "peak_memory_rank": self.fullest,
            "slowest_rank": self.slowest,
            "slowest_rank_behind_ms": None if self.slowest is None else 1e3 * self.behind,
            "data_wait_ms": 1e3 * max(self.read.values(), default=0.0) or None,
            "expert_load": max(self.expert_load.values(), default=None),
            "expert_rank_load": self.rank_load,
        }
        return {name: round(value, 4) for name, value in found.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """The values of the last step of an interval, as rank 0 knows them."""

    step: int
    loss: float | None = None
    norm: float | None = None
    lr: float | None = None


def together(
    step: StepFigures,
    ranks: Mapping[int, RankFigures],
    *,
    row_copies: int,
    peak_flops: float | None,
    ep: int = 1,
    max_steps: int | None = None,
) -> Figures:
    """Return the figures of an interval from those of each rank.

    Args:
        step: the interval's last step.
        ranks: rank -> its figures; at least those of one rank.
        row_copies: number of ranks that have the same rows, whose tokens count once.
        peak_flops: the peak of one device in floating-point operations per second; None if unknown.
        ep: the number of ranks that share the experts of a layer.
        max_steps: number of steps of the run, if known.

    Example:
        >>> own = RankFigures(seconds=2.0, steps=4, tokens=800, flops=1e9, waited=0.0, peak=5.0)
        >>> both = together(StepFigures(step=4), {0: own, 1: own}, row_copies=2, peak_flops=5e8)
        >>> both.tokens_per_second, both.mfu
        (400.0, 0.5)
    """
    of_all = list(ranks.values())
    seconds = max(1e-9, *(of_rank.seconds for of_rank in of_all))
    steps = max(1, *(of_rank.steps for of_rank in of_all))
    tokens = sum(of_rank.tokens for of_rank in of_all) / row_copies
    flops = sum(of_rank.flops for of_rank in of_all) / row_copies
    slowest, behind = _straggler(ranks, steps)
    per_step = seconds / steps
    expert_load, rank_load = fullest_loads([of_rank.experts for of_rank in of_all], ep)
    return Figures(
        step=step.step,
        loss=step.loss,
        norm=step.norm,
        lr=step.lr,
        tokens=round(tokens),
        seconds_per_step=per_step,
        tokens_per_second=tokens / seconds,
        ranks=len(ranks),
        mfu=flops / seconds / (peak_flops * len(ranks)) if peak_flops and flops else None,
        peak={rank: of_rank.peak for rank, of_rank in sorted(ranks.items())},
        slowest=slowest,
        behind=behind,
        parts={name: statistics.fmean(of_rank.parts.get(name, 0.0) for of_rank in of_all) for name in PARTS},
        waited=statistics.fmean(of_rank.waited for of_rank in of_all) / steps,
        busy={rank: max(0.0, of_rank.seconds - of_rank.waited) / steps for rank, of_rank in sorted(ranks.items())},
        read={rank: of_rank.read / steps for rank, of_rank in sorted(ranks.items())},
        left=None if max_steps is None else max(0, max_steps - step.step) * per_step,
        expert_load=expert_load,
        rank_load=rank_load,
    )


def _straggler(ranks: Mapping[int, RankFigures], steps: int) -> tuple[int | None, float]:
    """Return the rank that waits the least, and the seconds per step that the median of the others waits longer."""
    if len(ranks) < 2:
        return None, 0.0
    slowest = min(ranks, key=lambda rank: ranks[rank].waited)
    others = [of_rank.waited for rank, of_rank in ranks.items() if rank != slowest]
    return slowest, (statistics.median(others) - ranks[slowest].waited) / steps


def line(figures: Figures, *, max_steps: int | None = None) -> str:
    """Return one line of text, without the unknown figures.

    Example:
        >>> print(line(Figures(step=20, loss=2.5, norm=0.75, lr=3e-4, tokens=40960, seconds_per_step=0.5,
        ...                    tokens_per_second=8192.0, ranks=2, mfu=0.41, peak={0: 2.0**30, 1: 2.0**31}, slowest=1,
        ...                    behind=0.012, parts={}, waited=0.0, left=490.0), max_steps=1000))
        step 20/1000  loss 2.5000  norm 0.750  lr 3.0e-04  8,192 tokens/s  4,096 per device  MFU 41.0%  \
peak 2.0 GiB (rank 1)  slowest rank 1 (+12 ms)  left 0:08:10
    """
    found = figures
    is_within = max_steps is not None and found.step <= max_steps  # a program may run for longer
    words = [f"step {found.step}" + (f"/{max_steps}" if is_within else "")]
    if found.loss is not None:
        words.append(f"loss {found.loss:.4f}")
    if found.norm is not None:
        words.append(f"norm {found.norm:.3f}")
    if found.lr is not None:
        words.append(f"lr {found.lr:.1e}")
    if found.tokens:
        rate = found.tokens_per_second
        words += [f"{rate:,.0f} tokens/s", f"{rate / found.ranks:,.0f} per device"]
    else:
        words.append(f"{seconds(found.seconds_per_step)} per step")
    if found.mfu is not None:
        words.append(f"MFU {found.mfu:.1%}")
    words.append(f"peak {memory(found.peak[found.fullest])} (rank {found.fullest})")
    if found.slowest is not None:
        words.append(f"slowest rank {found.slowest} (+{seconds(found.behind)})")
    if found.expert_load:
        words.append(f"fullest expert {max(found.expert_load.values()):.1f}x the mean")
    if found.left is not None and is_within:
        words.append(f"left {clock(found.left)}")
    return "  ".join(words)


def clock(value: float) -> str:
    """Return a duration as hours, minutes and seconds, with days before them.

    Example:
        >>> clock(490), clock(100_000)
        ('0:08:10', '1d 3:46:40')
    """
    days, rest = divmod(round(value), 86400)
    text = f"{rest // 3600}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}d {text}" if days else text


def say(text: str) -> None:
    """Print lines to standard error; an open bar of tqdm is cleared before, and drawn again below them."""
    text = printable_lines(text)
    bar = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if bar is not None and getattr(bar, "_instances", None):
        bar.write(text, file=sys.stderr)
        sys.stderr.flush()
    else:
        print(text, file=sys.stderr, flush=True)
