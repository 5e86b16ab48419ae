"""Where a dim is said to have the rows of the batch in order, it has them, whatever has led to the tensor."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.parallel.draws.row_order import RowOrder


class Following(TorchDispatchMode):
    def __init__(self, order: RowOrder) -> None:
        super().__init__()
        self.order = order

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would wrap each call for a compiler that does not run here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.order.follow(func, args, result)
        return result


def changed(x: Tensor, choice: random.Random) -> Tensor:
    """Return the result of an operation that keeps, moves, splits, merges or mixes the rows."""
    dim, other = choice.randrange(x.ndim), choice.randrange(x.ndim)
    square = torch.eye(x.shape[-1])
    return choice.choice([
        lambda: x.reshape(x.shape[0], -1), lambda: x.reshape(-1, x.shape[-1]), lambda: x.reshape(x.shape[::-1]),
        lambda: x.reshape(choice.choice((2, 3, 4, 6, 8, 12)), -1), lambda: x.flatten(0, 1),
        lambda: x.unflatten(dim, (2, -1)),
        lambda: x.transpose(dim, other), lambda: x.movedim(dim, other), lambda: x.unsqueeze(dim), lambda: x.squeeze(),
        lambda: x + 0, lambda: x.clone(), lambda: torch.zeros_like(x) + x, lambda: x @ square,
        lambda: torch.bmm(x, square.expand(x.shape[0], -1, -1)), lambda: x.mean(dim, keepdim=True), lambda: x.amax(dim),
        lambda: x.gather(dim, torch.zeros_like(x, dtype=torch.int64)), lambda: torch.cat([x, x], dim),
        lambda: x.repeat(2, *[1] * (x.ndim - 1)), lambda: x.expand(2, *x.shape), lambda: x.flip(dim),
        lambda: x.index_select(dim, torch.randperm(x.shape[dim])), lambda: x.sort(dim)[0], lambda: x.narrow(dim, 0, 1),
        lambda: x.index_put((x[..., 0] < 0,), torch.zeros(x.shape[-1])), lambda: x.new_zeros(x.shape) + x,
        lambda: x.index_put((torch.randperm(len(x)),), x),
    ])()  # fmt: skip


def test_an_order_that_is_known_is_that_of_the_rows() -> None:
    known = 0
    for seed in range(250):
        choice = random.Random(seed)
        rows = choice.choice((2, 4, 6))
        x = torch.arange(rows).float().view(rows, 1, 1).repeat(1, choice.choice((3, 4, 5)), choice.choice((2, 3, 4)))
        order = RowOrder([x], rows)
        for _ in range(6):
            try:
                with Following(order):
                    new = changed(x, choice)
            except (RuntimeError, IndexError):  # not for a tensor of this shape
                continue
            x = new if new.ndim > 0 and new.numel() < 500 else x
            if (dim := order.of(x)) is not None:
                expected = torch.arange(rows).float().repeat_interleave(x.shape[dim] // rows)
                found = x.movedim(dim, -1)
                assert torch.allclose(found, expected.expand_as(found)), (seed, dim)
                known += 1
    assert known > 200
