"""Warns if the script of ``meshwright launch`` does not use the plan: it trains by plain data parallelism, or not."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from meshwright.choose.plan_file import USED_VARIABLE
from meshwright_hf.launch_job import Launch

CURES = """\
  Trainer:     from meshwright_hf.trainer import MeshwrightTrainer as Trainer  # was: from transformers import Trainer
  accelerate:  from meshwright_hf.accelerate import Accelerator  # was: from accelerate import Accelerator
  plain loop:  model, optimizer, loader = meshwright.to_distributed(model, optimizer, loader)"""


@contextlib.contextmanager
def watched_plan(job: Launch) -> Iterator[None]:
    """Warn at the start if the script does not name meshwright, and at the end if no process asked for the plan.

    The warning at the end is printed unless the context ends by an exception, as it does if a process fails.

    Args:
        job: the launch; the processes must inherit this process's environment while the context is open.
    """
    if job.plan is None or job.plan.world_size == 1 or job.machine_rank != 0:
        yield
        return
    if not _may_use(job):
        _say(
            f"{job.script} does not import meshwright. Unless a module that it imports does, the plan "
            f"{job.plan.label!r} has no effect, and {_instead(job)}"
        )
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        mark = Path(folder, "used")
        os.environ[USED_VARIABLE] = str(mark)
        try:
            yield
        finally:
            os.environ.pop(USED_VARIABLE, None)
        if not mark.exists():
            _say(
                f"the plan {job.plan.label!r} was never used: no process called to_distributed, or an integration that "
                f"does. Without it, {_instead(job)}. To train under the plan, change a line of the script:\n{CURES}"
            )


def _may_use(job: Launch) -> bool:
    """Return whether the script's text names meshwright; True for modules, which may be anywhere."""
    if job.module:
        return True
    try:
        return b"meshwright" in Path(job.script).read_bytes()
    except OSError:
        return True


def _instead(job: Launch) -> str:
    return (
        f"a Trainer or an Accelerator trains by DistributedDataParallel, with {job.num_processes} times the batch of "
        "one process"
    )


def _say(text: str) -> None:
    print(f"meshwright launch: {text}", file=sys.stderr, flush=True)
