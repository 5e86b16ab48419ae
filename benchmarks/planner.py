"""``python -m benchmarks.planner``: compare the planner's estimates with measured runs, and time the planner."""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.published_runs.score import LeaveOut, Score, held_out, predictions_of, validate
from benchmarks.published_runs.table import Run, read_runs, summary
from meshwright_plan.job.candidate import Job
from meshwright_plan.job.shapes import ModelShape
from meshwright_plan.machine.hardware import Cluster, HardwareProfile, device
from meshwright_plan.search.search import search
from meshwright_plan.search.space import Space

EXCERPT = Path("tests/data/published_runs_excerpt.csv")
ROWS = 8  # calibration rows per source
FEWEST = 11  # minimum rows of a group, so that some rows are left to score
LARGE = 20  # minimum rows of a publisher in the table of publishers
GOALS = {"DGXC": 0.03, "llm-foundry": 0.06, "BigScience": 0.08, "vTrain": 0.10}
GOAL = 0.08  # of a publisher, and of a group that GOALS does not name
VIEWS: tuple[LeaveOut, ...] = ("rows", "model", "gpus", "test")
LLAMA_405B = ModelShape.of(
    name="405B", layers=126, hidden=16384, heads=128, kv_heads=8, head_dim=128, ffn=53248, vocab=128256
)  # fmt: skip


def main(
    runs: Annotated[Path, typer.Option(help="A table in the format of published_runs.csv.")] = EXCERPT,
    seeds: Annotated[int, typer.Option(help="Number of random draws of the calibration rows to average over.")] = 5,
) -> None:
    """Print the goals and the measured figures as tables."""
    dropped: list[str] = []
    measured = [run for run in read_runs(runs, dropped) if run.seconds]
    for line in summary(dropped):
        print(f"dropped: {line}")
    print(f"{runs.name}: {len(measured)} step times, {sum(map(held_out, measured))} of them in the test split\n")
    for table in (uncalibrated(measured), calibrated(measured, seeds), by_schedule(measured, seeds), speed()):
        for line in table:
            print(line, flush=True)
        print()


def uncalibrated(runs: Sequence[Run]) -> Iterator[str]:
    """Yield the table of estimates from the catalogue, without calibration."""
    yield "| catalogue alone | goal | all rows | development | test split |\n|---|---|---|---|---|"
    parts = (runs, [run for run in runs if not held_out(run)], [run for run in runs if held_out(run)])
    scores = [[score for score in validate(part) if score.rows] for part in parts]
    yield _line("mean error over sources", "≤ 20%", [_percent(statistics.fmean(s.mean for s in x)) for x in scores])
    yield _line("rows in the band", "≥ 90%", [_percent(_weighted(x, "covered")) for x in scores])
    yield "\n| source | rows | mean error | bias | in band |\n|---|---|---|---|---|"
    for score in scores[0]:
        yield _line(score.group, str(score.rows), [_percent(score.mean), f"{score.bias:+.1%}", f"{score.covered:.0%}"])


def calibrated(runs: Sequence[Run], seeds: int) -> Iterator[str]:
    """Yield the table of estimates after a few calibration rows, by how calibration and scored rows are separated."""
    if not (kept := _with_enough(runs)):
        return
    found: dict[LeaveOut, list[list[Score]]] = {view: [] for view in VIEWS}
    for seed, view in itertools.product(range(seeds), VIEWS):
        print(f"seed {seed}, {view} ...", end="\r", file=sys.stderr, flush=True)
        found[view].append(validate(kept, calibrate_rows=ROWS, seed=seed, leave=view))
    yield f"{ROWS} calibration rows of each source, mean over {seeds} seeds: error, bias, share in the band\n"
    head = "| source | goal | other rows | other models | more GPUs | test split |"
    yield head + "\n|---|---|---|---|---|---|"
    for index, score in enumerate(found["rows"][0]):
        goal = f"≤ {GOALS.get(score.group.split()[0], GOAL):.0%}"
        yield _line(score.group, goal, [_cell([draw[index] for draw in found[view]]) for view in VIEWS])
    chosen = [score for draw in found["rows"] for score in draw if score.choices]
    covered = {view: [score for draw in found[view] for score in draw if score.rows] for view in VIEWS}
    yield _line("all rows in the band", "≥ 90%", [_percent(_weighted(covered[view], "covered")) for view in VIEWS])
    if chosen:
        sets = sum(score.choices for score in chosen) / seeds
        yield _line(f"regret of the first choice, {sets:.0f} sets", "≤ 4%",
                    [_percent(_weighted(chosen, "regret", "choices")), "", "", ""])  # fmt: skip
        yield _line("best in the top 3", "≥ 90%", [_percent(_weighted(chosen, "top3", "choices")), "", "", ""])
    yield from _publishers(runs, found["rows"])


def _publishers(runs: Sequence[Run], draws: Sequence[Sequence[Score]]) -> Iterator[str]:
    """Yield the table of publishers with many rows; its errors are means over the scored rows of all their groups."""
    sizes = Counter(run.group.split()[0] for run in runs)
    yield f"\n| publisher of {LARGE} or more rows | goal | rows | scored | error, bias |\n|---|---|---|---|---|"
    for name in (name for name, size in sizes.items() if size >= LARGE):
        scores = [score for draw in draws for score in draw if score.group.split()[0] == name and score.rows]
        scored = sum(score.rows for score in scores) / len(draws)
        error = f"{_weighted(scores, 'mean'):.1%}, {_weighted(scores, 'bias'):+.1%}"
        yield _line(name, f"≤ {GOAL:.0%}", [str(sizes[name]), f"{scored:.0f}", error])


def by_schedule(runs: Sequence[Run], seeds: int) -> Iterator[str]:
    """Yield the table of the estimates of other rows after a few calibration rows, by source and schedule."""
    errors: dict[tuple[str, str], list[float]] = {}
    profile = HardwareProfile(name="catalogue")
    kept = _with_enough(runs)
    for seed, group in itertools.product(range(seeds), dict.fromkeys(run.group for run in kept)):
        members = [run for run in kept if run.group == group]
        for found in predictions_of(members, ROWS, seed, "rows", "chosen", profile):
            schedule = found.run.plan.schedule if found.run.plan.pp > 1 else "no pipeline"
            error = found.seconds / (found.run.seconds or 1.0) - 1
            errors.setdefault((schedule, group), []).append(error)
            errors.setdefault((schedule, "all"), []).append(error)
    yield f"{ROWS} calibration rows, other rows, mean over {seeds} seeds, by schedule\n"
    yield "| schedule | source | rows | error | bias |\n|---|---|---|---|---|"
    for (schedule, group), found_errors in sorted(errors.items()):
        rows, error = round(len(found_errors) / seeds), statistics.fmean(map(abs, found_errors))
        yield _line(schedule, group, [str(rows), _percent(error), f"{statistics.fmean(found_errors):+.1%}"])


def speed() -> Iterator[str]:
    """Yield the table of the seconds that a large search and the command's help take."""
    yield "| speed | seconds |\n|---|---|"
    cluster = Cluster(device=device("h100-sxm"), gpus=16384)
    start = time.perf_counter()
    job = Job(seq_len=8192, global_batch=2048)
    found = search(Space(shape=LLAMA_405B, cluster=cluster, job=job, allow_future=True))
    yield _line(f"405B on 16,384 GPUs, {found.considered:,} legal plans", f"{time.perf_counter() - start:.1f}", [])
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "meshwright_tools.cli", "plan", "--help"], check=True, stdout=subprocess.DEVNULL
    )
    yield _line("meshwright plan --help", f"{time.perf_counter() - start:.1f}", [])


def _with_enough(runs: Sequence[Run]) -> list[Run]:
    """Return the runs of the groups that have enough rows to calibrate on some and score the others."""
    sizes = Counter(run.group for run in runs)
    return [run for run in runs if sizes[run.group] >= FEWEST]


def _cell(scores: Sequence[Score]) -> str:
    scores = [score for score in scores if score.rows]
    if not scores:
        return "-"
    error, bias, covered = (statistics.fmean(getattr(s, name) for s in scores) for name in ("mean", "bias", "covered"))
    return f"{error:.1%}, {bias:+.1%}, {covered:.0%}"


def _weighted(scores: Sequence[Score], name: str, weight: str = "rows") -> float:
    total = sum(getattr(score, weight) for score in scores)
    return sum(getattr(score, name) * getattr(score, weight) for score in scores) / total if total else 0.0


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _line(name: str, value: str, rest: Sequence[str]) -> str:
    return f"| {' | '.join((name, value, *rest))} |"


if __name__ == "__main__":
    typer.run(main)
