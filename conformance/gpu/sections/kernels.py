"""The kernels that a step uses, each against plain operations and against float64."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from conformance.gpu.section import Check, Place, Section, attempt
from meshwright.context.flash import FlashCall, flash_attention, has_flash
from meshwright.context.key_exchange import WholeKeys
from meshwright.mesh.axes import Axis
from meshwright.parallel.losses.chunked_head import ChunkedHeadLoss, ChunkedLoss
from meshwright.parallel.losses.cross_entropy import Words
from meshwright.parallel.sequence_parts import TokenRun

Operation = Callable[..., Tensor]

# A kernel may round at other places than plain operations, so that its error is another draw of the same size. A wrong
# kernel is off by far more.
_ERROR = 2.0
_MEMORY = 0.5  # of the peak of the head and the loss without chunks, with a vocabulary as large as it is on a GPU
_FAULT = 1.05  # the factor of a planted fault
_REPEATS = 5


@dataclass(frozen=True)
class Kernel:
    """A fast operation, plain operations for the same result, and the shapes of the inputs."""

    name: str
    fast: Operation
    plain: Operation
    shapes: tuple[tuple[int, ...], ...]


def kernels(place: Place) -> Iterator[Kernel]:
    """Yield the kernels with sizes for the device."""
    tokens, width, words = (4096, 2048, 128256) if place.is_cuda else (512, 128, 4000)
    targets = torch.arange(tokens, device=place.device) % words
    yield Kernel(
        "head and loss in chunks",
        lambda hidden, weight: _chunked(hidden, weight, targets),
        lambda hidden, weight: F.cross_entropy(_wide(hidden @ weight.T), targets),
        ((tokens, width), (words, width)),
    )
    length, heads = (4096, 16) if place.is_cuda else (256, 4)
    halves = (TokenRun(0, length // 2), TokenRun(length // 2, length - length // 2))
    call = FlashCall(keys=WholeKeys(None), runs=halves, documents=((0,),), scale=0.125)
    yield Kernel(
        "flash attention in blocks, as a ring runs it",
        lambda q, k, v: flash_attention(call, q, k, v),
        _attention,
        ((1, heads, length, 64), (1, heads // 2, length, 64), (1, heads // 2, length, 64)),
    )
    yield Kernel(
        "RMS norm",
        lambda x, weight: F.rms_norm(x, (width,), weight, 1e-6),
        lambda x, weight: weight * (_wide(x) * torch.rsqrt(_wide(x).square().mean(-1, True) + 1e-6)).to(x.dtype),
        ((tokens, width), (width,)),
    )
    experts, per_expert = 8, tokens // 8
    ends = torch.arange(per_expert, tokens + 1, per_expert, device=place.device, dtype=torch.int32)
    yield Kernel(
        "grouped matrix multiplication of experts",
        lambda x, weight: torch._grouped_mm(x, weight, offs=ends),
        lambda x, weight: torch.cat([part @ own for part, own in zip(x.split(per_expert), weight, strict=True)]),
        ((tokens, width), (experts, width, 2 * width)),
    )


class Kernels(Section):
    """Compares each kernel's results and gradients, and measures its time and memory."""

    name = "kernels"
    question = "Are the kernels as exact as plain operations, against float64, and how fast and full are they?"
    share = 1.5

    def run(self, place: Place) -> Iterator[Check]:
        dtype = torch.bfloat16 if place.is_cuda else torch.float32
        for kernel in kernels(place):
            yield from attempt(kernel.name, _checks, kernel, dtype, place)


def _checks(kernel: Kernel, dtype: torch.dtype, place: Place) -> Iterator[Check]:
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(shape, generator=generator).to(place.device, dtype) for shape in kernel.shapes]
    if "flash" in kernel.name and not has_flash(*inputs):
        yield Check(what=f"{kernel.name}: torch's kernel gives the results of plain operations", figure=0, goal=1,
                    at_least=True)  # fmt: skip
        return
    exact = _results(kernel.plain, [x.double() for x in inputs])
    plain = _measured(kernel.plain, inputs, exact, place)
    fast = _measured(kernel.fast, inputs, exact, place, _FAULT if place.plants else 1.0)
    yield Check(
        what=f"{kernel.name}: error against float64, relative to that of plain operations",
        figure=fast.error / max(plain.error, torch.finfo(dtype).eps / 8),
        goal=_ERROR,
        details={"error": fast.error, "error of plain": plain.error},
    )
    yield Check(what=f"{kernel.name}: time relative to plain operations", figure=fast.seconds / plain.seconds,
                details={"ms": 1e3 * fast.seconds, "ms of plain": 1e3 * plain.seconds})  # fmt: skip
    if place.is_cuda:
        yield Check(what=f"{kernel.name}: memory relative to plain operations", figure=fast.memory / plain.memory,
                    goal=_MEMORY if "head" in kernel.name else None)  # fmt: skip


@dataclass(frozen=True)
class _Measured:
    """The largest relative error of a result or gradient, seconds, and the bytes above the inputs."""

    error: float
    seconds: float
    memory: float


def _measured(
    operation: Operation, inputs: list[Tensor], exact: list[Tensor], place: Place, factor: float = 1.0
) -> _Measured:
    given = [inputs[0] * factor, *inputs[1:]]
    if place.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if place.is_cuda else 0
    found = _results(operation, given)
    memory = torch.cuda.max_memory_allocated() - before if place.is_cuda else 0
    error = max(float((x.double() - y).norm() / y.norm()) for x, y in zip(found, exact, strict=True))
    del found
    seconds = []
    for _ in range(_REPEATS):
        began = _now(place)
        _results(operation, given)
        seconds.append(_now(place) - began)
    return _Measured(error, min(seconds), memory)


def _now(place: Place) -> float:
    if place.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def _results(operation: Operation, inputs: list[Tensor]) -> list[Tensor]:
    """Return the result and the gradients of the inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    result = operation(*leaves)
    generator = torch.Generator().manual_seed(4)
    grad = torch.randn(result.shape, generator=generator).to(result) if result.ndim else torch.ones_like(result)
    return [result.detach(), *torch.autograd.grad(result, leaves, grad)]


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    words = Words.of_columns(len(weight), vocab_size=len(weight), ignored=-100, axis=Axis("tp"))
    loss = ChunkedLoss(words=words, steps=(), dtype=hidden.dtype)
    total: Tensor = ChunkedHeadLoss.apply(hidden, weight, None, targets, None, loss)
    return total / len(hidden)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    key, value = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    length = q.shape[2]
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = (0.125 * q @ key.transpose(-1, -2)).masked_fill(hidden, -torch.inf)
    return (_wide(scores).softmax(-1).to(q.dtype) @ value).transpose(1, 2)
