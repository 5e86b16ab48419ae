"""A script for Ray Train: a worker for each rank calls the user's function, and a new group of them after a failure."""

from __future__ import annotations

import json

from meshwright.faults.preemption import PREEMPTED
from meshwright_tools.cluster_files.cluster_job import OUTSIDE, PAGE, ClusterJob

_TEXT = '''\
# {head}.
"""Starts a worker for each rank.

To start it beside train.py, which defines the function train: python THIS_FILE [STORAGE]. STORAGE is a folder that all
nodes share. {page} says what each part is for.
"""

import os
import sys

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from meshwright_hf.launch.job import job_environment

NAME = "train"  # of the job: a training under another name does not go on from its checkpoints
ENVIRONMENT = {environment}


def work(settings: dict) -> None:
    """Run one rank: the variables are those of meshwright launch."""
    os.environ.update(ENVIRONMENT | job_environment(NAME))
    from train import train

    try:
        train(**settings)
    except SystemExit as end:
        if end.code != {preempted}:
            raise
        raise RuntimeError("preempted: all ranks have saved, and go on when Ray starts them again") from None


if __name__ == "__main__":
    # SIGTERM and SIGUSR1 to a worker make all ranks save. A process can listen to them in its main thread alone, and
    # Ray Train calls the function in another one.
    ray.init(runtime_env={{"worker_process_setup_hook": "meshwright.faults.preemption.listen"}})
    TorchTrainer(
        work,
        train_loop_config={{}},  # the arguments of train
        torch_config=TorchConfig(backend="{backend}"),
        scaling_config=ScalingConfig(num_workers={workers}, use_gpu={use_gpu}),
        run_config=RunConfig(
            name=NAME, storage_path=sys.argv[1] if len(sys.argv) > 1 else None,
            failure_config=FailureConfig(max_failures={outside}),
        ),
    ).fit()
'''


def text(job: ClusterJob) -> str:
    """Return the script that runs on a node of the Ray cluster."""
    environment = dict(job.environment)
    if job.cluster.device.is_cpu:
        environment["ACCELERATE_USE_CPU"] = "true"
    if job.mixed_precision != "no":
        environment["ACCELERATE_MIXED_PRECISION"] = job.mixed_precision
    listed = "".join(f"    {json.dumps(name)}: {value!r},\n" for name, value in environment.items())
    return _TEXT.format(
        head=job.head,
        page=PAGE,
        environment="{\n" + listed + "}",
        preempted=PREEMPTED,
        backend="gloo" if job.cluster.device.is_cpu else "nccl",
        workers=job.cluster.nodes * job.cluster.per_node,
        use_gpu=not job.cluster.device.is_cpu,
        outside=OUTSIDE,
    )
