"""Every type of five mappings of transformers under four plans, against itself on one device.

python -m conformance.families.reach --results reach.jsonl
python -m conformance.families.reach --mapping image-text --shard 1/2 --results reach1.jsonl
python -m conformance.families.reach --only llava --plan tp2+sp
python -m conformance.families.reach --again refused --again crashes --results reach.jsonl

The loss, the norm and every gradient are compared in float64. The tolerance is 1e-10 of a tensor's largest value: only
the order of sums differs, by about 1e-16 per sum. Each type runs on two ranks of its own, which are forks of this
process, so that a type that crashes or hangs ends alone. With ``--results FILE`` a sweep that was interrupted goes on
where it ended.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import signal
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import nn

import meshwright as mw
from conformance.families.kept_results import ResultsFile, read
from conformance.families.one_device import Step
from conformance.families.parity import TOLERANCE
from conformance.families.tiny_models import MAPPINGS, Tiny, UnbuiltError, tiny, types_of
from conformance.families.type_ranks import PATIENCE, STATUSES, Cell, first_line, run_ranks
from meshwright.parallel.losses.head_losses import find_loss
from meshwright.plan.text import parse_plan
from meshwright_tools.verification.float64_modules import in_float64
from support.exact import gradient_differences

PLANS = ("dp2 zero3", "tp2+sp", "pp2", "cp2")
_TO_BUILD = 120  # seconds to find a model and a batch


def compare(model: Tiny, plan: str) -> Cell:
    """Compare a type under a plan with one device; both ranks must make the call, and only rank 0 compares."""
    given: Any = parse_plan(plan)
    with in_float64():
        built: Any = model.build()
        averages_over = None if find_loss(built) else "labels" if "labels" in model.batch else "rows"
        config = mw.ToDistributedConfig(
            plan=mw.ParallelPlan(**given),
            timeout_s=PATIENCE,
            loss_averages_over=averages_over,
            gather_logits=model.gathers_logits,
        )
        try:
            built, _, batches = mw.to_distributed(built, None, [model.batch], config=config)
        except mw.PlanError as error:
            return Cell("refused", reason=first_line(error))
        loss = built(**next(iter(batches))).loss
        loss.backward()
        gradients = mw.full_gradients(built)
        actual = Step(loss.item(), mw.clip_grad_norm_(built, 1e9).item(), gradients)
        return _judged(actual, model) if dist.get_rank() == 0 else Cell("equal")


def _judged(actual: Step, model: Tiny) -> Cell:
    alone: Any = model.build()
    loss = alone(**model.batch).loss
    loss.backward()
    gradients = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    norm = nn.utils.clip_grad_norm_(alone.parameters(), 1e9).item()
    if actual.gradients.keys() != gradients.keys():
        names = sorted(actual.gradients.keys() ^ gradients.keys())
        return Cell("differs", reason=f"a gradient in one program only: {names[0]} and {len(names) - 1} more")
    found = {"loss": abs(actual.loss / loss.item() - 1), "norm": abs(actual.norm / norm - 1)}
    found |= gradient_differences(actual.gradients, gradients)
    name = max(found, key=lambda name: found[name] if found[name] == found[name] else float("inf"))
    largest = found[name] if found[name] == found[name] else float("inf")
    if largest <= TOLERANCE:
        return Cell("equal", largest)
    others = sum(not value <= TOLERANCE for value in found.values()) - 1
    return Cell("differs", largest, f"{name} and {others} more")


def run_type(mapping: str, model_type: str, plans: Sequence[str]) -> dict[str, Cell]:
    """Return the cell of each plan for a type; ranks that end early are started again for the plans that remain."""
    found: dict[str, Cell] = {}
    if not plans:
        return found
    torch.set_num_threads(1)  # a forked process cannot use the threads of this one
    signal.signal(signal.SIGALRM, _too_slow)
    signal.alarm(_TO_BUILD)
    try:
        model = tiny(mapping, model_type)
    except (UnbuiltError, _TooLongError) as error:
        return {plan: Cell("unbuilt", reason=first_line(error)) for plan in plans}
    finally:
        signal.alarm(0)
    while left := [plan for plan in plans if plan not in found]:
        cells = run_ranks(functools.partial(compare, model), left)
        for plan, cell in cells.items():
            # The line that the error names.
            if cell.status == "crashes" and "gather_logits=True" in cell.reason:
                changed = dataclasses.replace(model, gathers_logits=True)
                cells |= run_ranks(functools.partial(compare, changed), [plan])
            if cell.status == "refused" and "freeze the statistics" in cell.reason:
                changed = dataclasses.replace(model, freezes_statistics=True)
                cells |= run_ranks(functools.partial(compare, changed), [plan])
        found |= cells
    return found


class _TooLongError(BaseException):
    """No ``Exception``, so that the search for a model does not take it for a config's error and go on."""


def _too_slow(*_: object) -> None:
    raise _TooLongError(f"no model and batch within {_TO_BUILD} s")


def main(
    mapping: Annotated[list[str] | None, typer.Option(help="a mapping; may be given several times")] = None,
    only: Annotated[list[str] | None, typer.Option(help="a type; may be given several times")] = None,
    plan: Annotated[list[str] | None, typer.Option(help="a plan; may be given several times")] = None,
    shard: Annotated[str, typer.Option(help="the part of the types to run, such as 1/2 for the first half")] = "1/1",
    again: Annotated[
        list[str] | None, typer.Option(help="a status whose cells are run again; may be given several times")
    ] = None,
    results: ResultsFile = None,
) -> None:
    """Compare every type of transformers' mappings with itself on one device, on two local processes.

    Exits with status 1 if a type differs or crashes.
    """
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    for name in mw.__all__:
        getattr(mw, name)  # loads its module here, once, in place of in each fork
    kept = read([results]) if results is not None and results.exists() else {}
    number, count = map(int, shard.split("/"))
    chosen = [(m, t) for m in mapping or MAPPINGS for t in types_of(m) if not only or t in only]
    counts: Counter[str] = Counter()
    for task, model_type in chosen[number - 1 :: count]:
        programs = {f"{task}: {model_type}: {words}": words for words in plan or PLANS}
        done = {p: kept[p] for p in programs if p in kept and kept[p]["status"] not in (again or ())}
        missing = [words for program, words in programs.items() if program not in done]
        cells = run_type(task, model_type, missing)
        found = {f"{task}: {model_type}: {words}": asdict(cell) for words, cell in cells.items()}
        if results is not None:
            with results.open("a") as file:
                file.writelines(json.dumps({program: cell}) + "\n" for program, cell in found.items())
        counts.update(cell["status"] for cell in (*done.values(), *found.values()))
        for program, cell in found.items():
            print(program, cell["status"], cell["difference"] or "", cell["reason"], flush=True)
    print(", ".join(f"{counts[status]} {status}" for status in STATUSES))
    raise typer.Exit(1 if counts["differs"] + counts["crashes"] else 0)


if __name__ == "__main__":
    typer.run(main)
