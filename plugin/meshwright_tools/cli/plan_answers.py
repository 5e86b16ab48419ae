"""The outputs of ``meshwright plan``: which go together, and how plans, own plans and tables are printed."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json as json_format
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from meshwright.errors import PlanError
from meshwright.printable import shell_word
from meshwright_tools.cli.command import check_pages, option, say
from meshwright_tools.cli.plan_inputs import PlanQuestion

if TYPE_CHECKING:
    from meshwright.plan.parallel_plan import ParallelPlan
    from meshwright_plan.answers.explain import Change
    from meshwright_plan.answers.sweep import SweepRow, TrainingWay
    from meshwright_plan.job.candidate import Job
    from meshwright_plan.machine.hardware import Cluster
    from meshwright_plan.search.search import Search


_of_output = partial(option, panel="Output")


class Emit(StrEnum):
    """The launcher or scheduler whose file is printed."""

    accelerate = "accelerate"
    slurm = "slurm"
    kubernetes = "kubernetes"
    skypilot = "skypilot"
    ray = "ray"


@dataclass(frozen=True, kw_only=True)
class TableOutputs:
    """The form of an answer that is a table over a setting."""

    json: bool = _of_output("Print the whole answer as JSON.", "--json", default=False)

    def refuse_files(self, reason: str) -> None:
        """Raise a PlanError if an output was asked for that needs one plan."""
        for name in ("save", "html", "emit", "trace"):
            if getattr(self, name, None):
                raise PlanError(f"--{name} is about one plan, but {reason}")


@dataclass(frozen=True, kw_only=True)
class Outputs(TableOutputs):
    """The form of an answer about plans, and the files to write."""

    save: Path | None = _of_output("Write the first plan to this YAML file, for meshwright launch --plan.")
    emit: Emit | None = _of_output(
        "Print a file that starts the first plan, instead of the answer: a configuration for accelerate launch, a "
        "batch file for Slurm, a JobSet for Kubernetes, a task for SkyPilot, or a script for Ray Train."
    )
    trace: bool = _of_output(
        "Also run a step of the first plan on fake tensors and ranks, and compare its memory and collectives with the "
        "estimates.",
        "--trace",
        default=False,
    )
    stage: int | None = _of_output(
        "With --trace, rank of the pipeline to trace (default: the one that needs the most memory)."
    )

    def check(self) -> None:
        """Raise a PlanError if outputs do not go together, or a file cannot be written, before a search of minutes."""
        if self.emit is not None and (self.json or self.trace):
            raise PlanError(f"--emit {self.emit} prints a file; leave out {'--json' if self.json else '--trace'}")
        if self.stage is not None and not self.trace:
            raise PlanError(f"--stage {self.stage} is the rank of the pipeline that is traced; write --trace too")
        for name in ("save", "html"):
            path: Path | None = getattr(self, name, None)
            if path is not None and not path.parent.is_dir():
                raise PlanError(
                    f"--{name} {path}: there is no directory {path.parent}; create it, or name another file"
                )
            if path is not None and path.is_dir():
                raise PlanError(f"--{name} {path} is a directory; choose a file in it")


@dataclass(frozen=True, kw_only=True)
class PageOutputs(Outputs):
    """The form of an answer about plans, with a page."""

    html: Path | None = _of_output(
        "Write the answer to this HTML file: diagrams, a table of plans, sliders for the job, and menus of the values "
        "of --gpu and --precision."
    )
    every_setting: bool = _of_output(
        "With --html, also search every setting of the sliders, which takes minutes (default: search the values of "
        "--gpu and --precision for the job, and estimate these plans at the other settings).",
        "--every-setting",
        default=False,
    )

    def check(self) -> None:
        if self.html is not None:
            check_pages()
        elif self.every_setting:
            raise PlanError("--every-setting is about the sliders of a page; write --html plan.html too")
        super().check()


def answer_search(question: PlanQuestion, outputs: PageOutputs) -> None:
    """Print the fastest plans, and write the files that were asked for."""
    from meshwright_plan.answers import explain

    outputs.check()
    space = question.space()
    with _searching():
        found = question.search(space)
        if not found.choices:
            raise explain.no_fit(found)
        _check_runs(found, outputs)
        is_answered = outputs.emit is None or outputs.html is not None  # a file for a launcher needs one plan alone
        changed = explain.changes(found) if is_answered else []
        compared = question.compared(space, found) if is_answered else []
    if outputs.emit is not None:
        say(_emitted(found, outputs.emit, outputs.save))
    elif outputs.json:
        answer = explain.as_dict(found, changed=changed, budget=question.budget, compared=compared)
        say(json_format.dumps(answer, indent=2))
    else:
        say(explain.text(found, changed=changed, budget=question.budget, compared=compared))
    if outputs.html is not None:
        _write_page(question, outputs, found, changed, compared)
    _finish(question, found, outputs)


def _searching() -> contextlib.AbstractContextManager[object]:
    """Show on a terminal that the command is at work, without a word on standard output."""
    from rich.console import Console

    return Console(stderr=True).status("searching for the fastest plans")


def _write_page(
    question: PlanQuestion, outputs: PageOutputs, found: Search, changed: Sequence[Change], compared: list[TrainingWay]
) -> None:
    from meshwright_plan.answers.sweep import no_fit_of, training_rows
    from meshwright_tools.plan_page import Answer, write_page

    html, options = outputs.html, question.options
    assert html is not None
    rows = training_rows(compared, question.budget) if compared else []
    answers = [Answer(found=found, changed=changed, budget=question.budget, compared=rows)]
    refused: list[str] = []
    with typer.progressbar(length=1, label=f"Writing {html}", file=sys.stderr) as bar:

        def progress(done: int, total: int) -> None:
            bar.length = total
            if sys.stderr.isatty():
                bar.update(done - bar.pos)

        for other in question.others():
            name = f"{(*other.settings.gpu, found.cluster.device.name)[0]} in {other.settings.precision[0]}"
            try:
                each = other.search(space := other.space())
            except PlanError as error:
                refused.append(f"{name} ({re.split('[.:] ', str(error))[0]})")
                continue
            if not each.choices:
                refused.append(f"{name} ({no_fit_of(each)})")
                continue
            ways = other.compared(space, each)
            rows = training_rows(ways, other.budget) if ways else []
            answers.append(Answer(found=each, budget=other.budget, compared=rows))
        write_page(
            answers, html, model=str(options.model), profile=None if options.profile is None else str(options.profile),
            refused=refused, every_setting=outputs.every_setting, progress=progress,
        )  # fmt: skip


def answer_own(question: PlanQuestion, outputs: Outputs, plans: Sequence[ParallelPlan]) -> bool:
    """Print the estimates of the user's plans; return whether the first one fits."""
    from meshwright_plan.answers import explain
    from meshwright_plan.formatting import gib
    from meshwright_plan.job.candidate import Candidate
    from meshwright_plan.search.search import weigh

    outputs.check()
    space = question.space()
    own = [Candidate.of(plan, space.job) for plan in plans]
    if len(own) > 1:
        outputs.refuse_files(f"--plan gives {len(own)}; give one")
    if getattr(outputs, "html", None) is not None:
        raise PlanError("--html draws the planner's own answer; leave out --html, or the plan")
    found = weigh(space, question.measured, own, budget=question.filled(space))
    _check_runs(found, outputs)
    is_fit = found.choices[0].memory.total <= found.budget
    if not is_fit and (outputs.save or outputs.emit):
        choice = found.choices[0]
        raise PlanError(
            f"{choice.plan.label} needs {gib(choice.memory.total)}, but may fill {gib(found.budget)} of each "
            f"{found.cluster.device.name}; leave out --save and --emit to see its parts, or write another plan"
        )
    if outputs.emit is not None:
        say(_emitted(found, outputs.emit, outputs.save))
    elif outputs.json:
        say(json_format.dumps(explain.as_dict(found, budget=question.budget), indent=2))
    else:
        best = None
        with contextlib.suppress(PlanError), _searching():  # there may be no legal plan but the given ones
            best = question.search(question.space(), top=1)
        say(explain.own_text(found, best=best, budget=question.budget))
    _finish(question, found, outputs)
    return is_fit


def answer_sweep(question: PlanQuestion, outputs: TableOutputs, name: str) -> None:
    """Print a table with the best plan for each value of a setting."""
    from meshwright_plan.answers.sweep import row_of, sweep_dict

    outputs.refuse_files(f"--{name.replace('_', '-')} with several values prints a table; leave one of them out")

    def row_at(value: object) -> SweepRow:
        settings = question.settings.at(name, value)
        return row_of(value, lambda: question.search(question.space(settings), top=1), question.budget_at(settings))

    with _searching():
        rows = [row_at(value) for value in getattr(question.settings, name)]
    if not any(row.best for row in rows):
        raise PlanError(f"no plan for any value: {rows[0].reason}")
    if outputs.json:
        say(json_format.dumps(sweep_dict(name, rows), indent=2))
        return
    say(_table(question, name, rows))
    _warn(rows)


def _warn(rows: Sequence[SweepRow]) -> None:
    """Print the first warning about a batch, and that about each device."""
    from meshwright_plan.answers.notes import band_warning, batch_warning

    found = [row.found for row in rows if row.found is not None]
    batch = next(filter(None, (batch_warning(each.job) for each in found)), None)
    for warning in filter(None, (batch, *dict.fromkeys(map(band_warning, found)))):
        say(f"\nWarning: {warning}.")


def answer_days(question: PlanQuestion, outputs: TableOutputs, days: float) -> None:
    """Print the smallest cluster that trains on the tokens in a number of days, and the sizes below it."""
    from meshwright_plan.answers.sweep import is_met, smallest_cluster, sweep_dict

    outputs.refuse_files("--days prints a table; leave one of them out")
    if question.budget is None:
        raise PlanError("--days needs the tokens of the run; write --tokens 1T")
    space = question.space()

    def find(cluster: Cluster, job: Job) -> Search:
        return question.search(dataclasses.replace(space, cluster=cluster, job=job), top=1)

    flops = question.shape.flops(space.job.seq_len, lora=space.job.lora)
    with _searching():
        rows = smallest_cluster(find, space.cluster, space.job, question.budget, days, flops)
    if not is_met(rows, days):
        tried = f"up to {rows[-1].value:,} devices" if rows else "at the devices' peak rate"
        raise PlanError(
            f"--days={days:g}: no cluster of {space.cluster.device.name} {tried} is fast enough with a global batch of "
            f"{space.job.global_batch} sequences; give a larger --global-batch, more --days or another --gpu"
        )
    if outputs.json:
        say(json_format.dumps(sweep_dict("gpus", rows), indent=2))
        return
    last = rows[-1].bill
    assert last is not None
    say(_table(question, "gpus", [row for row in rows if row.best]))
    say(
        f"\nSmallest cluster for {days:g} days: {rows[-1].value:,} x {space.cluster.device.name}, {last.days:.1f} days."
        " Sizes without a legal plan are left out."
    )
    _warn(rows)


def _table(question: PlanQuestion, swept: str, rows: Sequence[SweepRow]) -> str:
    """Return a table over a setting, below a line with the model and the other settings."""
    from meshwright_plan.answers.explain import parameters_text
    from meshwright_plan.answers.sweep import sweep_text

    shape, cluster, settings = question.shape, question.cluster(question.settings), question.settings
    one = {"gpus": cluster.device.name, "gpu": f"{cluster.gpus} devices"}
    words = [one.get(swept, f"{cluster.gpus} x {cluster.device.name}")]
    words += [f"{settings.global_batch[0]} sequences per step"] * (swept != "global_batch")
    words += [f"{settings.seq_len[0]} tokens per sequence"] * (swept != "seq_len")
    heading = f"{shape.name}: {parameters_text(shape)}, {', '.join(words)}"
    return f"{heading}\n\n{sweep_text(swept.replace('_', '-'), rows)}"


def _check_runs(found: Search, outputs: Outputs) -> None:
    """Raise a PlanError if a plan that this version cannot run would be written."""
    plan, precision = found.choices[0].plan, found.job.precision
    for name in ("save", "emit", "trace"):
        if getattr(outputs, name) and not plan.runs_today:
            raise PlanError(f"--{name}: {plan.label} cannot run in this version; leave out --allow-future")
        is_able = found.trains_today and (name != "trace" or precision == "bf16")
        if getattr(outputs, name) and not is_able:
            verb = "trace" if found.trains_today else "train"
            raise PlanError(
                f"--{name}: this version cannot {verb} in {precision} yet, so {plan.label} would run in bf16, and take "
                f"longer; write --precision bf16, or leave out --{name}"
            )


def _finish(question: PlanQuestion, found: Search, outputs: Outputs) -> None:
    if outputs.save is not None:
        from meshwright.choose.given_plan import save_plan

        best = found.choices[0]
        comment = (
            f"{found.shape.name} in {found.job.dtype} on {found.cluster.gpus} x {found.cluster.device.name}: "
            f"{best.plan.label}, {best.time.total:.3g} s per step estimated"
        )
        save_plan(best.plan, outputs.save, comment=comment, dtype=found.job.dtype)
        if not (outputs.emit or outputs.json):
            say(f"\nTo run it: {_command(found, outputs.save)}")
    if outputs.trace:
        _trace(found, str(question.options.model), outputs.stage)


def _command(found: Search, path: Path) -> str:
    """Return the command that launches a saved plan."""
    nodes = found.cluster.nodes
    several = f"--num_machines {nodes} --machine_rank RANK --main_process_ip ADDRESS_OF_MACHINE_0 " if nodes > 1 else ""
    return f"meshwright launch --plan {shell_word(path)} {several}train.py"


def _emitted(found: Search, emit: Emit, save: Path | None) -> str:
    """Return the file that starts the first plan."""
    plan, cluster = found.choices[0].plan, found.cluster
    precision = "no" if found.job.element_bytes == 4 else found.job.precision
    if emit is Emit.accelerate:
        from meshwright_hf.launch.launcher import accelerate_config  # here, since it needs accelerate

        return accelerate_config(plan, cluster, saved=save, mixed_precision=precision)
    from meshwright_tools.cluster_files.cluster_job import ClusterJob

    job = ClusterJob(plan=plan, cluster=cluster, mixed_precision=precision, model=found.shape.name)
    return str(importlib.import_module(f"meshwright_tools.cluster_files.{emit}").text(job))


def _trace(found: Search, model: str, stage: int | None) -> None:
    import torch

    from meshwright_plan.job.config_file import config_path
    from meshwright_tools.tracing.compare import adapted, model_on_meta, trace_and_compare

    plan = found.choices[0].plan
    lora = found.job.lora
    if found.job.optimizer != "adamw":
        raise PlanError("--trace trains with AdamW; leave out --trace or --optimizer")
    if lora is not None and lora.quantised is not None:
        raise PlanError("--trace runs no kernels of a quantised base; leave out --trace or --quantised")
    if found.shape.experts:
        raise PlanError(
            f"--trace: how many tokens of {found.shape.name} go to each expert depends on their values, which a trace "
            "does not have; leave out --trace"
        )
    say(f"\nTracing a step of {found.shape.name} on {plan.world_size} fake ranks...", err=True)
    on_meta = model_on_meta(config_path(model), getattr(torch, found.job.dtype))
    on_meta = on_meta if lora is None else adapted(on_meta, lora)
    say("\n" + trace_and_compare(on_meta, found.shape, plan, found.job, stage))
