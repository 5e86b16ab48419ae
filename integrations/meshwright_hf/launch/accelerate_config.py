"""Writes a configuration file for plain ``accelerate launch`` with the processes and machines of a plan."""

from __future__ import annotations

from pathlib import Path

from meshwright.choose.plan_file import PLAN_VARIABLE, plan_line
from meshwright.planner.job.candidate import Candidate
from meshwright.planner.machine.hardware import Cluster
from meshwright.printable import shell_word


def accelerate_config(plan: Candidate, cluster: Cluster, *, saved: Path | None, mixed_precision: str = "no") -> str:
    """Return the YAML that ``accelerate launch --config_file`` takes.

    The file sets the number of processes and machines. It cannot contain the plan, since accelerate refuses unknown
    keys. The script gets the plan from an environment variable, which a comment in the file shows.

    Args:
        plan: a plan that this version can run.
        cluster: the machines, with a process for each device.
        saved: the plan file beside it, if one was written.
        mixed_precision: accelerate's name of the planned precision: no, bf16 or fp8.
    """
    cpu = cluster.device.is_cpu
    value = shell_word(saved if saved else plan_line(plan.runnable_fields()))
    variables = f"{PLAN_VARIABLE}={value} " + ("ACCELERATE_USE_CPU=true " if cpu else "")
    address = " --machine_rank RANK --main_process_ip ADDRESS_OF_MACHINE_0" if cluster.nodes > 1 else ""
    lines = [
        f"# {plan.label}. This file cannot hold the plan, so the environment passes it on:",
        f"#   {variables}accelerate launch --config_file THIS_FILE{address} train.py",
        "compute_environment: LOCAL_MACHINE",
        # torchrun's launcher, for CPUs too: MULTI_CPU would start one process.
        f"distributed_type: {'MULTI_GPU' if cluster.gpus > 1 else repr('NO')}",
        f"use_cpu: {str(cpu).lower()}",
        f"num_processes: {cluster.gpus}",
        f"num_machines: {cluster.nodes}",
        "machine_rank: 0",
        "main_process_port: 29500",
        "rdzv_backend: static",
        "same_network: true",
        "main_training_function: main",
        f"mixed_precision: {mixed_precision if mixed_precision != 'no' else repr('no')}",
    ]
    return "\n".join(lines)
