"""Prints the tables of a benchmark, with the goals of the project."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.contenders import (
    AUTOTP,
    DEEPSPEED_ZERO,
    ONE_PROCESS,
    OURS_DP,
    OURS_TP,
    OURS_WRAPPED,
    OURS_ZERO,
    STOCK_TP,
    TORCH_DDP,
    Entry,
)
from benchmarks.rounds import Comparison, Round, Standing
from benchmarks.summary import FEWEST, Ratio

NARROWEST = 140  # minimum width in columns, since a pipe has no width

# (base, contender) -> the project's goal for the upper end of the interval of base / contender, in wall time.
TIME_GOALS = {
    (OURS_TP, STOCK_TP): 0.60,
    (OURS_TP, AUTOTP): 0.78,
    (OURS_TP, ONE_PROCESS): 0.50,
    (OURS_DP, TORCH_DDP): 1.00,
    (OURS_ZERO, DEEPSPEED_ZERO): 0.85,
    (OURS_WRAPPED, TORCH_DDP): 1.02,
}
CLIP_GOAL = 0.01  # share of a step, for the upper end of the interval


def print_time(contest: str, rounds: Sequence[Round], entries: Sequence[Entry], absent: Sequence[str]) -> None:
    """Print the steps of each contender, and the ratios of ours to the others, as Markdown for the docs."""
    caption = (
        "medians of seconds per step; CPU time is that of all ranks; absolute seconds mean little\n"
        f"clip: share of a step, median (95 % interval); goal for the upper end of ours: <= {CLIP_GOAL:.0%}"
    )
    columns = ["wall", "user CPU", "kernel CPU", "waited for a core", "clip / wall", "clip / CPU"]
    table = _table(f"{contest}: step", caption, columns)
    for entry in entries:
        standing = Standing.within(rounds, entry.name)
        if standing is not None:
            without_call = "in the update" if entry.clips else "cannot clip"
            table.add_row(
                entry.name,
                *(f"{value:.3f}" for value in (standing.wall, standing.user, standing.kernel)),
                "unknown" if standing.waited is None else f"{standing.waited:.3f}",
                without_call if standing.clip is None else _percent(standing.clip),
                "" if standing.clip_cpu is None else _percent(standing.clip_cpu),
            )
    _show(table, absent)

    comparisons = compared(rounds, [entry.name for entry in entries])
    if not comparisons:
        return
    loads = [one.load_average for one in rounds]
    caption = (
        "ratios are paired within a round: median (95 % interval of the median); goals are for the upper end\n"
        f"load average {min(loads):.1f} to {max(loads):.1f} on {os.cpu_count()} cores"
    )
    table = _table(f"{contest}: ratios", caption, ["rounds", "of wall time", "goal", "of CPU time", "clips"])
    clips = {entry.name: entry.clips for entry in entries}
    who = "ours" if comparisons[0].base != ONE_PROCESS else ONE_PROCESS
    for found in comparisons:
        goal = TIME_GOALS.get((found.base, found.other))
        reached = "" if goal is None else f"<= {goal:.2f}, {'met' if found.wall.high <= goal else 'missed'}"
        names = f"{found.base} / {found.other}"
        table.add_row(
            names,
            str(found.rounds) + ("" if found.rounds >= FEWEST else " (min-max)"),
            str(found.wall),
            reached,
            str(found.cpu),
            "both" if clips[found.base] and clips[found.other] else f"{who} only",
        )
    _show(table, [])


def compared(rounds: Sequence[Round], names: Sequence[str]) -> list[Comparison]:
    """Compare each of ours with each other contender, or every contender with one process if none is ours."""
    ours = [name for name in names if name.startswith("ours")]
    pairs = [(base, other) for base in ours for other in names if other not in ours]
    if not ours:
        pairs = [(ONE_PROCESS, other) for other in names if other != ONE_PROCESS]
    found = [Comparison.within(rounds, base, other) for base, other in pairs]
    return [comparison for comparison in found if comparison is not None]


def _table(title: str, caption: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, caption=caption, box=box.MARKDOWN)
    table.add_column("contender", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _show(table: Table, absent: Sequence[str]) -> None:
    for name in absent:
        table.add_row(name, "not installed")
    console = Console()
    console.width = max(console.width, NARROWEST)
    console.print(table)


def _percent(share: Ratio) -> str:
    return f"{share.median:.2%} ({share.low:.2%}-{share.high:.2%})"
