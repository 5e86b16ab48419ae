"""Calibration: the fit recovers known coefficients, profiles come back, and a short run plans."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from meshwright.errors import PlanError
from meshwright_plan.job.candidate import Candidate, Job
from meshwright_plan.job.shapes import ModelShape
from meshwright_plan.machine.hardware import (
    PROFILE_VERSION,
    Cluster,
    Coefficients,
    Device,
    HardwareProfile,
    Measurement,
)
from meshwright_plan.time.step import StepModel
from meshwright_tools.calibration.compute import Probe, compute_probes, measure, sample_seconds
from meshwright_tools.calibration.from_probes import fit, nonnegative
from meshwright_tools.calibration.measure import calibrate, report

FLOPS, BANDWIDTH, FAST, SLOW = 8e11, 5e10, 4e9, 5e8
TRUE = Coefficients(
    matmul=1.0, saturation=0.4, attention=0.3, scores=0.4, elementwise=1.6, norms=2.0, rotation=1.4, gate=0.9,
    loss=0.7, launch=3e-4, fast_link=1.0, slow_link=1.0, latency=2e-4, overlap=0.25, optimizer=2.0, step=2e-3,
)  # fmt: skip
MACHINE = Device(
    name="true", memory=1e10, flops=FLOPS, bandwidth=BANDWIDTH, fast_link=FAST, slow_link=SLOW, fast_domain=4,
    sustained=1.0, shares_host=True,
)  # fmt: skip


def shape(hidden: int, vocab: int = 1) -> ModelShape:
    heads = hidden // 64
    return ModelShape.of(
        name="x", layers=1, hidden=hidden, heads=heads, kv_heads=heads, head_dim=64, ffn=4 * hidden, vocab=vocab
    )


def point(kind: str, seconds: float, **sizes: int) -> Measurement:
    return Measurement(kind=kind, sizes=sizes, seconds=seconds, fastest=seconds)


def job_of(length: int, itemsize: int) -> Job:
    job = Job(seq_len=length, global_batch=1)
    return job.in_32_bits() if itemsize == 4 else job


def seconds_of_attention(model: StepModel, sizes: Mapping[str, int]) -> float:
    scores = sizes["batch"] * sizes["heads"] * sizes["length"] * (sizes["length"] + 1) / 2
    return model.attention(3.5 * 4 * scores * sizes["head_dim"], sizes["head_dim"])


def moved_bytes(k: Coefficients, itemsize: int) -> dict[str, float]:
    """What forward and backward move for each element, so that two norms and seven sums have the traffic of a layer."""
    norms, sums = k.norms * 3 * 2 * (2 + 3), 2 * 3
    moved = {"norm": (norms - 3.5 * sums) / 2, "residual": sums, "rotary": k.rotation * 12, "gate": k.gate * 9}
    return {kind: k.elementwise * itemsize * elements for kind, elements in moved.items()}


def compute() -> Iterator[Measurement]:
    """What a machine with the true coefficients measures, by the planner's own model of it."""
    model = StepModel(shape(256), Cluster(device=MACHINE, gpus=1, gpus_per_node=1), TRUE)
    for rows, inner, columns in itertools.product((128, 1024, 2**20), (256, 2048, 2**20), (512, 2**20)):
        sizes = {"rows": rows, "inner": inner, "columns": columns}
        yield point("matmul", model.matmul(rows, inner, columns), **sizes)
        yield point("matmul backward", 2 * model.matmul(rows, inner, columns), **sizes)
    for length, width in itertools.product((256, 1024), (64, 128)):
        sizes = {"batch": 2, "length": length, "heads": 8, "head_dim": width}
        yield point("attention", seconds_of_attention(model, sizes), **sizes)
    for rows, width in ((512, 512), (2048, 1024)):
        for kind, moved in moved_bytes(TRUE, 4).items():
            yield point(kind, moved * rows * width / BANDWIDTH, rows=rows, width=width)
    for rows, vocab in ((512, 8192), (2048, 32768)):
        work = StepModel(shape(512, vocab), model.cluster, TRUE).head(Candidate(), job_of(rows, 4))
        yield point("head", work.forward + work.backward, rows=rows, hidden=512, vocab=vocab)
    for length, hidden in ((256, 512), (1024, 1024)):
        work_of_layer = StepModel(shape(hidden), model.cluster, TRUE).layer(Candidate(), job_of(length, 4))
        seconds = work_of_layer.forward + work_of_layer.backward
        yield point("layer", seconds, length=length, hidden=hidden, ffn=4 * hidden)
    yield point("launch", 3 * TRUE.launch)
    yield point("stream", 3 * 4 * 2**20 / BANDWIDTH, elements=2**20)
    yield point("adamw", TRUE.step, parameters=64, elements=1024)
    moving = TRUE.optimizer * 24 * 2**21 / BANDWIDTH
    yield point("adamw", moving + 8 / 64 * TRUE.step, parameters=8, elements=2**21)


def links(nodes: int) -> Iterator[Measurement]:
    """Collectives on nodes of four, and a bucket beside a matmul."""
    passes = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
    layouts = [(1, 2), (1, 4)] + ([(4, nodes), (1, 4 * nodes)] if nodes > 1 else [])
    for (stride, group), (kind, count), power in itertools.product(layouts, passes.items(), (10, 14, 18, 22, 26)):
        cluster = Cluster(device=MACHINE, gpus=4 * nodes, gpus_per_node=4)
        seconds = count * StepModel(shape(256), cluster, TRUE).ring(2**power, group, stride)
        yield point(kind, seconds, bytes=2**power, group=group, stride=stride, per_node=4)
    yield point("transfer alone", 0.02)
    yield point("compute alone", 0.04)
    yield point("both", 0.06 - TRUE.overlap * 0.02)


def fitted(points: list[Measurement]) -> tuple[Device, Coefficients, float]:
    found = fit(points, name="true", memory=1e10, processes=4, itemsize=4, shares_host=True)
    return found.device, found.coefficients, found.band


@pytest.mark.parametrize("nodes", [1, 2])
def test_fit_recovers_the_coefficients(nodes: int) -> None:
    device, found, band = fitted([*compute(), *links(nodes)])
    for name, value in dataclasses.asdict(TRUE).items():
        assert getattr(found, name) == pytest.approx(value, rel=0.01), name
    assert device.flops == pytest.approx(FLOPS, rel=0.01)
    assert device.bandwidth == pytest.approx(BANDWIDTH)
    assert device.fast_link == pytest.approx(FAST, rel=1e-3)
    assert device.slow_link == pytest.approx(SLOW if nodes > 1 else FAST, rel=1e-3)
    assert band == 0.10  # never below, however well the points fit


# Microseconds that the host of an H200 needed to launch the work of each kind, forward and backward.
LAUNCHES = {
    "matmul": 15, "matmul backward": 30, "attention": 220, "norm": 550, "gate": 142, "residual": 15, "rotary": 330,
    "head": 1000, "layer": 3300, "launch": 3300, "stream": 10, "adamw": 780,
}  # fmt: skip


def seconds_on_gpu(probe: Probe, model: StepModel) -> float:
    """The time on a GPU, which works while the host launches: the longer of the two decides."""
    sizes, kind, rate = probe.sizes, probe.kind, model.memory_rate
    job = job_of(sizes.get("length", sizes.get("rows", 1)), 2)
    if kind in ("matmul", "matmul backward"):
        busy = (1 + (kind != "matmul")) * model.matmul(sizes["rows"], sizes["inner"], sizes["columns"])
    elif kind == "attention":
        busy = seconds_of_attention(model, sizes)
    elif kind in (moved := moved_bytes(model.k, 2)):
        busy = moved[kind] * sizes["rows"] * sizes["width"] / rate
    elif kind == "adamw":
        busy = model.k.optimizer * 12 * sizes["elements"] / rate
    elif kind == "stream":
        busy = 6 * sizes["elements"] / rate
    elif kind == "head":
        work = StepModel(shape(sizes["hidden"], sizes["vocab"]), model.cluster, model.k).head(Candidate(), job)
        busy = work.forward + work.backward
    elif kind == "layer":
        work = StepModel(shape(sizes["hidden"]), model.cluster, model.k).layer(Candidate(), job)
        busy = work.forward + work.backward
    else:
        busy = 0.0
    return max(busy, 1e-6 * LAUNCHES[kind])


@pytest.mark.parametrize(
    ("flops", "bandwidth"), [(8e14, 4.2e12), (5e13, 3e11), (1.7e15, 7e12)], ids=["H200", "T4", "B200"]
)
def test_on_a_gpu_the_launches_are_not_taken_for_work(flops: float, bandwidth: float) -> None:
    eager = {"elementwise": 1.1, "norms": 6.7, "rotation": 4.5, "gate": 1.7}
    true = dataclasses.replace(TRUE, attention=0.5, launch=1.1e-3, step=7.8e-4, **eager)
    gpu = dataclasses.replace(MACHINE, flops=flops, bandwidth=bandwidth, shares_host=False)
    model = StepModel(shape(256), Cluster(device=gpu, gpus=1, gpus_per_node=1), true)
    probes = list(compute_probes(torch.device("cuda"), torch.bfloat16, rate=flops, longest=0.2))
    points = [point(probe.kind, seconds_on_gpu(probe, model), **probe.sizes) for probe in probes]
    found = fit(points, name="true", memory=1e10, processes=1, itemsize=2, shares_host=False)
    for name in ("matmul", "attention"):
        assert getattr(found.coefficients, name) * found.device.flops == pytest.approx(
            getattr(true, name) * flops, 0.01
        )
    assert found.device.bandwidth == pytest.approx(bandwidth)
    for name in ("saturation", "scores", *eager, "loss", "launch", "optimizer", "step"):
        assert getattr(found.coefficients, name) == pytest.approx(getattr(true, name), rel=0.05), name
    assert found.band == 0.10


def test_a_slow_gpu_measures_every_kind() -> None:
    """The smallest size of each kind is measured however long it takes, as the fit needs every kind."""
    found = {x.kind for x in compute_probes(torch.device("cuda"), torch.float32, rate=3e12, longest=0.05)}
    assert {"matmul", "attention", "norm", "residual", "rotary", "gate", "head", "launch", "stream", "adamw"} <= found


def test_scatter_widens_the_band() -> None:
    dice = np.random.default_rng(0)
    noisy = [
        dataclasses.replace(p, seconds=p.seconds * math.exp(0.2 * dice.standard_normal()))
        for p in (*compute(), *links(1))
    ]
    _, found, band = fitted(noisy)
    assert 0.12 < band < 1.0
    assert found.attention == pytest.approx(TRUE.attention, rel=0.35)
    assert found.latency == pytest.approx(TRUE.latency, rel=0.35)


def test_one_process_has_no_links() -> None:
    device, found, _ = fitted(list(compute()))
    assert found.latency == Coefficients().latency
    assert device.fast_link == device.bandwidth


def test_missing_measurements_are_named() -> None:
    with pytest.raises(PlanError, match="attention, stream"):
        fitted([p for p in compute() if p.kind not in ("attention", "stream")])


def test_nonnegative_never_goes_below_zero() -> None:
    weights = nonnegative(np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]]), np.array([3.0, 2.0, 1.0]))
    assert (weights >= 0).all()
    assert weights[1] == 0


def profile(**fields: object) -> HardwareProfile:
    points = (point("matmul", 0.1, rows=8),)
    return HardwareProfile(
        **{"name": "here", "device": MACHINE, "dtype": "float32", "processes": 4, "points": points, **fields}  # type: ignore[arg-type]
    )


def test_profile_with_a_device_comes_back(tmp_path: Path) -> None:
    profile().save(tmp_path / "p.json")
    assert HardwareProfile.load(tmp_path / "p.json") == profile()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": PROFILE_VERSION - 1}, f"version {PROFILE_VERSION - 1}.*measure again with meshwright calibrate"),
        ({"device": {"name": "x"}}, "not a hardware profile"),
        ({"points": [{"kind": "matmul"}]}, "not a hardware profile"),
    ],
)
def test_bad_profiles_are_named(tmp_path: Path, change: dict[str, object], said: str) -> None:
    path = tmp_path / "p.json"
    profile().save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(PlanError, match=said):
        HardwareProfile.load(path)


def test_profile_gives_the_cluster_that_was_measured() -> None:
    cluster = profile(nodes=2).cluster()
    assert (cluster.gpus, cluster.gpus_per_node, cluster.device) == (8, 4, MACHINE)


@pytest.mark.parametrize(
    ("fields", "sizes", "said"),
    [
        ({}, {"gpus": 2}, "--processes 2"),  # two processes have more of the host each than four
        ({}, {"gpus": 8}, "--interconnect"),
        ({}, {"gpus": 8, "gpus_per_node": 8}, "--processes 8"),
        ({"device": None}, {}, "--gpu"),
    ],
)
def test_profile_refuses_what_it_does_not_know(fields: dict[str, object], sizes: dict[str, int], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        profile(**fields).cluster(**sizes)


def test_fewer_gpus_of_a_node_are_known() -> None:
    gpu = dataclasses.replace(MACHINE, shares_host=False)
    assert profile(device=gpu).cluster(gpus=2).gpus == 2


@pytest.mark.parametrize(
    ("fields", "said"),
    [({"processes": 0}, "--processes=0"), ({"dtype": "int8"}, "--dtype='int8'"), ({"seconds": 0.0}, "--seconds")],
)
def test_bad_requests_are_named(monkeypatch: pytest.MonkeyPatch, fields: dict[str, object], said: str) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(PlanError, match=said):
        calibrate(**fields)  # type: ignore[arg-type]


def test_torchrun_decides_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(PlanError, match="torchrun launched 4"):
        calibrate(processes=2)


@pytest.mark.parametrize(
    ("probes", "seconds", "is_crowded", "sample"),
    [(50, 65.0, False, 0.01), (50, 65.0, True, 0.2), (50, 30.0, True, 0.1), (600, 2.0, True, 0.01)],
)
def test_samples_outlast_the_time_for_which_one_process_keeps_a_core(
    probes: int, seconds: float, is_crowded: bool, sample: float
) -> None:
    assert sample_seconds(probes, seconds=seconds, is_crowded=is_crowded) == pytest.approx(sample)


def test_a_sample_repeats_a_short_run_until_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, length = 0, 2**-10  # seconds of a run by a clock that only runs move

    def run() -> None:
        nonlocal runs
        runs += 1

    monkeypatch.setattr(time, "perf_counter", lambda: runs * length)
    measure([Probe(kind="a", make=lambda: run)], torch.device("cpu"), seconds=0, sample=64 * length)
    assert runs == 3 * (1 + 64) + 1  # in each of three rounds a run to warm up and the sample; first, one is measured


@pytest.mark.parametrize(
    ("fields", "remarks"),
    [
        ({"band": 0.2, "measured": {"cores": "4", "threads": "1"}}, []),
        ({"band": 2.59}, ["A band above 35% means that the machine was busy"]),
        ({"band": 0.2, "measured": {"cores": "2", "threads": "1"}}, ["4 processes on 2 cores"]),
        ({"band": 0.2, "measured": {"cores": "4", "threads": "2"}}, ["4 processes with 2 threads each on 4 cores"]),
    ],
)
def test_the_report_says_what_the_band_means(fields: dict[str, object], remarks: list[str]) -> None:
    text = report(profile(points=(), **fields), Path("p.json"))
    said = ["A band above", "on 2 cores", "on 4 cores"]
    assert all(remark in text for remark in remarks)
    assert sum(words in text for words in said) == len(remarks)


@pytest.mark.crossing
def test_two_processes_measure_and_plan(tmp_path: Path, preloaded_python: Path) -> None:
    path, config = tmp_path / "profile.json", tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {"model_type": "llama", "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2,
             "num_attention_heads": 4, "vocab_size": 1000}
        )
    )  # fmt: skip
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("OMP_NUM_THREADS", None)
    meshwright = [str(preloaded_python), "-m", "meshwright_tools.cli"]

    def run(*words: str) -> str:
        done = subprocess.run([*meshwright, *words], env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        return done.stdout

    said = run("calibrate", "--output", str(path), "--processes", "2", "--seconds", "3")
    assert f"--profile {path}" in said

    found = HardwareProfile.load(path)
    assert found.device is not None and found.device.shares_host
    assert (found.processes, found.nodes, found.dtype, found.measured["threads"]) == (2, 1, "float32", "1")
    kinds = {p.kind for p in found.points}
    assert {"matmul", "attention", "layer", "adamw", "all_reduce", "all_gather", "reduce_scatter", "both"} <= kinds
    assert max(p.sizes["bytes"] for p in found.points if p.kind == "all_reduce") >= 2**20
    assert all(0 < p.fastest <= p.seconds for p in found.points)

    words = ("--model", str(config), "--profile", str(path), "--seq-len", "128", "--global-batch", "4", "--json")
    answer = json.loads(run("plan", *words))
    assert answer["cluster"]["gpus"] == 2
    assert answer["cluster"]["device"] == found.device.name
    assert answer["job"]["element_bytes"] == 4
    assert answer["band"] == found.band
