"""What a cluster can do: devices by name, links, and the efficiencies that calibration fits."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.errors import PlanError

PROFILE_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, by its data sheet.

    Args:
        name: its name in the catalogue.
        memory: bytes of device memory.
        flops: dense 16-bit matrix operations a second; ``flops_8bit`` the same for 8 bits, where it has them.
        bandwidth: bytes a second between the device and its memory.
        fast_link: bytes a second that one device sends to others in its fast domain (NVLink, xGMI, PCIe).
        fast_domain: devices that the fast link joins.
        slow_link: bytes a second that one device sends to other nodes, in the systems it is usually sold in.
        sustained: fraction of ``flops`` that the best matmul of all shapes reaches; ``sustained_8bit`` likewise.
        source: where these figures come from.
    """

    name: str
    memory: float
    flops: float
    bandwidth: float
    fast_link: float
    slow_link: float
    fast_domain: int = 8
    flops_8bit: float | None = None
    sustained: float = 0.80
    sustained_8bit: float = 0.72
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("memory", "flops", "bandwidth", "fast_link", "slow_link", "fast_domain"):
            if not getattr(self, name) > 0:
                raise PlanError(f"Device {self.name}: {name}={getattr(self, name)!r} must be above zero")


_GB, _T = 1e9, 1e12
_GIB = 2**30
_NVIDIA = "NVIDIA data sheet, dense figures; "

# ``sustained``: "Maximum achievable matmul FLOPS", measured by the ml-engineering book (github:stas00/ml-engineering,
# compute/accelerator); devices that its table lacks keep the default.
CATALOGUE: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device(
            name="a100-40", memory=40 * _GIB, flops=312 * _T, bandwidth=1555 * _GB, fast_link=300 * _GB,
            slow_link=25 * _GB, sustained=0.869,
            source=_NVIDIA + "A100 SXM 40 GB; HGX: 8 x 200 Gb/s",
        ),
        Device(
            name="a100-80", memory=80 * _GIB, flops=312 * _T, bandwidth=2039 * _GB, fast_link=300 * _GB,
            slow_link=25 * _GB, sustained=0.869,
            source=_NVIDIA + "A100 SXM 80 GB; HGX: 8 x 200 Gb/s",
        ),
        Device(
            name="h100-sxm", memory=80 * _GIB, flops=989 * _T, flops_8bit=1979 * _T, bandwidth=3350 * _GB,
            fast_link=450 * _GB, slow_link=50 * _GB, sustained=0.803, sustained_8bit=0.709,
            source=_NVIDIA + "H100 SXM; HGX: 8 x 400 Gb/s",
        ),
        Device(
            name="h100-pcie", memory=80 * _GIB, flops=756 * _T, flops_8bit=1513 * _T, bandwidth=2000 * _GB,
            fast_link=50 * _GB, slow_link=25 * _GB, source=_NVIDIA + "H100 PCIe; PCIe 5 x16 between devices",
        ),
        Device(
            name="h200", memory=141 * _GB, flops=989 * _T, flops_8bit=1979 * _T, bandwidth=4800 * _GB,
            fast_link=450 * _GB, slow_link=50 * _GB, sustained=0.803, sustained_8bit=0.734,
            source=_NVIDIA + "H200 SXM; HGX: 8 x 400 Gb/s",
        ),
        Device(
            name="b200", memory=180 * _GB, flops=2250 * _T, flops_8bit=4500 * _T, bandwidth=7700 * _GB,
            fast_link=900 * _GB, slow_link=50 * _GB, sustained=0.776, sustained_8bit=0.763,
            source=_NVIDIA + "HGX B200, per device; 8 x 400 Gb/s",
        ),
        Device(
            name="gb200", memory=186 * _GB, flops=2500 * _T, flops_8bit=5000 * _T, bandwidth=8000 * _GB,
            fast_link=900 * _GB, slow_link=50 * _GB, fast_domain=72, sustained=0.729, sustained_8bit=0.723,
            source=_NVIDIA + "GB200 NVL72, per device",
        ),
        Device(
            name="l40s", memory=48 * _GIB, flops=362 * _T, flops_8bit=733 * _T, bandwidth=864 * _GB,
            fast_link=25 * _GB, slow_link=12.5 * _GB, source=_NVIDIA + "L40S; PCIe 4 x16 between devices",
        ),
        Device(
            name="rtx-4090", memory=24 * _GIB, flops=165 * _T, flops_8bit=330 * _T, bandwidth=1008 * _GB,
            fast_link=20 * _GB, slow_link=12.5 * _GB,
            source=_NVIDIA + "Ada white paper, 16 bits with fp32 sums; PCIe 4 through the host, no peer access",
        ),
        Device(
            name="v100-16", memory=16 * _GIB, flops=125 * _T, bandwidth=900 * _GB, fast_link=150 * _GB,
            slow_link=12.5 * _GB, source=_NVIDIA + "V100 SXM2 16 GB",
        ),
        Device(
            name="v100-32", memory=32 * _GIB, flops=125 * _T, bandwidth=900 * _GB, fast_link=150 * _GB,
            slow_link=12.5 * _GB, source=_NVIDIA + "V100 SXM2 32 GB",
        ),
        Device(
            name="mi300x", memory=192 * _GIB, flops=1307 * _T, flops_8bit=2615 * _T, bandwidth=5300 * _GB,
            fast_link=448 * _GB, slow_link=50 * _GB, sustained=0.514, sustained_8bit=0.5,
            source="AMD data sheet MI300X, dense; 7 xGMI links of 64 GB/s",
        ),
        Device(
            name="cpu", memory=16 * _GIB, flops=0.1 * _T, bandwidth=20 * _GB, fast_link=2 * _GB, slow_link=1 * _GB,
            fast_domain=1024, source="a guess for one process of a generic CPU; measure yours",
        ),
    )
}  # fmt: skip


def device(name: str) -> Device:
    """Return a device of the catalogue.

    Raises:
        PlanError: no such name; the nearest ones are named.

    Example:
        >>> device("h100-sxm").flops / 1e12
        989.0
    """
    key = name.lower().replace("_", "-").replace(" ", "-")
    if key in CATALOGUE:
        return CATALOGUE[key]
    near = difflib.get_close_matches(key, CATALOGUE, n=3, cutoff=0.3) or sorted(CATALOGUE)
    near += [known for known in CATALOGUE if known.startswith(key) and known not in near]
    raise PlanError(f"--gpu {name!r} is not in the catalogue; nearest: {', '.join(near)}. All: {', '.join(CATALOGUE)}")


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
class HardwareProfile:
    """The coefficients of a cluster and how far to trust them.

    Args:
        name: what was measured.
        coefficients: the efficiencies.
        band: nine of ten runs take between the estimate divided by, and times, one plus this.
        rows: measured rows behind the coefficients, 0 for the catalogue's.
        measured: software versions and the date, as free text by key.

    Example:
        >>> HardwareProfile(name="catalogue").rows
        0
    """

    name: str
    coefficients: Coefficients = field(default_factory=Coefficients)
    band: float = 0.40
    rows: int = 0
    measured: Mapping[str, str] = field(default_factory=dict)

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON."""
        Path(path).write_text(json.dumps({"version": PROFILE_VERSION, **dataclasses.asdict(self)}, indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> HardwareProfile:
        """Read a profile that ``save`` wrote.

        Raises:
            PlanError: no such file, not a profile, or one of another version.
        """
        try:
            content: Any = json.loads(Path(path).read_text())
        except FileNotFoundError:
            raise PlanError(f"{path}: no such profile") from None
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
            return cls(**content)
        except (KeyError, TypeError) as error:
            raise PlanError(f"{path}: not a hardware profile ({error})") from None
