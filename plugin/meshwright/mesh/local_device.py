"""Determines which GPU of its host a process uses, and checks that no other process uses it."""

from __future__ import annotations

import logging
import os
import socket

import torch
import torch.distributed as dist

from meshwright.errors import PlanError
from meshwright.mesh.host_wire import SHARE_GPUS, shares_gpus

# The variables of launchers that do not set LOCAL_RANK: the rank, the number on the host, and the number of processes.
# Others name them PREFIX_RANK, PREFIX_LOCAL_RANK and PREFIX_SIZE: Open MPI, MVAPICH, jsrun, Horovod.
_LAUNCHERS = (
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
    ("PALS_RANKID", "PALS_LOCAL_RANKID", "PALS_SIZE"),
    ("FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_SIZE"),
)
_STEP = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")  # of a step of Slurm, which only srun starts

logger = logging.getLogger(__name__)


def _launchers() -> list[tuple[str, str, str]]:
    prefixes = [name.removesuffix("_SIZE") for name in sorted(os.environ) if name.endswith("_SIZE")]
    return [*_LAUNCHERS, *((f"{prefix}_RANK", f"{prefix}_LOCAL_RANK", f"{prefix}_SIZE") for prefix in prefixes)]


def local_rank(rank: int, world: int) -> int:
    """Return a process's number on its host: from torchrun's LOCAL_RANK, from srun or mpirun, or else its rank.

    A job's variables also reach processes that a script starts by itself. So a launcher counts only if it has started
    all processes.

    Args:
        rank: the process's rank.
        world: the number of processes.
    """
    if (number := os.environ.get("LOCAL_RANK")) is not None:
        return int(number)
    for _, name, size in _launchers():
        if name in os.environ and os.environ.get(size) == str(world):
            return int(os.environ[name])
    return rank


def check_is_alone() -> None:
    """Check that a process without a process group is not one of several that srun, mpirun or jsrun has started.

    A batch script of Slurm has the job's variables too, but is one process, unless srun has started a step in it.

    Raises:
        PlanError: if the launcher has started several processes; the message says how to make them one group.
    """
    if dist.is_initialized() or "WORLD_SIZE" in os.environ:
        return
    is_batch_script = os.environ.get("ENVIRONMENT") == "BATCH"
    for rank, local, size in (_STEP, *_launchers()[is_batch_script:]):
        count = os.environ.get(size, "")
        if count.isdecimal() and int(count) > 1 and (rank in os.environ or local in os.environ):
            raise PlanError(
                f"{size}={count}: {count} processes were started, but without RANK and WORLD_SIZE they are no group, "
                "so each would train a model of its own. Start one process per node, which starts the others: "
                f"meshwright launch --num_processes {count} SCRIPT. Or set in each process, before it imports torch: "
                f"RANK=${rank} WORLD_SIZE={count} LOCAL_RANK=${local} MASTER_ADDR=HOST_OF_RANK_0 MASTER_PORT=29500. If "
                "they are meant to be separate runs, say so: to_distributed(..., device_num=1)"
            )


def check_one_rank_per_gpu(store: dist.Store, rank: int, world: int, device: torch.device) -> None:
    """Check that no two ranks use the same GPU, which NCCL does not support. Every rank must make the call.

    Args:
        store: the store of all ranks, which need no process group yet.
        rank: this rank.
        world: the number of ranks.
        device: this rank's GPU.

    Raises:
        PlanError: on every rank, if two ranks use one GPU; the message names both.
        RuntimeError: if other ranks do not come within the store's timeout.
    """
    # A program may leave its process group and join another one, and a launcher keeps its store meanwhile.
    store = dist.PrefixStore(f"gpus{store.add(f'calls of rank {rank}', 1)}", store)
    host, gpu = socket.gethostname(), f"{torch.cuda.get_device_properties(device).uuid}"
    if store.add(f"ranks on {host} {gpu}", 1) == 1:
        store.set(f"first rank on {host} {gpu}", str(rank))
    else:
        first = store.get(f"first rank on {host} {gpu}").decode()
        count = torch.cuda.device_count()
        store.set(
            "shared gpu",
            f"rank {first} and rank {rank} both use {device} of host {host}, and NCCL needs a GPU for each rank. Rank "
            f"{rank} sees {count} GPU{'s' if count != 1 else ''}. Launch at most one process per GPU (torchrun "
            f"--nproc-per-node {count} SCRIPT), or, with a launcher of your own, set LOCAL_RANK in each process to its "
            f"number on its host. To test a plan on fewer GPUs than ranks, slowly: {SHARE_GPUS}=1",
        )
    if store.add("ranks with a gpu", 1) == world:
        store.set("all have a gpu", "")
    store.wait(["all have a gpu"])
    if store.check(["shared gpu"]):
        raise PlanError(store.get("shared gpu").decode())


def check_device_num(device_num: int | None, device: torch.device) -> None:
    """Check the ``device_num`` of a call against the GPUs of this host.

    A process that sees one GPU only may be one of several for which the launcher has chosen GPUs.

    Raises:
        PlanError: if this host has fewer GPUs.
    """
    if device.type != "cuda" or device_num is None:
        return
    count = torch.cuda.device_count()
    if 1 < count < device_num and not shares_gpus():
        raise PlanError(
            f"device_num={device_num}, but this host has {count} GPUs, and each rank needs one; write "
            f"device_num={count}, and more nodes: node_num=..., or make more GPUs visible (CUDA_VISIBLE_DEVICES)"
        )


def warn_of_unused_gpus(device: torch.device, rank: int) -> None:
    """Warn once that a model will train on the CPU of a host with GPUs, since its parameters are on the CPU."""
    if device.type == "cpu" and rank == 0 and torch.cuda.is_available():
        logger.warning(
            "the model is on the CPU, so it trains there, although this host has %d GPU(s). To use them, move the "
            "model before the call: torch.cuda.set_device(int(os.environ['LOCAL_RANK'])); model.to('cuda'). To "
            "train on the CPU without this message, hide the GPUs: CUDA_VISIBLE_DEVICES=''",
            torch.cuda.device_count(),
        )
