"""Probes of the computations of one process in a training step, at the sizes of decoders."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.calibration.decoder_layer import DecoderLayer, norm, rotate
from meshwright.calibration.timing import Probe, Run, seconds_of
from meshwright.mesh.axes import Axis
from meshwright.parallel.losses.cross_entropy import VocabParallelCrossEntropy, Words

_ROWS = (128, 512, 2048, 8192)
_WEIGHTS = (
    (256, 256), (512, 512), (512, 2048), (2048, 512), (1024, 1024), (1024, 4096), (4096, 1024), (4096, 4096),
    (4096, 16384), (16384, 4096),
)  # fmt: skip
_MATMULS = 16  # number of matmul sizes to measure, spread over the sizes that do not take too long
_HEADS, _HEAD_DIM = 8, 64
_TINY = 16


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

    most = rate * longest
    for rows, (inner, columns) in _bearable(most):
        sizes = {"rows": rows, "inner": inner, "columns": columns}
        yield Probe(kind="matmul", make=partial(_forward, new, rows, inner, columns), sizes=sizes)
        yield Probe(kind="matmul backward", make=partial(_backward, new, rows, inner, columns), sizes=sizes)
    for length in (128, 256, 512, 1024, 2048, 4096):
        if 7 * _HEADS * _HEAD_DIM * length**2 <= most / 3:
            sizes = {"length": length, "heads": _HEADS, "head_dim": _HEAD_DIM}
            yield Probe(kind="attention", make=partial(_attention, new, length), sizes=sizes)
    for rows, width in ((512, 512), (2048, 512), (2048, 2048), (8192, 4096)):
        if rows * width * 3000 <= most or rows * width <= 2**18:
            sizes = {"rows": rows, "width": width}
            for kind, make in _ELEMENTWISE.items():
                yield Probe(kind=kind, make=partial(make, new, rows, width), sizes=sizes)
    for length, hidden in ((256, 256), (256, 512), (512, 512), (512, 1024), (2048, 1024), (2048, 4096)):
        if hidden == 256 or _layer_flops(length, hidden) <= most:  # at least one layer, to check the fit
            sizes = {"length": length, "hidden": hidden, "ffn": 4 * hidden}
            yield Probe(kind="layer", make=partial(_layer, device, dtype, length, hidden), sizes=sizes)
    yield Probe(kind="launch", make=partial(_layer, device, dtype, 4, 64))
    elements = 2**26 if device.type == "cuda" else 2**23
    yield Probe(kind="stream", make=partial(_stream, new, elements), sizes={"elements": elements})
    for count, each in ((64, _TINY), (8, 2**24 if device.type == "cuda" else 2**18)):
        sizes = {"parameters": count, "elements": count * each}
        yield Probe(kind="adamw", make=partial(_adamw, new, count, each), sizes=sizes)


def _bearable(most: float) -> list[tuple[int, tuple[int, int]]]:
    table = [
        (rows, weight)
        for rows, weight in itertools.product(_ROWS, _WEIGHTS)
        if 4 * rows * weight[0] * weight[1] <= most or (rows == _ROWS[0] and weight[0] <= 512)
    ]
    table.sort(key=lambda size: size[0] * size[1][0] * size[1][1])
    step = max(1.0, len(table) / _MATMULS)
    return [table[int(index * step)] for index in range(min(len(table), _MATMULS))]


New = Callable[..., Tensor]


def _forward(new: New, rows: int, inner: int, columns: int) -> Run:
    x, weight = new(rows, inner), new(columns, inner)
    return lambda: F.linear(x, weight)


def _backward(new: New, rows: int, inner: int, columns: int) -> Run:
    x, weight, grad = new(rows, inner), new(columns, inner), new(rows, columns)
    return lambda: (grad @ weight, grad.t() @ x)


def _attention(new: New, length: int) -> Run:
    qkv = [new(1, length, _HEADS, _HEAD_DIM).requires_grad_() for _ in range(3)]
    grad = new(1, _HEADS, length, _HEAD_DIM)

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
    heads = width // _HEAD_DIM
    cos, sin = new(rows, _HEAD_DIM), new(rows, _HEAD_DIM)
    x, grad = (new(1, heads, rows, _HEAD_DIM) for _ in range(2))
    return _there_and_back(lambda q: rotate(q, cos, sin), grad, x)


def _loss(new: New, rows: int, width: int) -> Run:
    logits = new(rows, width).float()
    targets = torch.arange(rows, device=logits.device) % width
    words = Words.of_columns(width, vocab_size=width, ignored=-100, axis=Axis("tp"))

    def run() -> None:
        leaf = logits.requires_grad_()
        loss = VocabParallelCrossEntropy.apply(leaf.clone(), targets, words)
        torch.autograd.grad(loss, leaf)

    return run


_ELEMENTWISE: dict[str, Callable[[New, int, int], Run]] = {
    "norm": _norm,
    "gate": _gate,
    "residual": _residual,
    "rotary": _rotary,
    "loss": _loss,
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
    optimizer = torch.optim.AdamW(parameters)
    optimizer.step()
    return optimizer.step
