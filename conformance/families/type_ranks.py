"""Runs the programs of one type on ranks of its own, which are forks of this process.

A type that crashes or hangs ends alone, and its ranks are started again for the plans that remain.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import meshwright as mw
from conformance.families.one_device import own_groups
from meshwright.mesh.process_group import start_process_group

STATUSES = ("equal", "differs", "refused", "crashes", "unbuilt")
LIMIT = 150.0  # seconds that a rank may take for a plan on a busy machine
PATIENCE = 30.0  # seconds that a rank may keep the others waiting


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


Compare = Callable[[str], Cell]


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return " ".join(" ".join(lines[: 3 if lines[0].endswith(":") else 1]).split())[:400]


def _crash(error: BaseException) -> Cell:
    """Return the cell of an error that is no refusal of a plan, with the place that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    return Cell("crashes", reason=f"{type(error).__name__}: {first_line(error)[:250]} ({place})")


def _run_rank(rank: int, count: int, port: int, compare: Compare, plans: Sequence[str], output: Path) -> None:
    """Run a type under plans in a forked process, which writes a line for each."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with output.open("a") as file:

        def report(plan: str, cell: Cell) -> None:
            print(json.dumps([plan, asdict(cell)]), file=file, flush=True)

        start_process_group(torch.device("cpu"), LIMIT)
        for plan in plans:
            try:
                with own_groups() if count > 1 else contextlib.nullcontext():
                    cell = compare(plan)
            except mw.PlanError as error:
                report(plan, Cell("refused", reason=first_line(error)))
                return  # not every rank need have raised it
            except BaseException as error:  # any error of a model, or of a process that ends, is the result
                report(plan, _crash(error))
                return
            report(plan, cell)


def run_ranks(compare: Compare, plans: Sequence[str], *, count: int = 2) -> dict[str, Cell]:
    """Run a type under plans until one ends the ranks; return the cells of at least one plan.

    Args:
        compare: a function that every rank calls with a plan, and whose result on rank 0 counts.
        plans: the plans.
        count: the number of ranks.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"rank{rank}.jsonl" for rank in range(count)]
        ranks = [_fork(rank, count, port, compare, plans, Path(folder)) for rank in range(count)]
        _await(ranks, outputs)
        lines = [[json.loads(x) for x in p.read_text().splitlines()] if p.exists() else [] for p in outputs]
        cells = [{plan: Cell(**cell) for plan, cell in found} for found in lines]
        words = [(Path(folder) / f"rank{rank}.err").read_text().strip().splitlines() for rank in range(count)]
    found = {}
    for plan in plans:
        of_ranks = [of_rank[plan] for of_rank in cells if plan in of_rank]
        if found and not of_ranks:
            break  # an earlier plan has ended the ranks
        faults = [cell for cell in of_ranks if cell.status != "equal"]
        faults.sort(key=lambda cell: "PeerFailed" in cell.reason)
        if len(of_ranks) == count and all(cell.status == of_ranks[0].status for cell in of_ranks):
            found[plan] = (faults or of_ranks)[0]
            continue
        if len(of_ranks) == count and faults[0].status in ("equal", "differs"):
            found[plan] = of_ranks[0]
            continue
        last = next((line for lines in words for line in reversed(lines) if line), "ended without a word, or hangs")
        found[plan] = faults[0] if faults else Cell("crashes", reason=last[:300])
        break
    return found


def _fork(rank: int, count: int, port: int, compare: Compare, plans: Sequence[str], folder: Path) -> int:
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    try:
        with (folder / f"rank{rank}.err").open("w") as errors:
            os.dup2(errors.fileno(), 2)
            os.dup2(errors.fileno(), 1)
        _run_rank(rank, count, port, compare, plans, folder / f"rank{rank}.jsonl")
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
                since = max(since, time.monotonic() - LIMIT + PATIENCE) if left else since
        written = sum(path.stat().st_size for path in outputs if path.exists())
        if written != size:
            size, since = written, time.monotonic()
        if left and time.monotonic() - since > LIMIT:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            since = time.monotonic()
        time.sleep(0.05)
