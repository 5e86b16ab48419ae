"""A small network of many kinds, its gradients in one process, and a count of the all-reduces."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright.parallel.gradients import sync as gradients
from meshwright.parallel.replicas.comparison import ReplicaComparison
from support.exact import relative_difference

Gradients = dict[str, Tensor | None]


def uncompared() -> contextlib.AbstractContextManager[Any]:
    """Inside, weights are not compared before they are saved, so that a planted fault reaches the numbers."""
    return mock.patch.object(ReplicaComparison, "compare_now", lambda self, **_: None)


class Tanh(torch.autograd.Function):
    """The custom function of the documentation's example."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * (1 - y.square())


@dataclasses.dataclass
class Output:
    loss: Tensor
    hidden: list[Tensor]


class Net(nn.Module):
    """Three layers between an embedding-like first and a head; ``kind`` says how they are used."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(4, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Linear(6, 4)
        if kind == "tied":
            self.head.weight = nn.Parameter(self.first.weight.detach().t().clone())
            self.first.register_parameter("weight", None)
        if kind == "reentrant shared":  # nothing is unused, so that buckets start as early as they can
            nn.ModuleList([*self.layers[1:], self.unused]).requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        weight = self.head.weight.t() if self.kind == "tied" else self.first.weight
        x = nn.functional.linear(x, weight, self.first.bias)
        for layer in self.layers:
            if self.kind in ("checkpoint", "reentrant"):
                x = checkpoint(lambda y, layer=layer: layer(y).tanh(), x, use_reentrant=self.kind == "reentrant")
            elif self.kind == "reentrant shared":
                x = checkpoint(lambda y: self.layers[0](y).tanh(), x, use_reentrant=True)
            else:
                x = Tanh.apply(layer(x))
        y = self.head(x) * self.scale
        if self.kind == "only used on one rank" and dist.is_initialized() and dist.get_rank() == 1:
            y = y + self.unused(x)
        if self.kind == "dict":
            return {"loss": y.square().mean(), "deep": [(x,)]}
        if self.kind == "dataclass":
            return Output(loss=y.square().mean(), hidden=[x])
        return y


def loss_of(output: Any) -> Tensor:
    if isinstance(output, dict):
        return output["loss"] + output["deep"][0][0].mean()
    if isinstance(output, Output):
        return output.loss + output.hidden[0].mean()
    return output.square().mean()


def rows(rank: int, batch: int = 0) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * batch + rank), dtype=torch.float64)


def net(kind: str = "plain", seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net(kind).double()


def gradients_of(model: nn.Module) -> Gradients:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def one_process(kind: str, batches: int = 1, ranks: int = 2) -> Gradients:
    """The mean over ranks of the gradients of each rank's loss."""
    model = net(kind)
    for rank in range(ranks):
        for batch in range(batches):
            (loss_of(model(rows(rank, batch))) / ranks).backward()
    return gradients_of(model)


def assert_equal(actual: Gradients, expected: Gradients) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        found = actual[name]
        if gradient is None or found is None:
            assert gradient is found, name
        else:
            # float64, and only the order of sums differs; one rank's own gradient is off by more than 0.01.
            assert relative_difference(found, gradient) < 1e-12, name


def assert_all_equal(actual: list[Gradients], expected: Gradients) -> None:
    for of_rank in actual:
        assert_equal(of_rank, expected)


SMALL = {"comm_buffer_size": 0.0004, "last_comm_buffer_size": 0.0001}  # about 400 and 100 bytes: many buckets


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """Elements of each all-reduce that starts inside."""
    sizes: list[int] = []

    def start(flat: Tensor, axis: Any) -> Callable[[], Tensor]:
        sizes.append(flat.numel())
        return started(flat, axis)

    started = gradients.start_all_reduce
    with mock.patch.object(gradients, "start_all_reduce", start):
        yield sizes
