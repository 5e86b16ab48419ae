"""Prints the tables of a benchmark, with the goals of the project."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.contenders import AUTOTP, ONE_PROCESS, OURS_TP, OURS_WRAPPED, STOCK_TP, TORCH_DDP
from benchmarks.summary import Ratio, Summary
from benchmarks.traffic import PHASES, Traffic

MIB = 2**20
NARROWEST = 120  # minimum width in columns, since a pipe has no width

# (base, contender) -> the project's goal for the median of base / contender.
TIME_GOALS = {(OURS_TP, STOCK_TP): 0.62, (OURS_TP, AUTOTP): 0.80, (OURS_WRAPPED, TORCH_DDP): 1.02}
EFFICIENCY_GOALS = {OURS_TP: 0.95}
MEMORY_GOALS = {OURS_TP: 0.55}


def print_time(contest: str, summary: Summary, absent: Sequence[str]) -> None:
    """Print step times: one row per contender, one ratio column for each of ours."""
    caption = "median (min-max) over the rounds; ratios are paired within a round; absolute seconds mean little"
    ratios = [f"{base} / it" for base in summary.ratio]
    columns = ["median s/step", *ratios, "efficiency: one process / (2 x it)"]
    table = _table(f"{contest}: step time", caption, columns)
    for name, seconds in summary.median_seconds.items():
        ratios = [
            _with_goal(of_base.get(name), "<=", TIME_GOALS.get((base, name))) for base, of_base in summary.ratio.items()
        ]
        efficiency = _with_goal(summary.efficiency.get(name), ">=", EFFICIENCY_GOALS.get(name))
        table.add_row(name, f"{seconds:.3f}", *ratios, efficiency)
    _show(table, absent)


def print_memory(contest: str, saved_bytes: dict[str, int], absent: Sequence[str]) -> None:
    """Print saved activations: the bytes that one rank's forward pass keeps for its backward pass."""
    caption = "storages that autograd saves, each counted once, without parameters; rank 0"
    table = _table(f"{contest}: saved activations", caption, ["MiB per rank", f"it / {ONE_PROCESS}"])
    whole = saved_bytes.get(ONE_PROCESS)
    for name, size in saved_bytes.items():
        share = "" if whole is None else f"{size / whole:.3f}{_goal('<=', MEMORY_GOALS.get(name))}"
        table.add_row(name, f"{size / MIB:.1f}", share)
    _show(table, absent)


def print_collectives(contest: str, per_layer: dict[str, dict[str, Traffic]], absent: Sequence[str]) -> None:
    """Print the collectives that one decoder layer adds to a step, by phase."""
    caption = "difference of two model depths, per layer; MiB of the whole (gathered) tensors; rank 0"
    table = _table(f"{contest}: collectives per decoder layer", caption, [*PHASES, "MiB"])
    for name, phases in per_layer.items():
        size = sum(traffic.bytes for traffic in phases.values())
        table.add_row(name, *(str(phases[phase]) for phase in PHASES), f"{size / MIB:.1f}")
    _show(table, absent)


def print_guard(contest: str, shares: dict[str, list[float]]) -> None:
    """Print the share of a step that the guard takes, without waiting for slower ranks."""
    caption = "shortest time of each call over the ranks, since the last rank does not wait"
    table = _table(f"{contest}: share of a step spent in the guard", caption, ["median", "min", "max"])
    for name, found in shares.items():
        table.add_row(name, *(f"{value:.2%}" for value in (median(found), min(found), max(found))))
    _show(table, [])


def _table(title: str, caption: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD)
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


def _with_goal(ratio: Ratio | None, relation: str, goal: float | None) -> str:
    return "" if ratio is None else f"{ratio}{_goal(relation, goal)}"


def _goal(relation: str, goal: float | None) -> str:
    return "" if goal is None else f" goal {relation} {goal:.2f}"
