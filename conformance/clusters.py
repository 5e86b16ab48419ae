"""``python -m conformance.clusters``: kill and preempt jobs of a local Slurm and a local Ray, and count what holds."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from harness.slurm import local_slurm, why_no_slurm
from support.preemptions import NODES, PER_NODE, Disturbed, RayJob, SlurmJob, emitted, ray_nodes

LEAST = 3  # steps between two disturbances
Start = Callable[[Path], Disturbed]


def main(
    scheduler: Annotated[str, typer.Argument(help="slurm or ray")] = "slurm",
    runs: Annotated[int, typer.Option(help="jobs that are disturbed, each three times")] = 10,
    first: Annotated[int, typer.Option(help="number of the first job, which says what is done to which rank")] = 0,
    kind: Annotated[str, typer.Option(help="program: loop or trainer")] = "loop",
) -> None:
    """Run jobs on two local nodes, disturb each three times, and print a table of what held.

    Exits with status 1 if a job did not end with the weights of an undisturbed one.

    Examples:

        python -m conformance.clusters slurm
        python -m conformance.clusters ray --runs 1 --first 3
    """
    if why := why_not(scheduler):
        raise typer.BadParameter(why)
    held = dict.fromkeys(("train to the end", *(name for name, _ in DISTURB[scheduler])), 0)
    with tempfile.TemporaryDirectory(prefix="clusters-") as name, local_cluster(scheduler, Path(name), kind) as start:
        expected = start(Path(name, "whole")).finish()
        assert expected is not None, "the undisturbed job failed"
        for number in range(first, first + runs):
            began = time.monotonic()
            job = start(Path(name, f"job-{number}"))
            went_on, why = disturbed(job, scheduler, number)
            is_equal = job.result == expected and job.repeats_little
            for what, is_held in zip(held, (True, *went_on), strict=True):
                held[what] += is_held and is_equal
            words = f"{'; '.join(job.disturbances)}; {time.monotonic() - began:.0f} s"
            print(f"{time.strftime('%H:%M:%S')} {'held' if is_equal and all(went_on) else 'WRONG'} {words}", flush=True)
            if not is_equal:
                print(why or job.log, flush=True)
    table = Table(f"{scheduler}, {NODES} nodes x {PER_NODE} ranks: the weights of an undisturbed job, bitwise", "held")
    for what, count in held.items():
        table.add_row(what, f"{count} of {runs}")
    console = Console()
    console.width = max(console.width, 120)
    console.print(table)
    raise typer.Exit(any(count < runs for count in held.values()))


def why_not(scheduler: str) -> str | None:
    """Return why this machine cannot have a cluster; None if it can."""
    if scheduler == "slurm":
        return why_no_slurm()
    if scheduler != "ray":
        return f"{scheduler} is neither slurm nor ray"
    return None if importlib.util.find_spec("ray") else "a local Ray needs ray; pip install 'ray[train]'"


@contextlib.contextmanager
def local_cluster(scheduler: str, folder: Path, kind: str = "loop") -> Iterator[Start]:
    """Start a cluster; yield a function that starts a job in a new folder."""
    script = emitted(folder, scheduler)
    if scheduler == "ray":
        with ray_nodes() as cluster:
            yield lambda target: RayJob.start(cluster, script, target, kind)
    else:
        with local_slurm(folder / "slurm", NODES) as slurm:
            batch = folder / "job.sbatch"
            batch.write_text(script)
            slurm.call("sbatch", "--test-only", str(batch))
            yield lambda target: SlurmJob.submit(slurm, batch, target, kind=kind)


def disturbed(job: Disturbed, scheduler: str, number: int) -> tuple[list[bool], str]:
    """Disturb a job three times and wait for its end; return after which of these it went on, and why it is silent."""
    went_on: list[bool] = []
    try:
        for _, disturb in DISTURB[scheduler]:
            if job.train_on(LEAST):
                disturb(job, number)
            went_on.append(job.train_on(LEAST))
        job.finish()
    except TimeoutError as error:  # the next job shows whether it is this one or the machine
        job.stop()
        return went_on + [False] * (len(DISTURB[scheduler]) - len(went_on)), str(error)
    return went_on, ""


def _kill(job: Disturbed, number: int) -> None:
    job.kill(number % (NODES * PER_NODE), launcher=isinstance(job, SlurmJob) and number % 2 == 1)


def _announce(job: Disturbed, number: int) -> None:
    if isinstance(job, SlurmJob) and number % 3:
        job.announce_end()
    else:
        job.signal_rank(number % (NODES * PER_NODE), signal.SIGUSR1 if number % 2 else signal.SIGTERM)


def _take_away(job: Disturbed, number: int) -> None:
    if isinstance(job, SlurmJob):
        job.requeue()
    elif isinstance(job, RayJob):
        job.lose_node()


DISTURB: dict[str, list[tuple[str, Callable[[Disturbed, int], None]]]] = {
    "slurm": [("SIGKILL of a rank or a launcher", _kill), ("a signal announces the end", _announce),
              ("Slurm requeues the job", _take_away)],
    "ray": [("SIGKILL of a rank", _kill), ("a signal announces the end", _announce), ("a node is lost", _take_away)],
}  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
