"""The line of an interval: its text, and how it gets to standard error beside the bars of other libraries."""

from __future__ import annotations

import sys

from meshwright.monitor.figures import Figures
from meshwright.planner.formatting import memory, seconds
from meshwright.printable import printable_lines


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
