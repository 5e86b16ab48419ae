"""A cluster's devices and links, the efficiencies that calibration fits, and the profile file with the efficiencies."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.errors import PlanError
from meshwright.outside_files import (
    Check,
    OddFileError,
    boolean,
    holding,
    integer,
    listed,
    number,
    problem_of,
    read_json,
    shown,
    table,
    text,
    write_whole,
)
from meshwright_plan.machine.devices import CATALOGUE, Device, device

__all__ = ["CATALOGUE", "Cluster", "Coefficients", "Device", "HardwareProfile", "Measurement", "device"]

PROFILE_VERSION = 3


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster of equal nodes with equal devices.

    Args:
        device: the accelerator.
        gpus: number of devices in the cluster.
        gpus_per_node: number of devices per node.
        fast_link: bytes per second of one device inside its fast domain (default: ``device.fast_link``).
        slow_link: bytes per second of one device between domains, as its share of the node's network cards (default:
            ``device.slow_link``).

    Raises:
        PlanError: a size is below one, or the devices do not fill whole nodes.

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
                raise PlanError(f"Cluster.{name}={value!r} must be above zero bytes per second")
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
    def per_node(self) -> int:
        """The number of processes on each node."""
        return min(self.gpus, self.gpus_per_node)

    @property
    def domain(self) -> int:
        """The number of devices that the fast link connects."""
        return min(self.gpus, max(self.gpus_per_node, self.device.fast_domain if self.gpus_per_node < 8 else 0))

    @property
    def fast(self) -> float:
        return self.fast_link or self.device.fast_link

    @property
    def slow(self) -> float:
        return self.slow_link or self.device.slow_link


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """Efficiencies that are not in data sheets; calibration fits them.

    Args:
        matmul: fraction of the device's sustained matmul rate that a large matmul reaches.
        matmul_8bit: fraction of the sustained 8-bit rate that a large matmul reaches, as a multiple of ``matmul``.
        saturation: slowdown of small matmuls, whose time is multiplied by
            1 + saturation * 128 * (1/rows + 1/inner + 1/columns).
        attention: fraction of the peak rate that the attention kernel reaches with heads of 128.
        scores: part of that kernel's time that depends on the number of scores and not on the width of the heads, so
            that narrower heads have a lower rate (the runs behind the catalogue do not tell it).
        elementwise: time of kernels that pass over memory, such as sums and casts, as a multiple of the bytes that they
            must move, divided by the memory bandwidth.
        norms: the same of norms with the residual sums beside them, relative to ``elementwise``: above 1 if they are
            several kernels instead of one.
        rotation: the same of the rotation of queries and keys.
        gate: the same of the MLP's activation function and gate.
        loss: the same of the loss.
        launch: seconds that the host needs to launch one layer's forward: about 50 kernels of 12 microseconds in eager
            PyTorch, fewer if kernels are fused or captured.
        fast_link: fraction of the fast link's rate that a collective reaches.
        slow_link: fraction of the slow link's rate that a collective reaches.
        latency: seconds from one device of a domain to the next. Each doubling of the number of domains adds five times
            this latency.
        overlap: fraction of the data-parallel communication that compute can hide.
        optimizer: time of the optimizer step, as a multiple of its traffic divided by the memory bandwidth.
        step: fixed seconds per training step.
        straggler: fraction of the step time that each doubling of the number of nodes adds.
    """

    matmul: float = 0.85
    matmul_8bit: float = 1.0
    saturation: float = 1.0
    attention: float = 0.40
    scores: float = 1e-9
    elementwise: float = 1.3
    norms: float = 1.0
    rotation: float = 1.0
    gate: float = 1.0
    loss: float = 1.0
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
    """The measured time of one probe.

    Args:
        kind: name of the work, for example "matmul" or "all_gather".
        sizes: name -> size.
        seconds: median time on all processes.
        fastest: shortest time.
        spread: half the distance between the quartiles, relative to the median, as a measure of uncertainty.
    """

    kind: str
    sizes: Mapping[str, int]
    seconds: float
    fastest: float
    spread: float = 0.0


@dataclass(frozen=True, kw_only=True)
class HardwareProfile:
    """The coefficients of a cluster and their uncertainty.

    Args:
        name: description of what was measured.
        coefficients: the efficiencies.
        band: relative error; nine of ten runs take between the estimate / (1 + band) and the estimate * (1 + band).
        rows: number of measurements behind the coefficients; 0 for the coefficients of the catalogue.
        measured: key -> text, for example software versions and the date.
        device: the measured machine; None if the coefficients apply to a device of the catalogue.
        dtype: the measured dtype, "float32", "bfloat16" or "float16"; set with ``device``.
        processes: number of processes per node that ran at once. Processes share the cores of their host, so the result
            for another number of processes differs.
        nodes: number of measured nodes; the links between nodes are known if there are at least two.
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
        """Return a cluster of the measured device, by default with the measured sizes.

        Args:
            gpus: number of devices in the cluster.
            gpus_per_node: number of devices per node.
            slow_link: bytes per second of one device between nodes; required if only one node was measured and the
                cluster has more.

        Raises:
            PlanError: the profile has no device, or no measurements for these sizes.
        """
        if self.device is None:
            raise PlanError(f"profile {self.name!r} has no measured device; name one with --gpu")
        per_node = gpus_per_node or min(gpus or self.processes, self.processes)
        gpus = gpus or self.processes * self.nodes
        busy = min(gpus, per_node)
        if (reason := self.against_processes(busy)) is not None:
            raise PlanError(
                f"{reason}. Use --gpus-per-node {self.processes}, or meshwright calibrate --processes {busy}"
            )
        if gpus > per_node and self.nodes == 1 and slow_link is None:
            raise PlanError(
                f"profile {self.name!r} measured one node, but --gpus {gpus} needs {math.ceil(gpus / per_node)} nodes; "
                f"give --interconnect, launch meshwright calibrate with torchrun on two nodes or, if one node has all "
                f"{gpus}, use meshwright calibrate --processes {gpus}"
            )
        return Cluster(device=self.device, gpus=gpus, gpus_per_node=per_node, slow_link=slow_link)

    def against_processes(self, processes: int) -> str | None:
        """Return why the profile is not valid for a number of processes per host; None if it is."""
        is_shared = self.device is not None and self.device.shares_host and processes != self.processes
        if not is_shared and processes <= self.processes:
            return None
        why = "processes share its cores" if is_shared else "links between more devices were not measured"
        return f"profile {self.name!r} is valid for {self.processes} process(es) per host, not {processes}: {why}"

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON."""
        content = json.dumps({"version": PROFILE_VERSION, **dataclasses.asdict(self)}, indent=2)
        write_whole(path, content + "\n", option="--output")

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, command: str | None = None) -> HardwareProfile:
        """Read a profile that ``save`` wrote.

        Args:
            path: the file.
            command: the command that writes such a profile, for the errors.

        Raises:
            PlanError: the file does not exist, is not a profile, or has another version.
        """
        command = command or f"meshwright calibrate --output {path}"
        try:
            content = read_json(path)
        except FileNotFoundError:
            raise PlanError(f"{path}: no such profile; write one with {command}") from None
        except (OSError, OddFileError) as error:
            raise PlanError(f"{path}: not a hardware profile ({error})") from None
        if not isinstance(content, dict) or "version" not in content:
            raise PlanError(f"{path}: not a hardware profile (it has no version)")
        if (wrong := problem_of(content, _FORM)) is not None:
            raise PlanError(f"{path}: not a hardware profile ({wrong})")
        version = content.pop("version")
        if version != PROFILE_VERSION:
            raise PlanError(
                f"{path}: the profile has version {shown(version)}, but this version of meshwright reads version "
                f"{PROFILE_VERSION}; measure again with {command}"
            )
        try:
            content["coefficients"] = Coefficients(**content["coefficients"])
            if content.get("device") is not None:
                content["device"] = Device(**{**content["device"], "matches": ()})
            content["points"] = tuple(Measurement(**point) for point in content.get("points", ()))
            return cls(**content)
        except (KeyError, TypeError) as error:
            raise PlanError(f"{path}: not a hardware profile ({error})") from None


_KINDS: dict[str, Check] = {
    "float": number(), "int": integer(), "bool": boolean, "str": text(most=200), "Mapping[str, int]": table(integer()),
    "Mapping[str, str]": table(text(most=200)),
}  # fmt: skip


def _fields_of(kind: type) -> dict[str, Check]:
    """Return what the fields of a dataclass hold in a file, where that is a number or a text."""
    types = {each.name: str(each.type).removesuffix(" | None") for each in dataclasses.fields(kind)}
    return {name: _KINDS[of] for name, of in types.items() if of in _KINDS}


_FORM = holding(
    {
        **_fields_of(HardwareProfile),
        "coefficients": holding(_fields_of(Coefficients)),
        "device": holding(_fields_of(Device)),
        "points": listed(holding(_fields_of(Measurement))),
    }
)
