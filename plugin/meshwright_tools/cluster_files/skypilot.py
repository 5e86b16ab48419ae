"""A task for SkyPilot, as a managed job on spot instances: it goes on elsewhere when a cloud takes a node away."""

from __future__ import annotations

import json
import re

from meshwright.faults.preemption import PREEMPTED
from meshwright_tools.cluster_files.cluster_job import OUTSIDE, PAGE, ClusterJob

_TEXT = """\
# {head}.
# To start it: fill in BUCKET, then sky jobs launch THIS_FILE. {page} says what each part is for.
name: train
num_nodes: {nodes}
resources:
{accelerators}  use_spot: true
  job_recovery:
    max_restarts_on_errors: {outside}
    recover_on_exit_codes: [{preempted}]  # all ranks have saved
workdir: .
file_mounts:
  /checkpoints:
    name: BUCKET
    mode: MOUNT
envs:
{environment}
setup: |
  pip install 'meshwright[hf]'
run: |
  {launch} \\
        train.py
"""
# SkyPilot's names, where they are not the first part of the catalogue's.
_NAMES = {"a100-80": "A100-80GB"}


def text(job: ClusterJob) -> str:
    """Return the YAML that ``sky jobs launch`` takes."""
    launch = job.launch(
        num_processes=f"$((SKYPILOT_NUM_NODES * {job.cluster.per_node}))",
        num_machines='"$SKYPILOT_NUM_NODES"',
        machine_rank='"$SKYPILOT_NODE_RANK"',
        main_process_ip='"$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"',
        job_id='"$SKYPILOT_TASK_ID"',
    )
    device = job.cluster.device.name
    accelerator = _NAMES.get(device, device.split("-")[0].upper())
    name = f"{accelerator}:{job.cluster.per_node}"
    name = name if re.fullmatch(r"[\w:-]+", name) else json.dumps(name)  # a profile's device has any name
    return _TEXT.format(
        head=job.head,
        page=PAGE,
        nodes=job.cluster.nodes,
        accelerators="" if job.cluster.device.is_cpu else f"  accelerators: {name}\n",
        outside=OUTSIDE,
        preempted=PREEMPTED,
        environment="\n".join(f"  {name}: {json.dumps(value)}" for name, value in job.environment.items()),
        launch=launch,
    )
