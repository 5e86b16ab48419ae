"""The norm of gradients in blocks, without other ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwright.optim.clip_grad_norm import global_norm

SHAPES = [(3000, 1000), (255,), (256,), (257, 3), (), (0,), (0, 4)]


def gradients(dtype: torch.dtype) -> list[Tensor]:
    """Gradients of many sizes, one of them not contiguous and one on the scale of a large model's."""
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    return [*found, torch.randn(500, 700, generator=generator).to(dtype).t(), found[0][::2, 1:] * 1e-3]


# In float32 the norms of blocks of random numbers are off by at most 1e-7 together. torch's float32 kernel over the
# first of these tensors is off by 6e-5.
@pytest.mark.parametrize(
    ("dtype", "off"), [(torch.float32, 1e-7), (torch.bfloat16, 1e-7), (torch.float16, 1e-7), (torch.float64, 1e-14)]
)
@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, float("inf")])
def test_a_norm_is_as_exact_as_in_float64(dtype: torch.dtype, off: float, order: float) -> None:
    counted = [(grad, 2.0 if number % 2 else 1.0) for number, grad in enumerate(gradients(dtype))]
    found = global_norm(counted, norm_type=order, axes=(), like=torch.zeros(()))
    if order == float("inf"):
        expected = max(grad.abs().max() for grad, _ in counted if grad.numel())
    else:
        expected = sum((grad.double().abs() ** order).sum() / copies for grad, copies in counted) ** (1 / order)
    assert found.dtype == torch.float64
    assert abs(found / expected - 1) <= off


@pytest.mark.parametrize("scale", [1e-40, 1e-25, 1e-19, 1e18, 1e20, 1e37])
def test_squares_beyond_float32(scale: float) -> None:
    """Equal elements round alike in the sum of a block, which is then off by up to 1e-6."""
    grad = torch.full((1000,), scale)
    found = global_norm([(grad, 1.0)], norm_type=2.0, axes=(), like=torch.zeros(()))
    assert abs(found / grad.double().norm() - 1) <= 1e-6


def test_a_rank_without_gradients() -> None:
    assert global_norm([], norm_type=2.0, axes=(), like=torch.zeros(())) == 0
    assert global_norm([(torch.zeros(0), 1.0)], norm_type=2.0, axes=(), like=torch.zeros(())) == 0
