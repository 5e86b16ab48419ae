"""Fit a device and coefficients to measurements, so that the planner's step model reproduces them."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import PlanError
from meshwright_plan.job.candidate import Candidate, Job
from meshwright_plan.job.shapes import ModelShape
from meshwright_plan.machine.hardware import Cluster, Coefficients, Device, Measurement
from meshwright_plan.time.step import StepModel

Array = NDArray[np.float64]

# StepModel's tile size, width of heads, and ratio of latency between nodes to latency inside a node.
_TILE, _HEAD_DIM, _REMOTE = 128, 128, 5.0
_LEAST, _NO_LOSS = 1e-3, 1e-12
_REWEIGHTED = 10
_SMALL = 2**13  # bytes up to which a collective is all latency; its fastest time is used, which includes no waiting
_NARROWEST = 0.10  # the smallest band, since a training step contains more than was measured
_NINE_OF_TEN = 1.645
_LARGE = 2**18  # bytes from which a collective's time depends on the link's rate
# Coefficient -> the probes that do this work of a layer, how often, and the elements that the step model counts for it,
# relative to the width. A layer has two norms and seven sums: two for the residual stream and two for its gradient, and
# three for the gradients of the inputs that q, k and v share, and gate and up.
_WORK: dict[str, tuple[dict[str, float], int]] = {
    "norms": ({"norm": 2, "residual": 7 / 2}, 3 * 2 * (2 + 3)),
    "rotation": ({"rotary": 1}, 3 * 4),
    "gate": ({"gate": 1}, 3 * 3),
}
_SUMS: tuple[dict[str, float], int] = ({"residual": 1}, 2 * 3)  # a probe has two sums of two tensors each
_NEEDED = {"matmul", "attention", "norm", "residual", "rotary", "gate", "head", "launch", "stream", "adamw"}
_PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A device and coefficients that reproduce measurements.

    Args:
        device: the machine, with its best measured rates.
        coefficients: the fractions of these rates that operations reach.
        band: relative error that nine of ten steps should stay within, computed from the errors of layers and of
            large collectives; at least 10 %.
        residuals: kind -> root mean square of log(estimated / measured).
    """

    device: Device
    coefficients: Coefficients
    band: float
    residuals: dict[str, float]


def fit(
    points: Sequence[Measurement], *, name: str, memory: float, processes: int, itemsize: int, shares_host: bool
) -> Fitted:
    """Return the device and coefficients that reproduce measurements.

    Args:
        points: measurements of ``compute_probes`` and, for several processes, ``communication_probes``.
        name: name of the device.
        memory: memory of one process in bytes.
        processes: processes per node.
        itemsize: bytes per element of the measured dtype.
        shares_host: whether the device is the host's processor.

    Raises:
        PlanError: a kind of measurement that every fit needs is missing.
    """
    by_kind: dict[str, list[Measurement]] = {}
    for point in points:
        by_kind.setdefault(point.kind, []).append(point)
    if missing := sorted(_NEEDED - set(by_kind)):
        raise PlanError(f"no measurement of {', '.join(missing)}; run meshwright calibrate with more --seconds")

    flops = max(_flops(point) / point.seconds for point in _matmuls(by_kind))
    large = by_kind["stream"][0]
    bandwidth = 3 * itemsize * large.sizes["elements"] / large.seconds
    matmul, saturation = _matmul(_matmuls(by_kind), flops)
    attention, scores = _attention(by_kind["attention"], flops)
    elementwise = _multiple(by_kind, *_SUMS, itemsize, bandwidth)
    kinds = {name: _multiple(by_kind, *work, itemsize, bandwidth) / elementwise for name, work in _WORK.items()}
    fixed, optimizer = _optimizer(by_kind["adamw"], itemsize, bandwidth, shares_host)
    launch = by_kind["launch"][0].seconds / 3
    collectives = [point for kind in _PASSES for point in by_kind.get(kind, ())]
    latency, fast, slow = _links(collectives)
    coefficients = replace(
        Coefficients(),
        matmul=matmul,
        saturation=saturation,
        attention=attention,
        scores=scores,
        elementwise=elementwise,
        **kinds,
        launch=launch,
        latency=latency or Coefficients().latency,
        # The fitted link rates are the rates that collectives reach, so the fractions are 1.
        fast_link=1.0,
        slow_link=1.0,
        overlap=_overlap(by_kind),
        optimizer=optimizer,
        step=fixed,
    )
    device = Device(
        name=name,
        memory=memory,
        flops=flops,
        bandwidth=bandwidth,
        fast_link=fast or bandwidth,
        slow_link=slow or fast or bandwidth,
        fast_domain=processes,
        sustained=1.0,
        shares_host=shares_host,
        source="measured by meshwright calibrate",
    )
    coefficients = replace(coefficients, loss=_loss(by_kind["head"], device, coefficients, itemsize))
    errors, share = _errors(by_kind, collectives, device, coefficients, itemsize)
    compute = _rms(errors["layer"] or errors["matmul"])
    deviation = math.hypot((1 - share) * compute, share * _rms(errors["large collective"]))
    return Fitted(
        device=device,
        coefficients=coefficients,
        band=max(_NARROWEST, math.expm1(_NINE_OF_TEN * deviation)),
        residuals={kind: _rms(values) for kind, values in errors.items() if values},
    )


def nonnegative(columns: Array, seconds: Array) -> Array:
    """Return the nonnegative weights of the columns that reproduce the seconds with the smallest relative errors.

    Args:
        columns: array [points, columns]; every subset of the columns is tried, so keep their number small.
        seconds: array [points].

    Example:
        >>> nonnegative(np.array([[1.0, 1.0], [1.0, 3.0]]), np.array([3.0, 7.0])).round(6).tolist()
        [1.0, 2.0]
    """
    scale = seconds
    weights = _least_squares(columns / scale[:, None], seconds / scale)
    for _ in range(_REWEIGHTED):
        # (a - b)^2 / (a b) is nearly log(a / b)^2, so an estimate of half counts like an estimate of twice.
        scale = np.sqrt(np.maximum(columns @ weights, seconds * 1e-3) * seconds)
        weights = _least_squares(columns / scale[:, None], seconds / scale)
    return weights


def _least_squares(columns: Array, wanted: Array) -> Array:
    best, least = np.zeros(columns.shape[1]), math.inf
    for count in range(1, columns.shape[1] + 1):
        for chosen in itertools.combinations(range(columns.shape[1]), count):
            part = columns[:, chosen]
            weights = np.linalg.lstsq(part, wanted, rcond=None)[0]
            error = float(((part @ weights - wanted) ** 2).sum())
            if (weights >= 0).all() and error < least:
                best, least = np.zeros(columns.shape[1]), error
                best[list(chosen)] = weights
    return best


def _matmuls(by_kind: dict[str, list[Measurement]]) -> list[Measurement]:
    return by_kind["matmul"] + by_kind.get("matmul backward", [])


def _flops(point: Measurement) -> float:
    sizes = point.sizes
    return (2 if point.kind == "matmul" else 4) * sizes["rows"] * sizes["inner"] * sizes["columns"]


def _matmul(points: Sequence[Measurement], flops: float) -> tuple[float, float]:
    ideal = np.array([_flops(point) / flops for point in points])
    tails = [_TILE * sum(1 / point.sizes[name] for name in ("rows", "inner", "columns")) for point in points]
    columns = np.stack([ideal, ideal * np.array(tails)], axis=1)
    full, tail = nonnegative(columns, _seconds(points))
    if not full:  # all sizes are small, so the best of them counts as large
        return 1.0, max(_LEAST, float(tail))
    return 1 / float(full), max(_LEAST, float(tail / full))


def _attention_flops(point: Measurement) -> float:
    length, width = point.sizes["length"], point.sizes["heads"] * point.sizes["head_dim"]
    return 3.5 * 4 * point.sizes["batch"] * length * width * (length + 1) / 2


def _attention(points: Sequence[Measurement], flops: float) -> tuple[float, float]:
    """Return the share of the peak that attention reaches with heads of 128, and the part of scores in its time."""
    ideal = np.array([_attention_flops(point) / flops for point in points])
    narrow = np.array([_HEAD_DIM / point.sizes["head_dim"] for point in points])
    of_width, of_scores = nonnegative(np.stack([ideal, ideal * narrow], axis=1), _seconds(points))
    return 1 / float(of_width + of_scores), max(_LEAST, float(of_scores / (of_width + of_scores)))


def _loss(points: Sequence[Measurement], device: Device, coefficients: Coefficients, itemsize: int) -> float:
    """Return the multiple of the loss's traffic, relative to that of elementwise kernels.

    It is what a head with its loss takes beside its matmuls.
    """
    found = []
    for point in points:
        with_loss, without = (
            _head(point, device, replace(coefficients, loss=loss), itemsize) for loss in (1.0, _NO_LOSS)
        )
        found.append(max(_LEAST, (point.seconds - without) / (with_loss - without)))
    return statistics.geometric_mean(found)


def _multiple(
    by_kind: dict[str, list[Measurement]], times: Mapping[str, float], moved: float, itemsize: int, bandwidth: float
) -> float:
    """Return the time of elementwise work relative to that of its traffic at full bandwidth, as the mean over sizes.

    Args:
        by_kind: the measurements; those of elementwise kinds have the same sizes in the same order.
        times: kind -> how often it is part of the work.
        moved: elements that the work must move, relative to the size.
        itemsize: bytes per element.
        bandwidth: the device's.
    """
    found = []
    for together in zip(*(by_kind[kind] for kind in times), strict=True):
        sizes = together[0].sizes
        seconds = sum(count * point.seconds for count, point in zip(times.values(), together, strict=True))
        found.append(seconds * bandwidth / (itemsize * moved * sizes["rows"] * sizes["width"]))
    return statistics.geometric_mean(found)


def _optimizer(
    points: Sequence[Measurement], itemsize: int, bandwidth: float, shares_host: bool
) -> tuple[float, float]:
    """Return the fixed seconds of an optimizer step, and the ratio of its memory time to that at full
    bandwidth.

    The traffic counts Adam's two moments twice, since they are read and written. A GPU works during the launches.
    """
    many, few = sorted(points, key=lambda point: point.sizes["elements"])
    each = many.seconds / many.sizes["parameters"] if shares_host else 0.0
    moving = max(few.seconds - each * few.sizes["parameters"], few.seconds / 10)
    traffic = few.sizes["elements"] * 6 * itemsize
    return many.seconds, moving * bandwidth / traffic


def _links(points: Sequence[Measurement]) -> tuple[float | None, float | None, float | None]:
    """Return the latency of one hop, the rate inside a node and the rate between nodes; None if not measured."""
    if not points:
        return None, None, None
    columns = np.zeros((len(points), 3))
    for row, point in zip(columns, points, strict=True):
        size, stride, per_node = (point.sizes[name] for name in ("group", "stride", "per_node"))
        is_remote = size * stride > per_node
        passes = _PASSES[point.kind]
        neighbours = max(1, per_node // stride) if is_remote else size
        row[0] = passes * (neighbours - 1 + _REMOTE * math.log2(size / neighbours))
        volume = passes * point.sizes["bytes"] * (size - 1) / size
        row[2 if is_remote else 1] = volume / (neighbours if is_remote else 1)
    seconds = np.array([point.fastest if point.sizes["bytes"] <= _SMALL else point.seconds for point in points])
    latency, inside, across = (float(value) or None for value in nonnegative(columns, seconds))
    return latency, inside and 1 / inside, across and 1 / across


def _overlap(by_kind: dict[str, list[Measurement]]) -> float:
    """Return the time that running a transfer during compute saves, relative to the most that this could save.

    The fastest times of the probes are used, since they are comparable.
    """
    try:
        transfer, compute, both = (by_kind[kind][0].fastest for kind in ("transfer alone", "compute alone", "both"))
    except KeyError:
        return Coefficients().overlap
    return min(0.98, max(0.02, (transfer + compute - both) / min(transfer, compute)))


def _errors(
    by_kind: dict[str, list[Measurement]],
    collectives: Sequence[Measurement],
    device: Device,
    coefficients: Coefficients,
    itemsize: int,
) -> tuple[dict[str, list[float]], float]:
    """Return log(estimated / measured) of the planner's step model by kind, and communication's share of a layer.

    The fit does not use the measured layers. The share is that of the largest measured layer under tp=2.
    """
    model = StepModel(_layer_shape(256, 1024), Cluster(device=device, gpus=1, gpus_per_node=1), coefficients)

    def matmul(point: Measurement) -> float:
        sizes = point.sizes
        return (_flops(point) / (2 * sizes["rows"] * sizes["inner"] * sizes["columns"])) * model.matmul(
            sizes["rows"], sizes["inner"], sizes["columns"]
        )

    def work(point: Measurement, plan: Candidate, cluster: Cluster) -> tuple[float, float]:
        shape = _layer_shape(point.sizes["hidden"], point.sizes["ffn"])
        found = StepModel(shape, cluster, coefficients).layer(plan, _job(point.sizes["length"], itemsize))
        return found.forward + found.backward, found.tensor

    def layer(point: Measurement) -> float:
        return work(point, Candidate(), model.cluster)[0]

    def collective(point: Measurement) -> float:
        size, stride, per_node = (point.sizes[name] for name in ("group", "stride", "per_node"))
        whole = Cluster(device=device, gpus=max(size * stride, per_node), gpus_per_node=per_node)
        ring = StepModel(model.shape, whole, coefficients).ring(point.sizes["bytes"], size, stride)
        return _PASSES[point.kind] * ring

    groups: tuple[tuple[str, Sequence[Measurement], Callable[[Measurement], float]], ...] = (
        ("matmul", _matmuls(by_kind), matmul),
        ("attention", by_kind["attention"],
         lambda point: model.attention(_attention_flops(point), point.sizes["head_dim"])),
        ("head", by_kind["head"], lambda point: _head(point, device, coefficients, itemsize)),
        ("layer", by_kind.get("layer", ()), layer),
        ("collective", collectives, collective),
        ("large collective", [point for point in collectives if point.sizes["bytes"] >= _LARGE], collective),
    )  # fmt: skip
    share = 0.0
    if collectives and (layers := by_kind.get("layer")):
        total, sent = work(layers[-1], Candidate(tp=2), Cluster(device=device, gpus=2, gpus_per_node=2))
        share = sent / total
    logs = {kind: [math.log(estimate(point) / point.seconds) for point in points] for kind, points, estimate in groups}
    return logs, share


def _head(point: Measurement, device: Device, coefficients: Coefficients, itemsize: int) -> float:
    """Return the step model's seconds of a head with its loss."""
    sizes = point.sizes
    shape = replace(_layer_shape(sizes["hidden"], 4 * sizes["hidden"]), vocab=sizes["vocab"])
    cluster = Cluster(device=device, gpus=1, gpus_per_node=1)
    found = StepModel(shape, cluster, coefficients).head(Candidate(), _job(sizes["rows"], itemsize))
    return found.forward + found.backward


def _job(length: int, itemsize: int) -> Job:
    job = Job(seq_len=length, global_batch=1, logits="gathered")  # a probe runs the head and the loss whole
    return job.in_32_bits() if itemsize == 4 else job


def _layer_shape(hidden: int, ffn: int) -> ModelShape:
    heads = hidden // 64
    return ModelShape.of(
        name="layer", layers=1, hidden=hidden, heads=heads, kv_heads=heads, head_dim=64, ffn=ffn, vocab=1
    )


def _seconds(points: Sequence[Measurement]) -> Array:
    return np.array([point.seconds for point in points])


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(statistics.fmean(value**2 for value in values)) if values else 0.0
