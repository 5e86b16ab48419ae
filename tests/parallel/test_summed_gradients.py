"""Sums of gradients over micro-batches, whose memory nothing else may share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from meshwright.parallel.gradients.summed import SummedGradients


def weights(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in shapes]


def inputs(count: int = 3) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, generator=draw, dtype=torch.float64) for _ in range(count)]


@pytest.mark.parametrize("name", ["both terms of a sum", "an expanded term", "a transposed weight"])
def test_a_sum_is_that_of_one_backward(name: str) -> None:
    """Autograd returns one tensor for two parameters, a tensor without own memory, and a transposed one."""
    parameters, function = {
        "both terms of a sum": (weights((2, 3), (2, 3)), lambda p, x: (p[0] + p[1]) * x),
        "an expanded term": (weights((2, 3)), lambda p, x: p[0].sum() * x.sum()),
        "a transposed weight": (weights((4, 3)), lambda p, x: x @ p[0].t()),
    }[name]
    expected = torch.autograd.grad(sum(function(parameters, x).sum() for x in inputs()), parameters)
    sums = SummedGradients(parameters, [])
    for x in inputs():
        with sums.computing():
            sums.add(parameters, torch.autograd.grad(function(parameters, x).sum(), parameters))
    # Both add three float64 numbers to each element, in different orders; a wrong sum is off by a whole gradient.
    for parameter, gradient in zip(parameters, expected, strict=True):
        torch.testing.assert_close(sums.of(parameter), gradient, rtol=1e-14, atol=1e-14)


def test_a_gradient_that_is_being_sent_is_not_added_to() -> None:
    """A learned position that is added to a stage's input has the gradient that goes to the stage before."""
    (position,) = weights((2, 3))
    sums, sent = SummedGradients([position], []), []
    for x in inputs():
        received = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
        of_input, of_position = torch.autograd.grad(((received + position) * x).sum(), [received, position])
        sums.add([position], [of_position], used=of_input)
        sent.append(of_input)
    assert all(map(torch.equal, sent, inputs()))
