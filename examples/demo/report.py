"""Writes the results of the demo: summary.json, loss.png and a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.table import Table

from examples.demo.prove import GRADIENT_TOLERANCE, LOSS_TOLERANCE, Proof
from examples.demo.results import TrainResult
from examples.demo.settings import Settings


def summarize(settings: Settings, run: TrainResult, proof: Proof) -> dict[str, Any]:
    """Return the content of summary.json."""
    return {
        "plan": run.plan,
        "planned_by": "the planner" if settings.plan is None else "flags",
        "world_size": settings.world_size,
        "steps": settings.steps,
        "first_loss": run.losses[0],
        "last_loss": run.losses[-1],
        "parity": {
            "max_rel_loss_diff": proof.max_rel_loss_diff,
            "max_rel_grad_diff": proof.max_rel_grad_diff,
        },
        "tokens_per_s": run.tokens_per_s,
        "param_bytes_per_rank": run.param_bytes_per_rank,
        "optimizer_bytes_per_rank": run.optimizer_bytes_per_rank,
    }


def write_report(settings: Settings, run: TrainResult, proof: Proof) -> Table:
    """Write summary.json and loss.png, and return a table of the same results."""
    summary = summarize(settings, run, proof)
    (settings.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    plot_losses(settings, run, proof, settings.output / "loss.png")
    return make_table(settings, run, proof)


def plot_losses(settings: Settings, run: TrainResult, proof: Proof, path: Path) -> None:
    """Plot two loss curves: the distributed run's, and one process's for the steps that it repeated."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = len(proof.losses)
    together = f"{settings.world_size} processes, dp={run.plan['dp']} x tp={run.plan['tp']}"
    axes.plot(range(1, len(run.losses) + 1), run.losses, linewidth=1.5, label=together)
    axes.plot(
        range(1, steps + 1),
        proof.losses,
        linestyle="none",
        marker="o",
        markersize=8,
        markerfacecolor="none",
        label=f"one process, first {steps} steps",
    )
    axes.set_title(
        f"largest relative difference of the loss in {steps} steps: {proof.max_rel_loss_diff:.1e}",
        fontsize="medium",
    )
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def make_table(settings: Settings, run: TrainResult, proof: Proof) -> Table:
    """Return a table that compares the distributed run with one process, and gives the verdict."""
    table = Table(title=f"dp={run.plan['dp']} x tp={run.plan['tp']} against one process", title_justify="left")
    table.add_column()
    table.add_column(f"{settings.world_size} processes", justify="right")
    table.add_column("one process", justify="right")
    table.add_row("loss of the first step", f"{run.losses[0]:.6f}", f"{proof.losses[0]:.6f}")
    last = len(proof.losses)
    table.add_row(f"loss of step {last}", f"{run.losses[last - 1]:.6f}", f"{proof.losses[-1]:.6f}")
    table.add_row(f"loss of step {settings.steps}", f"{run.losses[-1]:.6f}", "")
    table.add_row("tokens/s", f"{run.tokens_per_s:,.0f}", "")
    table.add_row("parameters per rank", _megabytes(run.param_bytes_per_rank), _megabytes(proof.param_bytes))
    table.add_row(
        "optimizer state per rank", _megabytes(run.optimizer_bytes_per_rank), _megabytes(proof.optimizer_bytes)
    )
    table.add_section()
    table.add_row(
        f"loss, {last} steps: off by at most", f"{proof.max_rel_loss_diff:.1e}", f"limit {LOSS_TOLERANCE:.0e}"
    )
    table.add_row("gradients: off by at most", f"{proof.max_rel_grad_diff:.1e}", f"limit {GRADIENT_TOLERANCE:.0e}")
    verdict = "[green]equal[/]" if proof.holds else f"[red]not equal[/]: {proof.worst_gradient}"
    table.add_row("the same training", verdict, "")
    return table


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
