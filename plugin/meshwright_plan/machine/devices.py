"""The catalogue of accelerators, with the figures from their data sheets."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class Device:
    """An accelerator, described by the figures of its data sheet.

    Args:
        name: the name in the catalogue.
        memory: device memory in bytes.
        flops: floating-point operations per second of dense 16-bit matmuls.
        flops_8bit, flops_4bit: operations per second of dense 8-bit and 4-bit matmuls; None without such units.
        bandwidth: bytes per second between the device and its memory.
        fast_link: bytes per second that one device sends to others in its fast domain (NVLink, xGMI, PCIe).
        fast_domain: number of devices that the fast link connects.
        slow_link: bytes per second that one device sends to other nodes, in the systems in which it is usually sold.
        sustained: fraction of ``flops`` that the fastest shape of matmul reaches.
        sustained_8bit: fraction of ``flops_8bit``, and of ``flops_4bit``, that the fastest shape of matmul reaches.
        shares_host: whether the device is the host's processor, whose cores the processes share. Kernels are not
            asynchronous on it, so the time to launch a kernel adds to the kernel's time.
        source: where these figures come from.
        matches: names by which the driver calls it, in small letters; a name has all words of one of them.
    """

    name: str
    memory: float
    flops: float
    bandwidth: float
    fast_link: float
    slow_link: float
    fast_domain: int = 8
    flops_8bit: float | None = None
    flops_4bit: float | None = None
    sustained: float = 0.80
    sustained_8bit: float = 0.72
    shares_host: bool = False
    source: str = ""
    matches: tuple[str, ...] = ()

    @property
    def is_cpu(self) -> bool:
        """Whether the device is a CPU: the host's own, or the catalogue's guess of one."""
        return self.shares_host or self.name == "cpu"

    def __post_init__(self) -> None:
        for name in ("memory", "flops", "bandwidth", "fast_link", "slow_link", "fast_domain"):
            if not getattr(self, name) > 0:
                raise PlanError(f"Device {self.name}: {name}={getattr(self, name)!r} must be above zero")


_GB, _T = 1e9, 1e12
_GIB = 2**30
_NVIDIA = "NVIDIA data sheet, dense figures; "

# The values of ``sustained`` are the "Maximum achievable matmul FLOPS" that the ml-engineering book measured
# (github:stas00/ml-engineering, compute/accelerator). Devices that are not in the book's table keep the default.
CATALOGUE: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device(
            name="a100-40", memory=40 * _GIB, flops=312 * _T, bandwidth=1555 * _GB, fast_link=300 * _GB,
            slow_link=25 * _GB, sustained=0.869,
            source=_NVIDIA + "A100 SXM 40 GB; HGX: 8 x 200 Gb/s",
            matches=("a100",),
        ),
        Device(
            name="a100-80", memory=80 * _GIB, flops=312 * _T, bandwidth=2039 * _GB, fast_link=300 * _GB,
            slow_link=25 * _GB, sustained=0.869,
            source=_NVIDIA + "A100 SXM 80 GB; HGX: 8 x 200 Gb/s",
            matches=("a100",),
        ),
        Device(
            name="h100-sxm", memory=80 * _GIB, flops=989 * _T, flops_8bit=1979 * _T, bandwidth=3350 * _GB,
            fast_link=450 * _GB, slow_link=50 * _GB, sustained=0.803, sustained_8bit=0.709,
            source=_NVIDIA + "H100 SXM; HGX: 8 x 400 Gb/s",
            matches=("h100",),
        ),
        Device(
            name="h100-96", memory=96 * _GIB, flops=800 * _T, flops_8bit=1600 * _T, bandwidth=2400 * _GB,
            fast_link=450 * _GB, slow_link=50 * _GB, sustained=0.803, sustained_8bit=0.709,
            source="arXiv 2411.01783, appendix A: H100 with 96 GB of HBM2e, limited to 500 W, 800 TF/s in 16 bits; the "
            "8-bit rate is twice that; efficiencies of h100-sxm",
            matches=("h100 96gb",),
        ),
        Device(
            name="h100-pcie", memory=80 * _GIB, flops=756 * _T, flops_8bit=1513 * _T, bandwidth=2000 * _GB,
            fast_link=50 * _GB, slow_link=25 * _GB, source=_NVIDIA + "H100 PCIe; PCIe 5 x16 between devices",
            matches=("h100 pcie",),
        ),
        Device(
            name="h800", memory=80 * _GIB, flops=989 * _T, flops_8bit=1979 * _T, bandwidth=3350 * _GB,
            fast_link=200 * _GB, slow_link=50 * _GB, sustained=0.803, sustained_8bit=0.709,
            source="an H100 SXM whose NVLink is limited to 400 GB/s in both directions; efficiencies of h100-sxm",
            matches=("h800",),
        ),
        Device(
            name="h200", memory=141 * _GB, flops=989 * _T, flops_8bit=1979 * _T, bandwidth=4800 * _GB,
            fast_link=450 * _GB, slow_link=50 * _GB, sustained=0.803, sustained_8bit=0.734,
            source=_NVIDIA + "H200 SXM; HGX: 8 x 400 Gb/s",
            matches=("h200",),
        ),
        Device(
            name="b200", memory=180 * _GB, flops=2250 * _T, flops_8bit=4500 * _T, flops_4bit=9000 * _T,
            bandwidth=7700 * _GB, fast_link=900 * _GB, slow_link=50 * _GB, sustained=0.776, sustained_8bit=0.763,
            source=_NVIDIA + "HGX B200, per device; 8 x 400 Gb/s",
            matches=("b200",),
        ),
        Device(
            name="b300", memory=270 * _GB, flops=2250 * _T, flops_8bit=4500 * _T, flops_4bit=13500 * _T,
            bandwidth=7700 * _GB, fast_link=900 * _GB, slow_link=100 * _GB, sustained=0.776, sustained_8bit=0.763,
            source=_NVIDIA + "HGX B300, per device; 8 x 800 Gb/s; efficiencies of B200",
            matches=("b300",),
        ),
        Device(
            name="gb200", memory=186 * _GB, flops=2500 * _T, flops_8bit=5000 * _T, flops_4bit=10000 * _T,
            bandwidth=8000 * _GB, fast_link=900 * _GB, slow_link=50 * _GB, fast_domain=72, sustained=0.729,
            sustained_8bit=0.723, source=_NVIDIA + "GB200 NVL72, per device",
            matches=("gb200",),
        ),
        Device(
            name="gb300", memory=279 * _GB, flops=2500 * _T, flops_8bit=5000 * _T, flops_4bit=15000 * _T,
            bandwidth=8000 * _GB, fast_link=900 * _GB, slow_link=100 * _GB, fast_domain=72, sustained=0.729,
            sustained_8bit=0.723, source=_NVIDIA + "GB300 NVL72, per device; efficiencies of GB200",
            matches=("gb300",),
        ),
        Device(
            name="l40s", memory=48 * _GIB, flops=362 * _T, flops_8bit=733 * _T, bandwidth=864 * _GB,
            fast_link=25 * _GB, slow_link=12.5 * _GB, source=_NVIDIA + "L40S; PCIe 4 x16 between devices",
            matches=("l40s",),
        ),
        Device(
            name="h20", memory=96 * _GB, flops=148 * _T, flops_8bit=296 * _T, bandwidth=4000 * _GB,
            fast_link=450 * _GB, slow_link=50 * _GB, source=_NVIDIA + "H20 SXM; HGX: 8 x 400 Gb/s",
            matches=("h20",),
        ),
        Device(
            name="l4", memory=24 * _GB, flops=121 * _T, flops_8bit=242 * _T, bandwidth=300 * _GB,
            fast_link=25 * _GB, slow_link=1.56 * _GB,
            source=_NVIDIA + "L4; PCIe 4 x16 between devices; cloud nodes of 8: 100 Gb/s for all",
            matches=("l4",),
        ),
        Device(
            name="a10g", memory=24 * _GB, flops=70 * _T, bandwidth=600 * _GB, fast_link=12.5 * _GB,
            slow_link=1.56 * _GB,
            source=_NVIDIA + "A10G; PCIe 4 through the host; AWS g5.48xlarge: 100 Gb/s for 8 devices",
            matches=("a10g",),
        ),
        Device(
            name="gaudi3", memory=128 * _GB, flops=1835 * _T, flops_8bit=1835 * _T, bandwidth=3700 * _GB,
            fast_link=525 * _GB, slow_link=75 * _GB,
            source="Intel product brief Gaudi 3 (HL-325L), dense; of 24 ports of 200 Gb/s 21 inside the node",
        ),
        Device(
            name="rtx-4090", memory=24 * _GIB, flops=165 * _T, flops_8bit=330 * _T, bandwidth=1008 * _GB,
            fast_link=20 * _GB, slow_link=12.5 * _GB,
            source=_NVIDIA + "Ada white paper, 16 bits with fp32 sums; PCIe 4 through the host, no peer access",
            matches=("rtx 4090",),
        ),
        Device(
            name="v100-16", memory=16 * _GIB, flops=125 * _T, bandwidth=900 * _GB, fast_link=150 * _GB,
            slow_link=12.5 * _GB, source=_NVIDIA + "V100 SXM2 16 GB",
            matches=("v100",),
        ),
        Device(
            name="v100-32", memory=32 * _GIB, flops=125 * _T, bandwidth=900 * _GB, fast_link=150 * _GB,
            slow_link=12.5 * _GB, source=_NVIDIA + "V100 SXM2 32 GB",
            matches=("v100",),
        ),
        Device(
            name="mi300x", memory=192 * _GIB, flops=1307 * _T, flops_8bit=2615 * _T, bandwidth=5300 * _GB,
            fast_link=448 * _GB, slow_link=50 * _GB, sustained=0.514, sustained_8bit=0.5,
            source="AMD data sheet MI300X, dense; 7 xGMI links of 64 GB/s",
            matches=("mi300x",),
        ),
        Device(
            name="mi325x", memory=256 * _GB, flops=1307 * _T, flops_8bit=2615 * _T, bandwidth=6000 * _GB,
            fast_link=448 * _GB, slow_link=50 * _GB, sustained=0.514, sustained_8bit=0.5,
            source="AMD data sheet MI325X, dense; 7 xGMI links of 64 GB/s; efficiencies of mi300x",
            matches=("mi325x",),
        ),
        Device(
            name="mi350x", memory=288 * _GB, flops=2307 * _T, flops_8bit=4614 * _T, flops_4bit=9228 * _T,
            bandwidth=8000 * _GB, fast_link=537 * _GB, slow_link=50 * _GB, sustained=0.514, sustained_8bit=0.5,
            source="AMD data sheet MI350X, dense; 7 xGMI links of 76.8 GB/s; efficiencies of mi300x",
            matches=("mi350x",),
        ),
        Device(
            name="mi355x", memory=288 * _GB, flops=2517 * _T, flops_8bit=5033 * _T, flops_4bit=10066 * _T,
            bandwidth=8000 * _GB, fast_link=537 * _GB, slow_link=50 * _GB, sustained=0.514, sustained_8bit=0.5,
            source="AMD data sheet MI355X, dense; 7 xGMI links of 76.8 GB/s; efficiencies of mi300x",
            matches=("mi355x",),
        ),
        Device(
            name="cpu", memory=16 * _GIB, flops=0.1 * _T, bandwidth=20 * _GB, fast_link=2 * _GB, slow_link=1 * _GB,
            fast_domain=1024, source="a guess for one process of a generic CPU; measure yours",
        ),
    )
}  # fmt: skip
# Short names, for the variant that most clusters have.
_ALIASES = {
    "a100": "a100-80", "h100": "h100-sxm", "v100": "v100-32", "4090": "rtx-4090", "rtx4090": "rtx-4090",
    "gaudi-3": "gaudi3",
}  # fmt: skip


# Devices on which most published runs are outside the catalogue's band -> number of these runs, and the least and the
# most time that they took, relative to the estimate (evidence/planner.md says which runs).
PUBLISHED_TIMES: Mapping[str, tuple[int, float, float]] = {"b200": (9, 1.6, 2.9), "mi300x": (4, 1.5, 2.1)}


def matmul_peak(device: Device, precision: str) -> float:
    """Return the device's operations per second in dense matmuls of a precision.

    Args:
        device: the device.
        precision: "bf16", "fp8" or "fp4", as in ``Job``.

    Raises:
        PlanError: the device has no matmul units of this precision.

    Example:
        >>> matmul_peak(device("gb200"), "fp4") / 1e15
        10.0
    """
    field = {"bf16": "flops", "fp8": "flops_8bit", "fp4": "flops_4bit"}[precision]
    peak: float | None = getattr(device, field)
    if peak is None:
        able = ", ".join(name for name, known in CATALOGUE.items() if getattr(known, field) is not None)
        raise PlanError(
            f"--precision {precision} needs matrix units of {precision.removeprefix('fp')} bits, and {device.name} has "
            f"none: write --precision bf16, or --gpu with one of {able}"
        )
    return peak


def device(name: str) -> Device:
    """Return a device of the catalogue.

    Args:
        name: its name, or a short name for its most common variant: "h100" is "h100-sxm".

    Raises:
        PlanError: the name is not in the catalogue; the message lists the nearest names.

    Example:
        >>> device("h100").flops / 1e12
        989.0
    """
    key = name.lower().replace("_", "-").replace(" ", "-").removeprefix("nvidia-").removeprefix("amd-")
    key = _ALIASES.get(key, key)
    if key in CATALOGUE:
        return CATALOGUE[key]
    near = difflib.get_close_matches(key, CATALOGUE, n=3, cutoff=0.3) or sorted(CATALOGUE)
    near += [known for known in CATALOGUE if known.startswith(key) and known not in near]
    aliases = ", ".join(f"{alias} ({entry})" for alias, entry in _ALIASES.items())
    spec = "--gpu-spec memory=96,flops=148,bandwidth=4000,link=450,network=50"
    raise PlanError(
        f"--gpu {name!r} is not in the catalogue; nearest: {', '.join(near)}. All: {', '.join(CATALOGUE)}; short "
        f"names: {aliases}. For any other device, give its data sheet: {spec}"
    )


def device_of_driver(name: str, memory: float) -> Device | None:
    """Return the device of the catalogue that the driver calls by a name; None if the catalogue has none.

    Args:
        name: the name, as in ``torch.cuda.get_device_name()``.
        memory: the bytes of the device, which tell variants of one name apart.

    Example:
        >>> device_of_driver("NVIDIA H100 PCIe", 80e9).name
        'h100-pcie'
    """
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    found = [(len(match.split()), x) for x in CATALOGUE.values() for match in x.matches if words >= set(match.split())]
    most = max((count for count, _ in found), default=0)
    named = [known for count, known in found if count == most]
    return min(named, key=lambda known: abs(known.memory - memory), default=None)


_SPEC = {  # word of --gpu-spec -> (field, unit, its name)
    "memory": ("memory", _GB, "GB"),
    "flops": ("flops", _T, "dense 16-bit TFLOP/s"),
    "bandwidth": ("bandwidth", _GB, "GB/s of memory"),
    "link": ("fast_link", _GB, "GB/s in one direction from a device to others of its node"),
    "network": ("slow_link", _GB, "GB/s from a device to other nodes; 25 if left out"),
    "flops8": ("flops_8bit", _T, "dense 8-bit TFLOP/s"),
    "flops4": ("flops_4bit", _T, "dense 4-bit TFLOP/s"),
    "domain": ("fast_domain", 1, "devices that the link connects; 8 if left out"),
}


def device_of_spec(text: str) -> Device:
    """Return a device by the figures of its data sheet.

    Args:
        text: words such as "memory=96,flops=148,bandwidth=4000,link=450,network=50", perhaps with "name=...".

    Raises:
        PlanError: a word is unknown or missing, or a figure is not a number above zero.

    Example:
        >>> device_of_spec("memory=96,flops=148,bandwidth=4000,link=450").memory
        96000000000.0
    """
    name, figures, given = "custom", {"slow_link": 25 * _GB}, set[str]()
    for word in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = word.partition("=")
        if key == "name" and value:
            name = value
            continue
        if key not in _SPEC:
            words = ", ".join(f"{known} ({unit})" for known, (_, _, unit) in _SPEC.items())
            raise PlanError(f"--gpu-spec: {word!r} is not known; write name=..., {words}")
        field, unit, words = _SPEC[key]
        try:
            figure = float(value)
        except ValueError:
            figure = 0.0
        if not 0 < figure < float("inf") or (key == "domain" and figure % 1):
            kind = "an integer" if key == "domain" else "a number"
            raise PlanError(f"--gpu-spec: {word!r} must be {kind} above zero, in {words}")
        if key in given:
            raise PlanError(f"--gpu-spec {text!r} gives {key} twice; write it once")
        given.add(key)
        figures[field] = figure * unit
    missing = [key for key in ("memory", "flops", "bandwidth", "link") if _SPEC[key][0] not in figures]
    if missing:
        raise PlanError(
            f"--gpu-spec {text!r} has no {', '.join(missing)}; write "
            "--gpu-spec memory=96,flops=148,bandwidth=4000,link=450,network=50"
        )
    return Device(
        name=name, memory=figures["memory"], flops=figures["flops"], bandwidth=figures["bandwidth"],
        fast_link=figures["fast_link"], slow_link=figures["slow_link"], fast_domain=int(figures.get("fast_domain", 8)),
        flops_8bit=figures.get("flops_8bit"), flops_4bit=figures.get("flops_4bit"), source="given by --gpu-spec",
    )  # fmt: skip


def spec_of(device: Device) -> str:
    """Return the words from which ``device_of_spec`` makes a device.

    Example:
        >>> spec_of(device_of_spec("memory=96,flops=148,bandwidth=4000,link=450"))
        'name=custom,memory=96,flops=148,bandwidth=4000,link=450,network=25,domain=8'
    """
    figures = {key: getattr(device, field) for key, (field, _, _) in _SPEC.items()}
    words = [f"{key}={figure / _SPEC[key][1]:.12g}" for key, figure in figures.items() if figure is not None]
    return ",".join([f"name={device.name}", *words])
