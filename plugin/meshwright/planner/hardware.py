"""What a cluster can do: its devices and links, the efficiencies that calibration fits, and their file."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.errors import PlanError
from meshwright.planner.devices import CATALOGUE, Device, device

__all__ = ["CATALOGUE", "Cluster", "Coefficients", "Device", "HardwareProfile", "Measurement", "device"]

PROFILE_VERSION = 2


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes of equal devices.

    Args:
        device: the accelerator.
        gpus: devices in all.
        gpus_per_node: devices in one node.
        fast_link: bytes a second of one device inside its fast domain; the device's own by default.
        slow_link: bytes a second of one device between domains, its share of the node's network cards.

    Raises:
        PlanError: sizes below one, or gpus that do not fill whole nodes.

    Example:
        >>> Cluster(device=device("a100-80"), gpus=16, gpus_per_node=8).nodes
        2
    """

    device: Device
    gpus: int
    gpus_per_node: int = 8
    fast_link: float | None = None
    slow_link: float | None = None

    def __post_init__(self) -> None:
        for name in ("gpus", "gpus_per_node"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise PlanError(f"--{name.replace('_', '-')}={value!r} must be a positive integer")
        for name in ("fast_link", "slow_link"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise PlanError(f"Cluster.{name}={value!r} must be above zero bytes a second")
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            raise PlanError(
                f"--gpus {self.gpus} is not a multiple of --gpus-per-node {self.gpus_per_node}; use "
                f"{self.gpus // self.gpus_per_node * self.gpus_per_node} or "
                f"{math.ceil(self.gpus / self.gpus_per_node) * self.gpus_per_node} GPUs, or change --gpus-per-node"
            )

    @property
    def nodes(self) -> int:
        return max(1, self.gpus // self.gpus_per_node)

    @property
    def domain(self) -> int:
        """Devices that reach each other by the fast link."""
        return min(self.gpus, max(self.gpus_per_node, self.device.fast_domain if self.gpus_per_node < 8 else 0))

    @property
    def fast(self) -> float:
        return self.fast_link or self.device.fast_link

    @property
    def slow(self) -> float:
        return self.slow_link or self.device.slow_link


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """What the data sheet does not say; calibration fits these.

    Args:
        matmul: fraction of the device's sustained matmul rate that a large matmul reaches.
        matmul_8bit: the same for 8-bit matmuls, as a multiple of ``matmul``.
        saturation: how soon small matmuls lose efficiency: the tile of 128 counts this many times.
        attention: fraction of the peak that the attention kernel reaches.
        elementwise: traffic of norms, activations and residuals, as a multiple of the textbook's.
        launch: seconds that the host needs to launch one layer's forward: some 50 kernels of 12 microseconds in eager
            PyTorch, less where kernels are fused or captured.
        fast_link: fraction of the fast link that a collective reaches.
        slow_link: fraction of the slow link that a collective reaches.
        latency: seconds from one device of a domain to the next; five times that for each doubling of the domains.
        overlap: fraction of the data-parallel communication that can hide behind compute.
        optimizer: time of the optimizer step, as a multiple of its traffic over the bandwidth.
        step: seconds of fixed cost of one training step.
        straggler: fraction of the step added by each doubling of the nodes.
    """

    matmul: float = 0.85
    matmul_8bit: float = 1.0
    saturation: float = 1.0
    attention: float = 0.40
    elementwise: float = 1.3
    launch: float = 6.0e-4
    fast_link: float = 0.75
    slow_link: float = 0.75
    latency: float = 1.0e-5
    overlap: float = 0.7
    optimizer: float = 1.5
    step: float = 0.01
    straggler: float = 0.006

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
                raise PlanError(f"Coefficients.{name}={value!r} must be a number above zero")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The time of one thing that was measured.

    Args:
        kind: what ran, e.g. "matmul" or "all_gather".
        sizes: its sizes by name.
        seconds: its median time, on all processes.
        fastest: its shortest time.
        spread: half the distance between the quartiles, over the median: how far to trust it.
    """

    kind: str
    sizes: Mapping[str, int]
    seconds: float
    fastest: float
    spread: float = 0.0


@dataclass(frozen=True, kw_only=True)
class HardwareProfile:
    """The coefficients of a cluster and how far to trust them.

    Args:
        name: what was measured.
        coefficients: the efficiencies.
        band: nine of ten runs take between the estimate divided by, and times, one plus this.
        rows: measured rows behind the coefficients, 0 for the catalogue's.
        measured: software versions and the date, as free text by key.
        device: the machine itself as measured; None where the coefficients go with a device of the catalogue.
        dtype: that was measured, "float32" or "bfloat16"; with ``device``.
        processes: on each node that ran at once; processes of one host share its cores, so others differ.
        nodes: that were measured; the links between nodes are known from two on.
        points: the raw measurements.

    Example:
        >>> HardwareProfile(name="catalogue").rows
        0
    """

    name: str
    coefficients: Coefficients = field(default_factory=Coefficients)
    band: float = 0.40
    rows: int = 0
    measured: Mapping[str, str] = field(default_factory=dict)
    device: Device | None = None
    dtype: str | None = None
    processes: int = 1
    nodes: int = 1
    points: tuple[Measurement, ...] = ()

    def cluster(
        self, *, gpus: int | None = None, gpus_per_node: int | None = None, slow_link: float | None = None
    ) -> Cluster:
        """Return a cluster of the measured device, by default the one that was measured.

        Args:
            gpus: devices in all.
            gpus_per_node: devices in one node.
            slow_link: bytes a second of one device between nodes, where that was not measured.

        Raises:
            PlanError: a size that the measurements say nothing about.
        """
        if self.device is None:
            raise PlanError(f"profile {self.name!r} measured no device; name one with --gpu")
        per_node = gpus_per_node or min(gpus or self.processes, self.processes)
        gpus = gpus or self.processes * self.nodes
        busy = min(gpus, per_node)
        is_shared = self.device.shares_host and busy != self.processes
        if is_shared or busy > self.processes:
            why = "they share its cores" if is_shared else "its links to more are not known"
            raise PlanError(
                f"profile {self.name!r} holds for {self.processes} process(es) on a host, not {busy}: {why}; use "
                f"--gpus-per-node {self.processes}, or meshwright calibrate --processes {busy}"
            )
        if gpus > per_node and self.nodes == 1 and slow_link is None:
            raise PlanError(
                f"profile {self.name!r} measured one node, and --gpus {gpus} need {math.ceil(gpus / per_node)}; give "
                f"--interconnect, launch meshwright calibrate with torchrun on two nodes or, where one node has all "
                f"{gpus}, use meshwright calibrate --processes {gpus}"
            )
        return Cluster(device=self.device, gpus=gpus, gpus_per_node=per_node, slow_link=slow_link)

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON."""
        Path(path).write_text(json.dumps({"version": PROFILE_VERSION, **dataclasses.asdict(self)}, indent=2) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> HardwareProfile:
        """Read a profile that ``save`` wrote.

        Raises:
            PlanError: no such file, not a profile, or one of another version.
        """
        try:
            content: Any = json.loads(Path(path).read_text())
        except FileNotFoundError:
            raise PlanError(f"{path}: no such profile; write one with meshwright calibrate --output {path}") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise PlanError(f"{path}: not a hardware profile ({error})") from None
        if not isinstance(content, dict) or "version" not in content:
            raise PlanError(f"{path}: not a hardware profile, it has no version")
        version = content.pop("version")
        if version != PROFILE_VERSION:
            raise PlanError(
                f"{path}: a profile of version {version}, and this is version {PROFILE_VERSION}; calibrate again"
            )
        try:
            content["coefficients"] = Coefficients(**content["coefficients"])
            if content.get("device") is not None:
                content["device"] = Device(**content["device"])
            content["points"] = tuple(Measurement(**point) for point in content.get("points", ()))
            return cls(**content)
        except (KeyError, TypeError) as error:
            raise PlanError(f"{path}: not a hardware profile ({error})") from None
