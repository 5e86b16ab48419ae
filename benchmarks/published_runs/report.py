"""The scores of the estimator against measured runs, as a table and as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmarks.published_runs.score import Score
from meshwright_plan.formatting import grid


def validation_table(scores: Sequence[Score]) -> str:
    """Return a table with one line per group, and the means over the groups."""
    rows: list[tuple[str, ...]] = [
        (
            "source",
            "rows",
            "median",
            "mean",
            "bias",
            "in band",
            "memory rows",
            "mean",
            "bias",
            "choices",
            "regret",
            "top 3",
        )
    ]
    for score in scores:
        time = (f"{score.median:.1%}", f"{score.mean:.1%}", f"{score.bias:+.1%}", f"{score.covered:.0%}")
        memory = (f"{score.memory_mean:.1%}", f"{score.memory_bias:+.1%}")
        choice = (f"{score.regret:.1%}", f"{score.top3:.0%}")
        rows.append(
            (
                score.group,
                str(score.rows),
                *(time if score.rows else ("-",) * len(time)),
                str(score.memory_rows),
                *(memory if score.memory_rows else ("-",) * len(memory)),
                str(score.choices),
                *(choice if score.choices else ("-",) * len(choice)),
            )
        )
    timed = [score for score in scores if score.rows]
    lines = [grid(rows)]
    if timed:
        mean = sum(score.mean for score in timed) / len(timed)
        count = sum(score.rows for score in timed)
        covered = sum(score.covered * score.rows for score in timed) / count
        lines.append(
            f"\nstep time: {mean:.1%} mean over {len(timed)} sources; {covered:.0%} of {count} rows in the band"
        )
    chosen = sum(score.choices for score in scores)
    if chosen:
        regret = sum(score.regret * score.choices for score in scores) / chosen
        top3 = sum(score.top3 * score.choices for score in scores) / chosen
        lines.append(
            f"choice: {regret:.1%} mean regret over {chosen} sets of 3 or more; best in the top 3 in {top3:.0%}"
        )
    return "\n".join(lines)


def validation_dict(scores: Sequence[Score]) -> list[dict[str, Any]]:
    """Return the scores as plain data."""
    return [dataclasses.asdict(score) for score in scores]
