"""Writes a configuration file for plain ``accelerate launch`` with the processes and machines of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.choose.plan_file import PLAN_VARIABLE, plan_line


def accelerate_config(fields: dict[str, Any], *, label: str, gpus: int, gpus_per_node: int, cpu: bool,
                      saved: Path | None, mixed_precision: str = "no") -> str:  # fmt: skip
    """Return the YAML text of a configuration file for ``accelerate launch --config_file``.

    The file sets the number of processes and machines. It cannot contain the plan, since accelerate refuses unknown
    keys. The script gets the plan from an environment variable, which a comment in the file shows.

    Args:
        fields: the plan's fields, those of ``ParallelPlan``.
        label: the plan in words, such as "dp2 tp2".
        gpus: the number of processes over all machines.
        gpus_per_node: the number of processes per machine.
        cpu: whether the processes run on CPU.
        saved: the path of the plan file, if one was written; None puts the plan into the variable.
        mixed_precision: accelerate's name of the planned precision: no, bf16 or fp8.
    """
    machines = -(-gpus // gpus_per_node)
    plan = str(saved) if saved else f"'{plan_line(fields)}'"
    variables = f"{PLAN_VARIABLE}={plan} " + ("ACCELERATE_USE_CPU=true " if cpu else "")
    address = " --machine_rank RANK --main_process_ip ADDRESS_OF_MACHINE_0" if machines > 1 else ""
    lines = [
        f"# {label}. This file cannot hold the plan, so the environment passes it on:",
        f"#   {variables}accelerate launch --config_file THIS_FILE{address} train.py",
        "compute_environment: LOCAL_MACHINE",
        # torchrun's launcher, for CPUs too: MULTI_CPU would start one process.
        f"distributed_type: {'MULTI_GPU' if gpus > 1 else repr('NO')}",
        f"use_cpu: {str(cpu).lower()}",
        f"num_processes: {gpus}",
        f"num_machines: {machines}",
        "machine_rank: 0",
        "main_process_port: 29500",
        "rdzv_backend: static",
        "same_network: true",
        "main_training_function: main",
        f"mixed_precision: {mixed_precision if mixed_precision != 'no' else repr('no')}",
    ]
    return "\n".join(lines)
