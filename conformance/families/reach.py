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
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import nn

import meshwright as mw
from conformance.families.kept_results import ResultsFile, read
from conformance.families.one_device import Step, own_groups
from conformance.families.parity import TOLERANCE
from conformance.families.tiny_models import MAPPINGS, Tiny, UnbuiltError, tiny, types_of
from meshwright.mesh.process_group import start_process_group
from meshwright.parallel.losses.head_losses import find_loss
from meshwright.plan.text import parse_plan
from meshwright_tools.verification.float64_modules import in_float64
from support.exact import gradient_differences

PLANS = ("dp2 zero3", "tp2+sp", "pp2", "cp2")
STATUSES = ("equal", "differs", "refused", "crashes", "unbuilt")
RANKS = 2
LIMIT = 150.0  # seconds that a rank may take for a plan on a busy machine
_TO_BUILD = 120  # seconds to find a model and a batch
_PATIENCE = 30.0  # seconds that a rank may keep the other waiting


@dataclass(frozen=True)
class Cell:
    """What became of a type under a plan.

    Args:
        status: one of ``STATUSES``.
        difference: the largest difference from one device, relative to a tensor's largest value.
        reason: the tensor that differs, or the first line of the error.
    """

    status: str
    difference: float | None = None
    reason: str = ""


def compare(model: Tiny, plan: str) -> Cell:
    """Compare a type under a plan with one device; both ranks must make the call, and only rank 0 compares."""
    given: Any = parse_plan(plan)
    with in_float64():
        built: Any = model.build()
        averages_over = None if find_loss(built) else "labels" if "labels" in model.batch else "rows"
        config = mw.ToDistributedConfig(
            plan=mw.ParallelPlan(**given),
            timeout_s=_PATIENCE,
            loss_averages_over=averages_over,
            gather_logits=model.gathers_logits,
        )
        try:
            built, _, batches = mw.to_distributed(built, None, [model.batch], config=config)
        except mw.PlanError as error:
            return Cell("refused", reason=_first_line(error))
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


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return " ".join(" ".join(lines[: 3 if lines[0].endswith(":") else 1]).split())[:400]


def _crash(error: BaseException) -> Cell:
    """Return the cell of an error that is no refusal of a plan, with the place that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    return Cell("crashes", reason=f"{type(error).__name__}: {_first_line(error)[:250]} ({place})")


def _run_rank(rank: int, port: int, model: Tiny, plans: Sequence[str], output: Path) -> None:
    """Run a type under plans in a forked process, which writes a line for each."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with output.open("a") as file:

        def report(plan: str, cell: Cell) -> None:
            print(json.dumps([plan, asdict(cell)]), file=file, flush=True)

        start_process_group(torch.device("cpu"), LIMIT)
        for plan in plans:
            try:
                with own_groups():
                    cell = compare(model, plan)
            except mw.PlanError as error:
                report(plan, Cell("refused", reason=_first_line(error)))
                return  # not every rank need have raised it
            except BaseException as error:  # any error of a model, or of a process that ends, is the result
                report(plan, _crash(error))
                return
            report(plan, cell)


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
        return {plan: Cell("unbuilt", reason=_first_line(error)) for plan in plans}
    finally:
        signal.alarm(0)
    while left := [plan for plan in plans if plan not in found]:
        cells = _run_ranks(model, left)
        for plan, cell in cells.items():
            # The line that the error names.
            if cell.status == "crashes" and "gather_logits=True" in cell.reason:
                cells |= _run_ranks(dataclasses.replace(model, gathers_logits=True), [plan])
            if cell.status == "refused" and "freeze the statistics" in cell.reason:
                cells |= _run_ranks(dataclasses.replace(model, freezes_statistics=True), [plan])
        found |= cells
    return found


class _TooLongError(BaseException):
    """No ``Exception``, so that the search for a model does not take it for a config's error and go on."""


def _too_slow(*_: object) -> None:
    raise _TooLongError(f"no model and batch within {_TO_BUILD} s")


def _run_ranks(model: Tiny, plans: Sequence[str]) -> dict[str, Cell]:
    """Run a type under plans until one ends the ranks; return the cells of at least one plan."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"rank{rank}.jsonl" for rank in range(RANKS)]
        ranks = [_fork(rank, port, model, plans, Path(folder)) for rank in range(RANKS)]
        _await(ranks, outputs)
        lines = [[json.loads(x) for x in p.read_text().splitlines()] if p.exists() else [] for p in outputs]
        cells = [{plan: Cell(**cell) for plan, cell in found} for found in lines]
        words = [(Path(folder) / f"rank{rank}.err").read_text().strip().splitlines() for rank in range(RANKS)]
    found = {}
    for plan in plans:
        of_ranks = [of_rank[plan] for of_rank in cells if plan in of_rank]
        if found and not of_ranks:
            break  # an earlier plan has ended the ranks
        faults = [cell for cell in of_ranks if cell.status != "equal"]
        faults.sort(key=lambda cell: "PeerFailed" in cell.reason)
        if len(of_ranks) == RANKS and all(cell.status == of_ranks[0].status for cell in of_ranks):
            found[plan] = (faults or of_ranks)[0]
            continue
        if len(of_ranks) == RANKS and faults[0].status in ("equal", "differs"):
            found[plan] = of_ranks[0]
            continue
        last = next((line for lines in words for line in reversed(lines) if line), "ended without a word, or hangs")
        found[plan] = faults[0] if faults else Cell("crashes", reason=last[:300])
        break
    return found


def _fork(rank: int, port: int, model: Tiny, plans: Sequence[str], folder: Path) -> int:
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    try:
        with (folder / f"rank{rank}.err").open("w") as errors:
            os.dup2(errors.fileno(), 2)
            os.dup2(errors.fileno(), 1)
        _run_rank(rank, port, model, plans, folder / f"rank{rank}.jsonl")
    except BaseException:  # nothing may leave a forked process but by os._exit
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)


def _await(ranks: list[int], outputs: list[Path]) -> None:
    """Wait until all ranks have ended; kill those that report nothing for too long, or outlive another one."""
    left, size, since = set(ranks), -1, time.monotonic()
    while left:
        for pid in list(left):
            if os.waitpid(pid, os.WNOHANG)[0]:
                left.discard(pid)
                since = max(since, time.monotonic() - LIMIT + _PATIENCE) if left else since
        written = sum(path.stat().st_size for path in outputs if path.exists())
        if written != size:
            size, since = written, time.monotonic()
        if left and time.monotonic() - since > LIMIT:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            since = time.monotonic()
        time.sleep(0.05)


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
