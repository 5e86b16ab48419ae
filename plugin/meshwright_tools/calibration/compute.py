"""Probes of one process's computations in a training step, timed in turn on all processes at once.

Their decoder layer is like those of transformers, but does not depend on transformers.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.faults.together import texts_of_all
from meshwright.mesh.axes import Axis
from meshwright.parallel.losses.chunked_head import ChunkedHeadLoss, ChunkedLoss
from meshwright.parallel.losses.cross_entropy import Words
from meshwright_plan.machine.hardware import Measurement

Run = Callable[[], object]

SAMPLE = 0.01  # shortest sample in seconds; shorter samples measure the clock and the scheduler
_CROWDED_SAMPLE = 0.2  # the same, if processes wait for cores: many times the few milliseconds that one keeps a core
_SHORTEST = 5e-5  # seconds of the shortest run of which a sample is full; shorter runs repeat no more often
_ROUNDS = 3  # least number of rounds, even if the time is up


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One piece of work to measure.

    Args:
        kind: name of the work.
        make: function that allocates the tensors and returns the work. It is called for each sample, so the memory is
            held for one sample only.
        sizes: name -> size.
    """

    kind: str
    make: Callable[[], Run]
    sizes: Mapping[str, int] = field(default_factory=dict)


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished its queued work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def seconds_of(run: Run, device: torch.device, repeats: int = 1) -> float:
    """Return the mean seconds of one run over ``repeats`` runs."""
    synchronise(device)
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    synchronise(device)
    return (time.perf_counter() - start) / repeats


def sample_seconds(probes: int, *, seconds: float, is_crowded: bool) -> float:
    """Return the shortest sample that measures what a process gets of the machine.

    If processes wait for cores, a sample that fits into the time for which one of them keeps a core would show the rate
    of a core that it has alone. A longer one shows its share.

    Args:
        probes: number of probes, each of which is sampled at least three times.
        seconds: time to spend.
        is_crowded: whether the processes have more threads than there are cores.

    Example:
        >>> sample_seconds(50, seconds=65, is_crowded=True), sample_seconds(50, seconds=65, is_crowded=False)
        (0.2, 0.01)
    """
    if not is_crowded:
        return SAMPLE
    # Half of the time is left for allocating, for the run before each sample and for waiting.
    return max(SAMPLE, min(_CROWDED_SAMPLE, seconds / (2 * _ROUNDS * max(1, probes))))


def measure(
    probes: Sequence[Probe],
    device: torch.device,
    *,
    seconds: float,
    sample: float = SAMPLE,
    tick: Callable[[str], None] = lambda _: None,
) -> list[Measurement]:
    """Time every probe on all processes at once and return the medians, the same on every process.

    The probes take turns, round after round, so that a busy period of the machine affects all probes a little instead
    of one probe fully.

    Args:
        probes: the probes, the same on every process.
        device: the device that they run on.
        seconds: time to spend; at least three rounds are run.
        sample: seconds that a sample lasts at least; a shorter run is repeated.
        tick: function that is called before each sample with the kind of its probe.
    """
    start, rounds = time.perf_counter(), 0
    samples: list[list[float]] = [[] for _ in probes]
    repeats = [0] * len(probes)
    while _agreed(float(rounds < _ROUNDS or _is_time_left(start, seconds, rounds))) > 0:
        for index, probe in enumerate(probes):
            tick(probe.kind)
            run = probe.make()
            run()
            if not repeats[index]:
                once = _agreed(seconds_of(run, device))
                repeats[index] = max(1, int(sample / max(once, _SHORTEST)))
            _agreed(0.0)  # all processes begin at the same time
            samples[index].append(seconds_of(run, device, repeats[index]))
            del run
        rounds += 1
    return [_measurement(probe, pooled) for probe, pooled in zip(probes, _pooled(samples), strict=True)]


def _measurement(probe: Probe, samples: Sequence[float]) -> Measurement:
    low, middle, high = statistics.quantiles(samples, n=4)
    return Measurement(
        kind=probe.kind, sizes=probe.sizes, seconds=middle, fastest=min(samples), spread=(high - low) / 2 / middle
    )


def _is_time_left(start: float, seconds: float, rounds: int) -> bool:
    used = time.perf_counter() - start
    return used + used / rounds <= seconds


def _agreed(value: float) -> float:
    """Return the largest value of all processes, so that all processes run the same number of rounds."""
    if not dist.is_initialized():
        return value
    largest = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def _pooled(samples: list[list[float]]) -> list[list[float]]:
    if not dist.is_initialized():
        return samples
    gathered: list[list[list[float]]] = [json.loads(text) for text in texts_of_all(json.dumps(samples))]
    return [list(itertools.chain(*columns)) for columns in zip(*gathered, strict=True)]


_MATMULS = 16  # number of matmul sizes to measure, spread over the sizes that do not take too long
_FEWEST = 4  # number of the smallest sizes that a slow machine measures, however long they take
_HEAD_DIM = 64  # width of a head in rotations and layers
_TINY = 16


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes at which a kind of device is measured: those of training, at which the device is the limit.

    A GPU works while the host launches its next kernels. Of kernels that are shorter than their launches, only the time
    of the launches could be measured. On the host of an H200, a norm's forward and backward take 0.55 ms to launch.

    Args:
        rows: rows of matmuls.
        weights: inner and outer sizes of matmuls.
        shortest: seconds that a matmul takes at least at the rough rate, or it is left out.
        attention: batch, length, heads and width of a head of attention.
        elementwise: rows and width of norms, gates, residual sums and rotations.
        head: tokens, hidden width and vocabulary of the head with its loss.
        layers: length and hidden width of whole layers.
        stream: elements of the three tensors that show the memory bandwidth.
        optimizer: elements of each of a few large tensors that AdamW updates.
    """

    rows: tuple[int, ...]
    weights: tuple[tuple[int, int], ...]
    shortest: float
    attention: tuple[tuple[int, int, int, int], ...]
    elementwise: tuple[tuple[int, int], ...]
    head: tuple[tuple[int, int, int], ...]
    layers: tuple[tuple[int, int], ...]
    stream: int
    optimizer: int


_ON_HOST = Sizes(
    rows=(128, 512, 2048, 8192),
    weights=(
        (256, 256), (512, 512), (512, 2048), (2048, 512), (1024, 1024), (1024, 4096), (4096, 1024), (4096, 4096),
        (4096, 16384), (16384, 4096),
    ),
    shortest=0.0,
    attention=(
        (1, 128, 8, 64), (1, 256, 8, 64), (1, 512, 8, 64), (1, 1024, 8, 64), (1, 2048, 8, 64), (1, 4096, 8, 64),
        (1, 256, 4, 128), (1, 1024, 4, 128),
    ),
    elementwise=((512, 512), (2048, 512), (2048, 2048), (8192, 4096)),
    head=((512, 256, 4096), (2048, 256, 16384), (2048, 1024, 32768)),
    layers=((256, 256), (256, 512), (512, 512), (512, 1024), (2048, 1024), (2048, 4096)),
    stream=2**23,
    optimizer=2**18,
)  # fmt: skip
_ON_GPU = Sizes(
    rows=(2048, 8192, 16384),
    weights=(
        (768, 768), (1024, 1024), (2048, 768), (1024, 4096), (2048, 2048), (2048, 8192), (8192, 2048), (4096, 4096),
        (4096, 16384), (16384, 4096),
    ),
    shortest=2.5e-5,  # a launch of one takes the host up to 15 microseconds
    attention=(
        (8, 2048, 12, 64), (2, 4096, 32, 64), (1, 8192, 32, 64), (4, 2048, 16, 128), (2, 4096, 24, 128),
        (1, 8192, 32, 128),
    ),
    elementwise=((32768, 2048), (16384, 4096)),
    head=((16384, 1024, 65536), (8192, 2048, 131072)),
    layers=((8192, 2048), (4096, 4096), (8192, 4096)),
    stream=2**26,
    optimizer=2**25,
)  # fmt: skip


def rough_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the approximate floating-point operations per second of a matmul, for choosing sizes."""
    size = 4096 if device.type == "cuda" else 512
    a, b = (torch.rand(size, size, device=device, dtype=dtype) for _ in range(2))
    for _ in range(3):
        a @ b
    return 2 * size**3 / min(seconds_of(lambda: a @ b, device) for _ in range(5))


def compute_probes(device: torch.device, dtype: torch.dtype, *, rate: float, longest: float) -> Iterator[Probe]:
    """Yield the probes of computations.

    Args:
        device: the device to compute on.
        dtype: the dtype to compute in.
        rate: approximate floating-point operations per second of the device.
        longest: seconds that one run may take.
    """

    def new(*shape: int) -> Tensor:
        return torch.rand(shape, device=device, dtype=dtype)

    at, most = _ON_GPU if device.type == "cuda" else _ON_HOST, rate * longest
    for rows, (inner, columns) in _bearable(at, rate * at.shortest, most):
        sizes = {"rows": rows, "inner": inner, "columns": columns}
        yield Probe(kind="matmul", make=partial(_forward, new, rows, inner, columns), sizes=sizes)
        yield Probe(kind="matmul backward", make=partial(_backward, new, rows, inner, columns), sizes=sizes)
    for batch, length, heads, width in at.attention:
        if 7 * batch * heads * width * length**2 <= most / 3 or (batch, length, heads, width) == at.attention[0]:
            sizes = {"batch": batch, "length": length, "heads": heads, "head_dim": width}
            yield Probe(kind="attention", make=partial(_attention, new, batch, length, heads, width), sizes=sizes)
    for rows, width in at.elementwise:
        if rows * width * 3000 <= most or (rows, width) == at.elementwise[0]:
            sizes = {"rows": rows, "width": width}
            for kind, make in _ELEMENTWISE.items():
                yield Probe(kind=kind, make=partial(make, new, rows, width), sizes=sizes)
    for rows, hidden, vocab in at.head:
        if 6 * rows * hidden * vocab <= most or (rows, hidden, vocab) == at.head[0]:
            sizes = {"rows": rows, "hidden": hidden, "vocab": vocab}
            yield Probe(kind="head", make=partial(_head, new, rows, hidden, vocab), sizes=sizes)
    for length, hidden in at.layers:
        # At least one layer, to check the fit.
        if (length, hidden) == at.layers[0] or _layer_flops(length, hidden) <= most:
            sizes = {"length": length, "hidden": hidden, "ffn": 4 * hidden}
            yield Probe(kind="layer", make=partial(_layer, device, dtype, length, hidden), sizes=sizes)
    yield Probe(kind="launch", make=partial(_layer, device, dtype, 4, 64))
    yield Probe(kind="stream", make=partial(_stream, new, at.stream), sizes={"elements": at.stream})
    for count, each in ((64, _TINY), (8, at.optimizer)):
        sizes = {"parameters": count, "elements": count * each}
        yield Probe(kind="adamw", make=partial(_adamw, new, count, each), sizes=sizes)


def _bearable(at: Sizes, least: float, most: float) -> list[tuple[int, tuple[int, int]]]:
    """Return matmul sizes spread over those of ``least`` to ``most`` operations; the smallest on a slow machine."""
    table = sorted(itertools.product(at.rows, at.weights), key=_flops)
    long = [size for size in table if _flops(size) >= least]
    bearable = max([size for size in long if 2 * _flops(size) <= most], long[:_FEWEST], key=len)
    step = max(1.0, len(bearable) / _MATMULS)
    return [bearable[int(index * step)] for index in range(min(len(bearable), _MATMULS))]


def _flops(size: tuple[int, tuple[int, int]]) -> float:
    rows, (inner, columns) = size
    return 2.0 * rows * inner * columns


New = Callable[..., Tensor]


def _forward(new: New, rows: int, inner: int, columns: int) -> Run:
    x, weight = new(rows, inner), new(columns, inner)
    return lambda: F.linear(x, weight)


def _backward(new: New, rows: int, inner: int, columns: int) -> Run:
    x, weight, grad = new(rows, inner), new(columns, inner), new(rows, columns)
    return lambda: (grad @ weight, grad.t() @ x)


def _attention(new: New, batch: int, length: int, heads: int, width: int) -> Run:
    qkv = [new(batch, length, heads, width).requires_grad_() for _ in range(3)]
    grad = new(batch, heads, length, width)

    def run() -> object:
        q, k, v = (x.transpose(1, 2) for x in qkv)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(out, qkv, grad)

    return run


def _there_and_back(function: Callable[..., Tensor], grad: Tensor, *inputs: Tensor) -> Run:
    for x in inputs:
        x.requires_grad_()
    return lambda: torch.autograd.grad(function(*inputs), inputs, grad)


def _norm(new: New, rows: int, width: int) -> Run:
    return _there_and_back(norm, new(rows, width), new(rows, width), new(width))


def _gate(new: New, rows: int, width: int) -> Run:
    return _there_and_back(lambda a, b: F.silu(a) * b, *(new(rows, width) for _ in range(3)))


def _residual(new: New, rows: int, width: int) -> Run:
    # The second sum is that of backward: both addends have other consumers in a network, so gradients are summed.
    x, y = new(rows, width), new(rows, width)
    return lambda: (x + y, x + y)


def _rotary(new: New, rows: int, width: int) -> Run:
    cos, sin = new(rows, _HEAD_DIM), new(rows, _HEAD_DIM)
    x, grad = (new(1, rows, width // _HEAD_DIM, _HEAD_DIM).transpose(1, 2) for _ in range(2))  # as of a projection
    return _there_and_back(lambda q: rotate(q, cos, sin), grad, x)


def _head(new: New, rows: int, hidden: int, vocab: int) -> Run:
    x, weight = new(rows, hidden).requires_grad_(), new(vocab, hidden).requires_grad_()
    targets = torch.arange(rows, device=x.device) % vocab
    words = Words.of_columns(vocab, vocab_size=vocab, ignored=-100, axis=Axis("tp"))
    loss = ChunkedLoss(words=words, steps=(), dtype=x.dtype)
    return lambda: torch.autograd.grad(ChunkedHeadLoss.apply(x, weight, None, targets, None, loss), (x, weight))


_ELEMENTWISE: dict[str, Callable[[New, int, int], Run]] = {
    "norm": _norm,
    "gate": _gate,
    "residual": _residual,
    "rotary": _rotary,
}


def _layer_flops(length: int, hidden: int) -> float:
    return 6.0 * length * hidden * (4 * hidden + 12 * hidden) + 7 * hidden * length**2


def _layer(device: torch.device, dtype: torch.dtype, length: int, hidden: int) -> Run:
    layer = DecoderLayer(hidden, 4 * hidden, _HEAD_DIM).to(device, dtype)
    x = torch.rand(1, length, hidden, device=device, dtype=dtype, requires_grad=True)
    cos, sin = (torch.rand(length, _HEAD_DIM, device=device, dtype=dtype) for _ in range(2))
    grad = torch.rand_like(x)
    weights = [x, *layer.parameters()]
    return lambda: torch.autograd.grad(layer(x, cos, sin), weights, grad)


def _stream(new: New, elements: int) -> Run:
    a, b, c = (new(elements) for _ in range(3))
    return lambda: torch.add(a, b, out=c)


def _adamw(new: New, count: int, each: int) -> Run:
    parameters = [nn.Parameter(new(each)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = new(each)
    optimizer = torch.optim.AdamW(parameters, fused=parameters[0].is_cuda)  # the Trainer's default
    optimizer.step()
    return optimizer.step


_SIZES = (2**16, 2**20, 2**24, 2**26)


def copy_probes(device: torch.device) -> Iterator[Probe]:
    """Yield the probes of copies."""
    for size in _SIZES:
        for kind in ("host to device", "device to host") if device.type == "cuda" else ("memory to memory",):
            yield Probe(kind=kind, make=partial(_copy, device, kind, size), sizes={"bytes": size})


def _copy(device: torch.device, kind: str, size: int) -> Run:
    is_cuda = device.type == "cuda"
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=is_cuda)
    other = torch.zeros(size, dtype=torch.uint8, device=device)
    source, target = (other, host) if kind == "device to host" else (host, other)
    return lambda: target.copy_(source, non_blocking=is_cuda)


def norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Return the root-mean-square norm of x, computed in 32 bits."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x with rotary position embeddings."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class _Norm(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.weight)


class DecoderLayer(nn.Module):
    """Attention with rotary position embeddings and a gated MLP, each with a norm before it and a residual connection.

    Args:
        hidden: width of the residual stream.
        ffn: width of the MLP.
        head_dim: width of one head.
    """

    def __init__(self, hidden: int, ffn: int, head_dim: int):
        super().__init__()
        self.head_dim = head_dim
        self.before_attention, self.before_mlp = _Norm(hidden), _Norm(hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(hidden, ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the layer's output for x [batch, length, hidden] and cos, sin [length, head_dim]."""
        y = self.before_attention(x)
        q, k, v = (
            project(y).view(*y.shape[:2], -1, self.head_dim).transpose(1, 2) for project in (self.q, self.k, self.v)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).reshape(*x.shape))
        y = self.before_mlp(x)
        result: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return result
