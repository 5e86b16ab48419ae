"""The outputs of ``meshwright plan``: which go together, and how plans, own plans and tables are printed."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json as json_format
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from meshwright.cli.pages import check_pages
from meshwright.cli.plan_inputs import PlanQuestion
from meshwright.errors import PlanError

if TYPE_CHECKING:
    from meshwright.planner.candidate import Candidate, Job
    from meshwright.planner.explain import Change
    from meshwright.planner.search import Search
    from meshwright.planner.sweep import SweepRow


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The form of an answer and the files to write.

    Args:
        json: whether to print it as JSON.
        save: the file for the first plan; None to write none.
        html: the file for the diagrams; None to write none.
        emit: the launcher whose configuration is printed in place of the answer; None to print the answer.
        trace: whether to trace a step of the first plan.
        stage: the rank of the pipeline to trace; None for the one that needs the most memory.
        model: path of the model's config.
    """

    json: bool
    save: Path | None
    html: Path | None
    emit: str | None
    trace: bool
    stage: int | None
    model: Path

    def __post_init__(self) -> None:
        if self.emit is not None and (self.json or self.trace):
            raise PlanError(f"--emit {self.emit} prints a file; leave out {'--json' if self.json else '--trace'}")
        if self.stage is not None and not self.trace:
            raise PlanError(f"--stage {self.stage} is the rank of the pipeline that is traced; write --trace too")
        if self.html is not None:
            check_pages()
        for option, path in (("--save", self.save), ("--html", self.html)):  # before a search, which may take minutes
            if path is not None and not path.parent.is_dir():
                raise PlanError(
                    f"{option} {path}: there is no directory {path.parent}; create it, or name another file"
                )
            if path is not None and path.is_dir():
                raise PlanError(f"{option} {path} is a directory; choose a file in it")

    def refuse(self, what: str) -> None:
        """Raise a PlanError if an output was asked for that a table does not have."""
        for name in ("save", "html", "emit", "trace"):
            if getattr(self, name):
                raise PlanError(f"--{name} is about one plan, but {what} prints a table; leave one of them out")


def answer_search(question: PlanQuestion, outputs: Outputs) -> None:
    """Print the fastest plans, and write the files that were asked for."""
    from meshwright.planner import explain

    found = question.search(question.space())
    if not found.choices:
        raise explain.no_fit(found)
    _check_runs(found.choices[0].plan, outputs)
    changed = explain.changes(found)
    if outputs.emit is not None:
        typer.echo(_accelerate_config(found, outputs.save))
    elif outputs.json:
        answer = explain.as_dict(found, changed=changed, budget=question.budget)
        typer.echo(json_format.dumps(answer, indent=2))
    else:
        typer.echo(explain.text(found, changed=changed, budget=question.budget))
    if outputs.html is not None:
        _write_page(found, outputs, changed)
    _finish(found, outputs)


def _write_page(found: Search, outputs: Outputs, changed: Sequence[Change]) -> None:
    from meshwright.planner.page import write_page

    assert outputs.html is not None
    with typer.progressbar(length=1, label=f"Writing {outputs.html}", file=sys.stderr) as bar:

        def progress(done: int, total: int) -> None:
            bar.length = total
            if sys.stderr.isatty():
                bar.update(done - bar.pos)

        write_page(found, outputs.html, changed=changed, model=str(outputs.model), progress=progress)


def answer_own(question: PlanQuestion, outputs: Outputs, plans: Callable[[Job], list[Candidate]]) -> bool:
    """Print the estimates of the user's plans; return whether the first one fits."""
    from meshwright.planner import explain
    from meshwright.planner.formatting import gib
    from meshwright.planner.own_plan import weigh
    from meshwright.planner.own_text import own_text

    space = question.space()
    own = plans(space.job)
    if len(own) > 1:
        for name in ("save", "emit", "trace"):
            if getattr(outputs, name):
                raise PlanError(f"--{name} is about one plan, but --plan gives {len(own)}; give one")
    if outputs.html is not None:
        raise PlanError("--html draws the planner's own answer; leave out --html, or the plan")
    found = weigh(space, question.measured, own, budget=question.filled(space))
    _check_runs(found.choices[0].plan, outputs)
    is_fit = found.choices[0].memory.total <= found.budget
    if not is_fit and (outputs.save or outputs.emit):
        choice = found.choices[0]
        raise PlanError(
            f"{choice.plan.label} needs {gib(choice.memory.total)}, but may fill {gib(found.budget)} of each "
            f"{found.cluster.device.name}; leave out --save and --emit to see its parts, or write another plan"
        )
    if outputs.emit is not None:
        typer.echo(_accelerate_config(found, outputs.save))
    elif outputs.json:
        typer.echo(json_format.dumps(explain.as_dict(found, budget=question.budget), indent=2))
    else:
        best = None
        with contextlib.suppress(PlanError):  # there may be no legal plan but the given ones
            best = question.search(question.space(), top=1)
        typer.echo(own_text(found, best=best, budget=question.budget))
    _finish(found, outputs)
    return is_fit


def answer_sweep(question: PlanQuestion, outputs: Outputs, name: str, values: Sequence[Any]) -> None:
    """Print a table with the best plan for each value of a setting."""
    from meshwright.planner.notes import batch_warning
    from meshwright.planner.sweep import row_of, sweep_dict

    outputs.refuse(f"--{name.replace('_', '-')} with several values")

    def find(value: Any) -> Search:
        return question.search(question.space(**{name: value}), top=1)

    rows = [row_of(value, partial(find, value), question.budget) for value in values]
    if not any(row.best for row in rows):
        raise PlanError(f"no plan for any value: {rows[0].reason}")
    if outputs.json:
        typer.echo(json_format.dumps(sweep_dict(name, rows), indent=2))
        return
    typer.echo(_table(question, name, rows))
    for row in rows:
        if row.found is not None and (warning := batch_warning(row.found.job)):
            typer.echo(f"\nWarning: {warning}.")
            break


def answer_days(question: PlanQuestion, outputs: Outputs, days: float) -> None:
    """Print the smallest cluster that trains on the tokens in a number of days, and the sizes below it."""
    from meshwright.planner.sweep import is_met, smallest_cluster, sweep_dict

    outputs.refuse("--days")
    if question.budget is None:
        raise PlanError("--days needs the tokens of the run; write --tokens 1T")
    space = question.space()

    def find(cluster: Any, job: Job) -> Search:
        return question.search(dataclasses.replace(space, cluster=cluster, job=job), top=1)

    flops = question.shape.flops(space.job.seq_len)
    rows = smallest_cluster(find, space.cluster, space.job, question.budget, days, flops)
    if not is_met(rows, days):
        tried = f"up to {rows[-1].value:,} devices" if rows else "at the devices' peak rate"
        raise PlanError(
            f"--days={days:g}: no cluster of {space.cluster.device.name} {tried} is fast enough with a global batch of "
            f"{space.job.global_batch} sequences; give a larger --global-batch, more --days or another --gpu"
        )
    if outputs.json:
        typer.echo(json_format.dumps(sweep_dict("gpus", rows), indent=2))
        return
    last = rows[-1].bill
    assert last is not None
    typer.echo(_table(question, "gpus", [row for row in rows if row.best]))
    typer.echo(
        f"\nSmallest cluster for {days:g} days: {rows[-1].value:,} x {space.cluster.device.name}, {last.days:.1f} days."
        " Sizes without a legal plan are left out."
    )


def _table(question: PlanQuestion, swept: str, rows: Sequence[SweepRow]) -> str:
    """Return a table over a setting, below a line with the model and the other settings."""
    from meshwright.planner.sweep import sweep_text

    shape, cluster, settings = question.shape, question.space().cluster, question.settings
    words = [cluster.device.name if swept == "gpus" else f"{cluster.gpus} x {cluster.device.name}"]
    words += [f"{settings.global_batch} sequences per step"] * (swept != "global_batch")
    words += [f"{settings.seq_len} tokens per sequence"] * (swept != "seq_len")
    heading = f"{shape.name}: {shape.parameters / 1e9:.2f} B parameters, {', '.join(words)}"
    return f"{heading}\n\n{sweep_text(swept.replace('_', '-'), rows)}"


def _check_runs(plan: Candidate, outputs: Outputs) -> None:
    """Raise a PlanError if a plan that this version cannot run would be written."""
    for name in ("save", "emit", "trace"):
        if getattr(outputs, name) and not plan.runs_today:
            raise PlanError(f"--{name}: {plan.label} cannot run in this version; leave out --allow-future")


def _finish(found: Search, outputs: Outputs) -> None:
    if outputs.save is not None:
        from meshwright.choose.plan_file import save_plan

        best = found.choices[0]
        comment = (
            f"{found.shape.name} in {found.job.dtype} on {found.cluster.gpus} x {found.cluster.device.name}: "
            f"{best.plan.label}, {best.time.total:.3g} s per step estimated"
        )
        save_plan(best.plan, outputs.save, comment=comment, dtype=found.job.dtype)
        if not (outputs.emit or outputs.json):
            typer.echo(f"\nTo run it: {_command(found, outputs.save)}")
    if outputs.trace:
        _trace(found, outputs)


def _command(found: Search, path: Path) -> str:
    """Return the command that launches a saved plan."""
    nodes = found.cluster.nodes
    several = f"--num_machines {nodes} --machine_rank RANK --main_process_ip ADDRESS_OF_MACHINE_0 " if nodes > 1 else ""
    return f"meshwright launch --plan {path} {several}train.py"


def _accelerate_config(found: Search, save: Path | None) -> str:
    # Imported by name, since the core works without accelerate and must not import it.
    config = importlib.import_module("meshwright_hf.accelerate_config")
    return str(
        config.accelerate_config(
            found.choices[0].plan, found.cluster, saved=save,
            mixed_precision="no" if found.job.activation_bytes == 4 else found.job.precision,
        )
    )  # fmt: skip


def _trace(found: Search, outputs: Outputs) -> None:
    import torch

    from meshwright.planner.hub_cache import config_path
    from meshwright.tracing.compare import model_on_meta, trace_and_compare

    plan = found.choices[0].plan
    typer.echo(f"\nTracing a step of {found.shape.name} on {plan.world_size} fake ranks...", err=True)
    model = model_on_meta(config_path(outputs.model), getattr(torch, found.job.dtype))
    typer.echo("\n" + trace_and_compare(model, found.shape, plan, found.job, outputs.stage))
