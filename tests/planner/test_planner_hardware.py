"""Devices, clusters and profiles: what is right is read, what is wrong is named."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.choose.picked_plan import device_at_hand, load_run_profile
from meshwright.errors import PlanError
from meshwright_plan.machine.devices import device_of_driver
from meshwright_plan.machine.hardware import (
    CATALOGUE,
    PROFILE_VERSION,
    Cluster,
    Coefficients,
    HardwareProfile,
    device,
)
from support.logs import logged

# Names of drivers, and gigabytes of memory.
DRIVERS = {
    ("NVIDIA A100-SXM4-40GB", 42): "a100-40", ("NVIDIA A100 80GB PCIe", 85): "a100-80",
    ("NVIDIA H100 80GB HBM3", 85): "h100-sxm", ("NVIDIA H100 PCIe", 85): "h100-pcie",
    ("NVIDIA H100 96GB HBM2e", 102): "h100-96", ("NVIDIA H800", 85): "h800", ("NVIDIA H20", 102): "h20",
    ("NVIDIA H200", 150): "h200", ("NVIDIA B200", 190): "b200", ("NVIDIA B300 SXM6 AC", 288): "b300",
    ("NVIDIA GB200", 199): "gb200", ("NVIDIA GB300", 298): "gb300", ("NVIDIA L4", 24): "l4",
    ("NVIDIA L40S", 48): "l40s",
    ("NVIDIA A10G", 24): "a10g", ("NVIDIA GeForce RTX 4090", 25): "rtx-4090", ("Tesla V100-SXM2-16GB", 17): "v100-16",
    ("Tesla V100-PCIE-32GB", 34): "v100-32", ("AMD Instinct MI300X", 206): "mi300x",
    ("AMD Instinct MI325X", 275): "mi325x", ("AMD Instinct MI350X", 309): "mi350x",
    ("AMD Instinct MI355X", 309): "mi355x", ("NVIDIA GH200 480GB", 102): None,
}  # fmt: skip


def test_a_device_is_found_by_the_name_that_its_driver_gives() -> None:
    """All of the catalogue but those that are not driven through torch.cuda."""
    for (name, memory), expected in DRIVERS.items():
        found = device_of_driver(name, memory * 1e9)
        assert (found and found.name) == expected, name
    assert set(DRIVERS.values()) - {None} == CATALOGUE.keys() - {"cpu", "gaudi3"}


def test_a_gpu_that_nobody_lists_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA GH200 480GB", total_memory=102 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    with logged(level=logging.WARNING) as lines:
        found = [device_at_hand(torch.device("cuda")) for _ in range(2)]
    assert {(x.name, x.memory) for x in found} == {("a100-80", 102e9)}
    assert len(lines) == 1 and "no NVIDIA GH200 480GB" in lines[0] and "hardware_profile=" in lines[0]


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_device_says_where_its_figures_come_from(name: str) -> None:
    assert CATALOGUE[name].source
    assert CATALOGUE[name].name == name


@pytest.mark.parametrize(
    "name",
    (
        "a100-40", "a100-80", "h100-sxm", "h100-96", "h100-pcie", "h200", "b200", "gb200", "gb300", "l40s", "rtx-4090",
        "mi300x", "cpu",
    ),
)  # fmt: skip
def test_catalogue_is_whole(name: str) -> None:
    assert device(name.upper().replace("-", "_")).name == name


@pytest.mark.parametrize(("name", "full"), [("h100", "h100-sxm"), ("a100", "a100-80"), ("4090", "rtx-4090")])
def test_a_short_name_is_the_usual_device(name: str, full: str) -> None:
    assert device(name).name == full


@pytest.mark.parametrize(("name", "near"), [("h110", "h100-sxm"), ("rtx-4091", "rtx-4090")])
def test_unknown_device_names_the_nearest(name: str, near: str) -> None:
    with pytest.raises(PlanError, match=near):
        device(name)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"gpus": 12, "gpus_per_node": 8}, "use 8 or 16"),
        ({"gpus": 0}, "--gpus=0"),
        ({"gpus": 8, "gpus_per_node": -1}, "--gpus-per-node=-1"),
        ({"gpus": 8, "slow_link": 0.0}, "slow_link"),
    ],
)
def test_bad_clusters_are_named(sizes: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        Cluster(device=device("h100-sxm"), **sizes)


def test_fast_domain_is_the_node_or_the_rack() -> None:
    assert Cluster(device=device("h100-sxm"), gpus=64, gpus_per_node=8).domain == 8
    assert Cluster(device=device("h100-sxm"), gpus=4, gpus_per_node=8).domain == 4
    assert Cluster(device=device("gb200"), gpus=144, gpus_per_node=4).domain == 72


def test_profile_comes_back_as_saved(tmp_path: Path) -> None:
    profile = HardwareProfile(name="mine", coefficients=Coefficients(matmul=0.5), band=0.1, rows=8, measured={"a": "b"})
    profile.save(tmp_path / "p.json")
    assert HardwareProfile.load(tmp_path / "p.json") == profile


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not a hardware profile"),
        ("{}", "no version"),
        (json.dumps({"version": 99, "name": "x"}), "version 99"),
        (json.dumps({"version": PROFILE_VERSION, "name": "x"}), "coefficients"),
        (json.dumps({"version": PROFILE_VERSION, "name": "x", "coefficients": {"matmul": -1.0}}), "matmul=-1.0"),
        (None, "no such profile"),
    ],
)
def test_bad_profiles_are_named(tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "p.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(PlanError, match=said):
        HardwareProfile.load(path)


def measured(path: Path, **fields: Any) -> Path:
    cpu = dataclasses.replace(device("cpu"), shares_host=True)
    HardwareProfile(**{"name": "mine", "device": cpu, "dtype": "float32", "processes": 2, **fields}).save(path)
    return path


@pytest.mark.parametrize(
    ("fields", "processes", "nodes", "command"),
    [
        ({}, 4, 1, "meshwright calibrate --processes 4 --output"),
        ({}, 1, 1, "meshwright calibrate --processes 1 --output"),
        ({}, 2, 2, "torchrun --nnodes 2 --nproc-per-node 2 ... -m meshwright_tools.cli calibrate --output"),
        ({"device": device("h100-sxm")}, 8, 1, "meshwright calibrate --processes 8 --output"),
        (None, 4, 1, "meshwright calibrate --processes 4 --output"),
    ],
)
def test_a_run_is_told_its_own_command(
    tmp_path: Path, fields: dict[str, Any] | None, processes: int, nodes: int, command: str
) -> None:
    path = tmp_path / "m.json"
    if fields is not None:
        measured(path, **fields)
    with pytest.raises(PlanError) as refused:
        load_run_profile(path, processes=processes, nodes=nodes)
    assert str(refused.value).endswith(f"{command} {path}") and "--gpus" not in str(refused.value)


def test_a_run_takes_the_profile_of_its_processes(tmp_path: Path) -> None:
    assert load_run_profile(measured(tmp_path / "m.json"), processes=2).processes == 2
    gpus = measured(tmp_path / "g.json", device=device("h100-sxm"), processes=8)
    assert load_run_profile(gpus, processes=4).processes == 8
