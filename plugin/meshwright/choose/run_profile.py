"""The hardware profile of a training run, which must have been measured with the run's processes."""

from __future__ import annotations

import os

from meshwright.errors import PlanError
from meshwright.planner.machine.hardware import HardwareProfile

PROFILE_FILE = "machine.json"  # the file that messages propose for a profile


def calibrate_command(*, processes: int, nodes: int = 1, path: str | os.PathLike[str] = PROFILE_FILE) -> str:
    """Return the command that measures a machine for a run.

    Args:
        processes: number of processes per node.
        nodes: number of nodes.
        path: file of the profile.

    Example:
        >>> calibrate_command(processes=4)
        'meshwright calibrate --processes 4 --output machine.json'
    """
    if nodes > 1:
        launched = f"torchrun --nnodes {nodes} --nproc-per-node {processes} ... -m meshwright.cli calibrate"
    else:
        launched = f"meshwright calibrate --processes {processes}"
    return f"{launched} --output {os.fspath(path)}"


def load_run_profile(path: str | os.PathLike[str], *, processes: int, nodes: int = 1) -> HardwareProfile:
    """Read a profile, and check that it is valid for a run.

    Args:
        path: file of the profile.
        processes: number of the run's processes per node.
        nodes: number of its nodes.

    Raises:
        PlanError: if the file holds no profile, or the profile was measured with other processes.
    """
    command = calibrate_command(processes=processes, nodes=nodes, path=path)
    profile = HardwareProfile.load(path, command=command)
    if profile.device is None:
        return profile
    reason = profile.against_processes(processes)
    if reason is None and nodes > 1 and profile.nodes == 1:
        reason = f"profile {profile.name!r} measured one node, but this run has {nodes} nodes"
    if reason is not None:
        raise PlanError(f"{path}: {reason}. Measure with {command}")
    return profile
