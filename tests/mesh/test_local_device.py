"""Which GPU a process takes, with GPUs that are made up: no test needs one."""

from __future__ import annotations

import contextlib
import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.distribute.check_arguments import check_devices
from meshwright.errors import PlanError
from meshwright.mesh import process_mesh
from meshwright.mesh.host import check_device_num, check_one_rank_per_gpu, local_rank, warn_of_unused_gpus
from meshwright.mesh.process_group import backend_of_new_groups, device_for, wire_device
from meshwright.mesh.process_mesh import ProcessMesh

NAMES = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "SLURM_LOCALID", "SLURM_NTASKS", "OMPI_COMM_WORLD_LOCAL_RANK")


@pytest.fixture(autouse=True)
def _four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device.index}"))


@pytest.mark.parametrize(("environment", "expected"), [
    ({"LOCAL_RANK": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8"}, 3),
    ({"SLURM_LOCALID": "1", "SLURM_NTASKS": "8"}, 1),
    ({"OMPI_COMM_WORLD_LOCAL_RANK": "2", "OMPI_COMM_WORLD_SIZE": "8"}, 2),
    ({"JSM_NAMESPACE_LOCAL_RANK": "2", "JSM_NAMESPACE_SIZE": "8"}, 2),
    ({"FLUX_TASK_LOCAL_ID": "2", "FLUX_JOB_SIZE": "8"}, 2),
    ({"SLURM_LOCALID": "0", "SLURM_NTASKS": "1"}, 5),  # one task, whose script has started the processes
    ({}, 5),
])  # fmt: skip
def test_the_number_on_the_host(environment: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert local_rank(5, 8) == expected


STEP = {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("environment", "device_num", "says"),
    [
        (STEP, None, r"SLURM_NTASKS=2: .* RANK=\$SLURM_PROCID WORLD_SIZE=2 LOCAL_RANK=\$SLURM_LOCALID"),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "2", "ENVIRONMENT": "BATCH"}, None, "SLURM_STEP_NUM_TASKS=2: 2 processes"),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}, None, r"RANK=\$OMPI_COMM_WORLD_RANK"),
        ({"PMI_SIZE": "2", "MPI_LOCALRANKID": "1"}, None, r"meshwright launch --num_processes 2 SCRIPT.*\$PMI_RANK"),
        ({"JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_RANK": "0"}, None, r"RANK=\$JSM_NAMESPACE_RANK WORLD_SIZE=2"),
        ({"MVP_COMM_WORLD_SIZE": "2", "MVP_COMM_WORLD_LOCAL_RANK": "0"}, None, r"RANK=\$MVP_COMM_WORLD_RANK"),
        ({"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "0"}, None, r"LOCAL_RANK=\$FLUX_TASK_LOCAL_ID"),
        (STEP, 1, None),
        ({"BATCH_SIZE": "8", "LOCAL_RANK": "0"}, None, None),
        ({**STEP, "WORLD_SIZE": "1"}, None, None),
        ({**STEP, "ENVIRONMENT": "BATCH"}, None, None),  # the batch script itself is one process
        ({"SLURM_NTASKS": "8"}, None, None),  # a shell of salloc
        ({**STEP, "SLURM_NTASKS": "1"}, None, None),
    ],
)
def test_tasks_of_a_cluster_without_a_group_are_no_separate_runs_in_silence(
    environment: dict[str, str], device_num: int | None, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with contextlib.nullcontext() if says is None else pytest.raises(PlanError, match=says):
        check_devices(device_num, None)


def test_srun_gives_each_rank_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "6", "WORLD_SIZE": "8", "SLURM_LOCALID": "2", "SLURM_NTASKS": "8"}.items():
        monkeypatch.setenv(name, value)
    assert device_for(torch.device("cuda")) == torch.device("cuda", 2)


def check_on_all(devices: list[int], store: dist.Store) -> list[Any]:
    """Check the ranks' GPUs in threads, and return what each rank raised."""
    raised: list[Any] = [None] * len(devices)

    def check(rank: int) -> None:
        try:
            check_one_rank_per_gpu(store, rank, len(devices), torch.device("cuda", devices[rank]))
        except PlanError as error:
            raised[rank] = str(error)

    threads = [threading.Thread(target=check, args=(rank,)) for rank in range(len(devices))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_two_ranks_on_one_gpu_are_refused_by_all_ranks() -> None:
    store = dist.HashStore()
    assert check_on_all([0, 1, 2, 3], store) == [None] * 4
    messages = check_on_all([0, 1, 1, 3], store)
    assert check_on_all([3, 2, 1, 0], store) == [None] * 4  # nothing is left of the earlier calls
    assert len(set(messages)) == 1
    assert "both use cuda:1" in messages[0] and "rank 1" in messages[0] and "rank 2" in messages[0]


def test_device_num_beyond_the_gpus_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    check_device_num(4, torch.device("cuda:0"))
    check_device_num(8, torch.device("cpu"))
    with pytest.raises(PlanError, match="device_num=8, but this host has 4 GPUs"):
        check_device_num(8, torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # srun --gpus-per-task=1
    check_device_num(8, torch.device("cuda:0"))


@pytest.mark.parametrize(("device", "rank", "says"), [("cpu", 0, True), ("cpu", 1, False), ("cuda:0", 0, False)])
def test_a_model_left_on_the_cpu(device: str, rank: int, says: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_unused_gpus(torch.device(device), rank)
    assert ("although this host has 4 GPU(s)" in caplog.text) is says


@pytest.mark.parametrize(("default", "added", "of_hosts"), [
    ("cpu:gloo,cuda:nccl", None, "cpu"),
    ("cpu:gloo,cuda:gloo", None, "cpu"),
    ("cuda:nccl", "cpu:gloo,cuda:nccl", "cuda"),  # accelerate's
])  # fmt: skip
def test_hosts_agree_over_gloo(default: str, added: str | None, of_hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = SimpleNamespace(backends=added or default)  # a group that was made here
    monkeypatch.setattr(dist, "get_backend_config", lambda group: default if group is None else group.backends)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert backend_of_new_groups() == added
    assert wire_device().type == of_hosts
    assert wire_device(group=own).type == "cpu"  # type: ignore[arg-type]


def test_groups_of_a_mesh_can_send_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def new_group(ranks: list[int], **options: Any) -> Any:
        made.append((ranks, options["backend"]))

    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_rank", lambda: 9)
    monkeypatch.setattr(process_mesh, "DeviceMesh", lambda *_, **__: SimpleNamespace())
    mesh = ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "tp"])
    mesh._create_in_order("cpu")
    assert made == [(ranks, "cpu:gloo,cuda:nccl") for ranks in ([0, 2], [1, 3], [0, 1], [2, 3])]
