"""The table of a calibration's results, for the terminal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from meshwright.mesh.cores import crowding
from meshwright.planner.formatting import grid
from meshwright.planner.machine.hardware import HardwareProfile, Measurement

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
