"""What the schedulers' files have in common: a plan, the nodes it needs, and the command that starts it on each."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from meshwright.choose.given_plan import PLAN_VARIABLE, plan_line
from meshwright.printable import printable
from meshwright_plan.job.candidate import Candidate
from meshwright_plan.machine.hardware import Cluster

GRACE = 120  # seconds before the end in which the ranks save
RESTARTS = 3  # that the launcher makes by itself after a process has failed
OUTSIDE = 10  # that the scheduler makes after a node has failed
PAGE = "docs/launching.md"


@dataclass(frozen=True, kw_only=True)
class ClusterJob:
    """A job of one launcher on each node of a cluster.

    Args:
        plan: a plan that this version can run.
        cluster: the nodes, with a process for each device.
        mixed_precision: accelerate's name of the planned precision: no, bf16 or fp8.
        model: the name of the model, for the head of the file.
    """

    plan: Candidate
    cluster: Cluster
    mixed_precision: str
    model: str

    @property
    def head(self) -> str:
        """One printable line that says what the file starts, for a comment: the names may hold anything."""
        of = self.cluster
        return printable(f"{self.model} under {self.plan.label} on {of.nodes} x {of.per_node} {of.device.name}")

    @property
    def environment(self) -> dict[str, str]:
        """The plan, exactly; its words would leave out what does not change the layout."""
        return {PLAN_VARIABLE: plan_line(self.plan.plan.changed)}

    def launch(self, **of_scheduler: str) -> str:
        """Return the command of one node, as a shell reads it, up to the script.

        Args:
            of_scheduler: further options of the launcher, whose values are words of the shell, such as variables that
                the scheduler sets.
        """
        options = {"max_restarts": str(RESTARTS), **of_scheduler}
        if self.mixed_precision != "no":
            options["mixed_precision"] = self.mixed_precision
        words = [f"--{name} {value}" for name, value in options.items()]
        return " \\\n        ".join(["meshwright launch", *(["--cpu"] if self.cluster.device.is_cpu else []), *words])

    def exports(self) -> str:
        """Return the environment as lines of a shell."""
        return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in self.environment.items())
