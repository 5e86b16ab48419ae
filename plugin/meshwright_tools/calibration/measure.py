"""Measures this machine within a given time, and makes the profile and the table of its results.

The probes of the collectives that the runtime uses are here too: by size and group, inside a node and across nodes.
"""

from __future__ import annotations

import datetime
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from meshwright.errors import PlanError
from meshwright.mesh.axes import Axis
from meshwright.mesh.host import available_memory, core_count, crowding
from meshwright.mesh.process_group import backend_for, device_for, start_process_group, world_size
from meshwright.parallel.collectives import all_gather, all_reduce, reduce_scatter, start_all_reduce
from meshwright.progress import is_first_rank
from meshwright_plan.formatting import grid
from meshwright_plan.machine.hardware import HardwareProfile, Measurement
from meshwright_tools.calibration.compute import (
    Probe,
    Run,
    compute_probes,
    copy_probes,
    measure,
    rough_rate,
    sample_seconds,
)
from meshwright_tools.calibration.from_probes import fit

_WIDE = 0.35  # band from which the measurements did not fit together


def report(profile: HardwareProfile, path: Path) -> str:
    """Return a table of the measured figures, and the command that uses them.

    Args:
        profile: the measured profile, which has a device.
        path: the file with the profile.
    """
    device, k = profile.device, profile.coefficients
    assert device is not None
    rows: list[tuple[str, ...]] = [
        ("what", "measured", "share of the best"),
        ("matmul, best size", f"{device.flops / 1e12:.3g} TFLOP/s", "100%"),
        ("matmul, large", f"{k.matmul * device.flops / 1e12:.3g} TFLOP/s", f"{k.matmul:.0%}"),
        ("attention", f"{k.attention * device.flops / 1e12:.3g} TFLOP/s", f"{k.attention:.0%}"),
        ("memory, streamed", f"{device.bandwidth / 1e9:.3g} GB/s", "100%"),
        ("elementwise", f"{device.bandwidth / k.elementwise / 1e9:.3g} GB/s", f"{1 / k.elementwise:.0%}"),
        ("optimizer", f"{device.bandwidth / k.optimizer / 1e9:.3g} GB/s", f"{1 / k.optimizer:.0%}"),
        ("a layer's launches", f"{k.launch * 1e6:.0f} us", ""),
    ]
    if largest := _largest(profile, lambda point: "group" in point.sizes):
        rows += [
            ("collectives", f"{device.fast_link / 1e9:.3g} GB/s", f"groups up to {largest.sizes['group']}"),
            ("their latency", f"{k.latency * 1e6:.0f} us", ""),
            ("hidden behind compute", "", f"{k.overlap:.0%}"),
        ]
    if profile.nodes > 1:
        rows.append(("between nodes", f"{device.slow_link / 1e9:.3g} GB/s", ""))
    for kind in ("host to device", "device to host", "memory to memory"):
        if point := _largest(profile, lambda point, kind=kind: point.kind == kind):  # type: ignore[misc]
            rows.append((kind, f"{point.sizes['bytes'] / point.seconds / 1e9:.3g} GB/s", ""))
    return (
        f"{profile.name}: {device.name}, {profile.dtype}, {profile.rows} points\n\n{grid(rows)}\n\n"
        f"Error band: ±{profile.band:.0%}, from the errors of the estimates for whole layers and collectives.\n"
        + "".join(f"{remark}\n" for remark in _remarks(profile))
        + f"Use it with: meshwright plan --model config.json --profile {path}"
    )


def _remarks(profile: HardwareProfile) -> list[str]:
    """Return what to know about the machine, as sentences."""
    assert profile.device is not None
    measured, remarks, crowded = profile.measured, [], ""
    if profile.device.shares_host and "cores" in measured:
        cores, threads = int(measured["cores"]), int(measured.get("threads", 1))
        crowded = crowding(profile.processes, cores=cores, threads=threads)
    if profile.band > _WIDE:
        remarks.append(
            f"A band above {_WIDE:.0%} means that the machine was busy or that its links are uneven: calibrate again "
            "when the machine is idle."
        )
    if crowded:
        remarks.append(f"{crowded}: the rates are those of a process that shares its core, and the band is wider.")
    return remarks


def _largest(profile: HardwareProfile, is_wanted: Callable[[Measurement], bool]) -> Measurement | None:
    wanted = [point for point in profile.points if is_wanted(point)]
    return max(wanted, key=lambda point: (point.sizes.get("group", 0), point.sizes["bytes"]), default=None)


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_TIMEOUT = 300.0  # seconds that a process waits for another
_SHARE = 0.01  # share of the time that one run of a probe may take, since each probe runs at least ten times
_COMPUTE = 0.65  # share of the time for compute and copies; the rest is for the collectives

_SIZES = tuple(2**power for power in (10, 13, 16, 18, 20, 22, 24, 26))  # 1 KiB to 64 MiB
_ALWAYS, _SLOW = 2**20, 2**28  # largest size in bytes that is always measured; bytes per second of a slow link
_BESIDE = 2**24  # bytes of the gradient bucket that is reduced during compute
_OPERATIONS: dict[str, Callable[[Tensor, Axis], Tensor]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
}


def calibrate(
    *, processes: int | None = None, dtype: str | None = None, seconds: float = 100.0
) -> HardwareProfile | None:
    """Measure this machine and return its profile.

    Under torchrun, the launched processes measure together, rank 0 returns the profile, and other ranks return None.
    Otherwise this function starts the processes. All processes compute at the same time, as in training.

    Args:
        processes: number of processes to start (default: one per GPU, or 2 on CPU).
        dtype: dtype to compute in: "float32", "bfloat16" or "float16" (default: bfloat16 on GPUs, float32 on CPU).
        seconds: approximate seconds to spend measuring; starting the processes takes additional time.

    Raises:
        PlanError: a number is too small, the dtype is unknown, there are more processes than GPUs, or ``processes``
            differs from the number that torchrun launched.

    Example::

        calibrate(processes=2, seconds=30).save("profile.json")
    """
    is_cuda = torch.cuda.is_available()
    dtype = dtype or ("bfloat16" if is_cuda else "float32")
    if dtype not in DTYPES:
        raise PlanError(f"--dtype={dtype!r} must be one of {', '.join(DTYPES)}")
    if not seconds > 0:
        raise PlanError(f"--seconds={seconds!r} must be above zero")
    if "WORLD_SIZE" in os.environ:
        if processes is not None and processes != world_size():
            raise PlanError(
                f"--processes={processes}, but torchrun launched {world_size()}; leave out --processes or torchrun"
            )
        return _measured(dtype, seconds)
    count = (torch.cuda.device_count() if is_cuda else 2) if processes is None else processes
    if count < 1:
        raise PlanError(f"--processes={count} must be at least 1")
    if is_cuda and count > torch.cuda.device_count():
        raise PlanError(f"--processes={count}, but this machine has {torch.cuda.device_count()} GPU(s)")
    # torchrun also sets one thread: processes with one thread per core each would slow each other down.
    threads = os.environ.get("OMP_NUM_THREADS") or ("1" if count > 1 else str(torch.get_num_threads()))
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, OMP_NUM_THREADS=threads):
        mp.start_processes(_process, (count, dtype, seconds, folder), count, daemon=True, start_method="spawn")
        return HardwareProfile.load(Path(folder) / "profile.json")


def _process(rank: int, count: int, dtype: str, seconds: float, folder: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if count > 1:
        device = device_for(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        dist.init_process_group(
            backend_for(device), init_method=f"file://{folder}/meet", rank=rank, world_size=count,
            timeout=datetime.timedelta(seconds=_TIMEOUT),
        )  # fmt: skip
    try:
        profile = _measured(dtype, seconds)
        if profile is not None:
            profile.save(Path(folder) / "profile.json")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _measured(dtype: str, seconds: float) -> HardwareProfile | None:
    """Measure together with the other processes; return the profile on rank 0 and None elsewhere."""
    device = device_for(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    start_process_group(device, _TIMEOUT)
    world = world_size()
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if world % per_node:
        raise PlanError(f"{world} processes do not fill nodes of {per_node}; launch the same number on each node")
    rate = _slowest(rough_rate(device, DTYPES[dtype]))
    points: list[Measurement] = []
    is_crowded = device.type == "cpu" and bool(crowding(per_node, cores=core_count(), threads=torch.get_num_threads()))
    with _bar() as tick:
        compute = [*compute_probes(device, DTYPES[dtype], rate=rate, longest=_SHARE * seconds), *copy_probes(device)]
        budget = seconds * (_COMPUTE if world > 1 else 1.0)
        sample = sample_seconds(len(compute), seconds=budget, is_crowded=is_crowded)
        points += measure(compute, device, seconds=budget, sample=sample, tick=tick)
        if world > 1:
            links: list[Probe] = list(communication_probes(device, per_node, longest=_SHARE * seconds, rate=rate))
            points += measure(links, device, seconds=seconds * (1 - _COMPUTE), tick=tick)
    return _profile(points, device, dtype, per_node, world // per_node) if is_first_rank() else None


def _profile(points: list[Measurement], device: torch.device, dtype: str, per_node: int, nodes: int) -> HardwareProfile:
    threads = torch.get_num_threads()
    is_cuda = device.type == "cuda"
    model = torch.cuda.get_device_name(device) if is_cuda else _processor()
    kind = model if is_cuda else f"cpu ({per_node} process(es) x {threads} thread(s))"
    found = fit(
        points,
        name=kind,
        memory=_memory(device, per_node),
        processes=per_node,
        itemsize=DTYPES[dtype].itemsize,
        shares_host=not is_cuda,
    )
    return HardwareProfile(
        name=f"{model}, {nodes} node(s) x {per_node}",
        coefficients=found.coefficients,
        band=found.band,
        rows=len(points),
        measured={
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "torch": torch.__version__,
            "host": platform.node(),
            "processor": model,
            "cores": str(core_count()),
            "threads": str(threads),
            **{f"residual of {kind}": f"{value:.3f}" for kind, value in found.residuals.items()},
        },
        device=found.device,
        dtype=dtype,
        processes=per_node,
        nodes=nodes,
        points=tuple(points),
    )


def _slowest(rate: float) -> float:
    """Return the rate of the slowest process, so that all processes measure the same sizes."""
    if dist.is_initialized():
        value = torch.tensor([rate], dtype=torch.float64)
        dist.all_reduce(value, dist.ReduceOp.MIN)
        rate = value.item()
    return rate


@contextmanager
def _bar() -> Iterator[Callable[[str], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    is_shown = console.is_terminal and is_first_rank()
    columns = (TextColumn("measuring {task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not is_shown, transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda kind: progress.update(task, description=kind)


def _memory(device: torch.device, per_node: int) -> float:
    """Return the memory that one process may use, in bytes."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return available_memory() / per_node


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def axes(per_node: int) -> list[tuple[int, Axis]]:
    """Return (stride, axis) for every group size: neighbours in a node first, then one rank per node, then all ranks.

    For each stride and size, every rank is in one group, and all groups communicate at once, as in a mesh.

    Args:
        per_node: processes per node.
    """
    world = dist.get_world_size()
    nodes = world // per_node
    layouts = [(1, size) for size in range(2, per_node + 1) if per_node % size == 0]
    if nodes > 1:
        layouts += [(per_node, nodes), (1, world)]
    return [(stride, _axis(stride, size)) for stride, size in dict.fromkeys(layouts)]


def _axis(stride: int, size: int) -> Axis:
    blocks = range(0, dist.get_world_size(), stride * size)
    firsts = [first for block in blocks for first in range(block, block + stride)]
    return Axis.over([range(first, first + stride * size, stride) for first in firsts], "group")


def communication_probes(device: torch.device, per_node: int, *, longest: float, rate: float) -> Iterator[Probe]:
    """Yield the probes of collectives, whose "bytes" are the size of the whole buffer.

    Args:
        device: the device whose memory is sent.
        per_node: processes per node.
        longest: seconds that one run may take.
        rate: approximate floating-point operations per second of the device.
    """
    groups = axes(per_node)
    for stride, axis in groups:
        sizes = {"group": axis.size, "stride": stride, "per_node": per_node}
        for kind, operation in _OPERATIONS.items():
            for total in _SIZES:
                if total > max(_ALWAYS, _SLOW * longest):
                    break
                make = _collective(operation, axis, total, device, divided=kind == "all_gather")
                yield Probe(kind=kind, make=make, sizes={"bytes": total, **sizes})
    widest = groups[-1][1]
    for kind in ("transfer alone", "compute alone", "both"):
        yield Probe(kind=kind, make=_beside(kind, widest, device, rate * longest / 4), sizes={"bytes": _BESIDE})


def _collective(
    operation: Callable[[Tensor, Axis], Tensor], axis: Axis, total: int, device: torch.device, *, divided: bool
) -> Callable[[], Run]:
    def make() -> Run:
        rows = total // 4 // axis.size
        x = torch.zeros(rows if divided else rows * axis.size, device=device)
        return lambda: operation(x, axis)

    return make


def _beside(kind: str, axis: Axis, device: torch.device, flops: float) -> Callable[[], Run]:
    """Return a function that makes a bucket's reduction, a matmul, or both at the same time, as in backward."""

    def make() -> Run:
        bucket = torch.zeros(_BESIDE // 4, device=device)
        side = max(128, int((flops / 2) ** (1 / 3)))
        a, b = (torch.rand(side, side, device=device) for _ in range(2))

        def run() -> None:
            wait = start_all_reduce(bucket, axis) if kind != "compute alone" else None
            if kind != "transfer alone":
                a @ b
            if wait is not None:
                wait()

        return run

    return make
