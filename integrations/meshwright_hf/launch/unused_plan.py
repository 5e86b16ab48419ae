"""Warns if the script of ``meshwright launch`` does not use the plan: it trains by plain data parallelism, or not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from meshwright.choose.plan_file import USED_VARIABLE
from meshwright_hf.launch.job import Launch, note_of_processes, say

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
    if not job.names(b"meshwright"):
        say(
            f"{job.script} does not import meshwright. Unless a module that it imports does, the plan "
            f"{job.plan.label!r} has no effect, and {_instead(job)}"
        )
    with note_of_processes(USED_VARIABLE) as mark:
        yield
        if not mark.exists():
            say(
                f"the plan {job.plan.label!r} was never used: no process called to_distributed, or an integration that "
                f"does. Without it, {_instead(job)}. To train under the plan, change a line of the script:\n{CURES}"
            )


def _instead(job: Launch) -> str:
    return (
        f"a Trainer or an Accelerator trains by DistributedDataParallel, with {job.num_processes} times the batch of "
        "one process"
    )
