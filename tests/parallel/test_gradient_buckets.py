"""The flat gradients that ZeRO sends: copied into a bucket, or scaled where they are if the bucket has only one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.mesh.axes import Axis
from meshwright.optim.zero.segments import EqualSlices
from meshwright.parallel.gradients.buckets import Bucket


def bucket_of(gradient: Tensor | None, *, size: int = 128, dtype: torch.dtype = torch.float32) -> Bucket:
    parameter = nn.Parameter(torch.zeros(size))
    if gradient is not None:
        parameter.grad = gradient
    return Bucket([parameter], dtype, EqualSlices(Axis("dp", 2)).pack)


def is_scaled_in_place(bucket: Bucket) -> bool:
    gradient = bucket.parameters[0].grad
    address = 0 if gradient is None else gradient.data_ptr()
    del gradient
    wanted = bucket.flatten_gradients(0.5)
    flat = bucket.take_gradients(0.5)
    assert torch.equal(flat, wanted)
    return flat.data_ptr() == address


def test_a_bucket_of_one_gradient_sends_the_gradient_itself() -> None:
    bucket = bucket_of(torch.randn(128))  # not inside the assert, where pytest would keep the tensor
    assert is_scaled_in_place(bucket)


held = torch.randn(128)


@pytest.mark.parametrize(
    "bucket",
    [
        bucket_of(None),
        bucket_of(held.detach()),  # two tensors with one memory
        bucket_of(torch.randn(128), dtype=torch.float64),
        bucket_of(torch.randn(100), size=100),  # padded to 128
        bucket_of(torch.randn(256)[::2]),
        Bucket([bucket_of(torch.randn(64), size=64).parameters[0] for _ in range(2)], torch.float32),
    ],
    ids=["no-gradient", "shared", "wider", "padded", "strided", "two-parameters"],
)
def test_any_other_gradient_is_copied(bucket: Bucket) -> None:
    before = [p.grad.clone() for p in bucket.parameters if p.grad is not None]
    assert not is_scaled_in_place(bucket)
    assert all(map(torch.equal, before, [p.grad for p in bucket.parameters if p.grad is not None]))


class SumOfTwo(nn.Module):
    """Two parameters of which views are added, so that autograd gives both of them one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(8, 16)), nn.Parameter(torch.ones(8, 16))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.first.view(128) + self.second.view(128)) * x).sum()


def weights_after_a_step(x: Tensor, stage: int | None) -> list[Tensor]:
    model = SumOfTwo()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if stage is not None:
        # A bucket of its own for each parameter.
        config = mw.ToDistributedConfig(plan=mw.ParallelPlan(dp=2, zero_stage=stage), bucket_size_mb=1e-4)
        model, optimizer = mw.to_distributed(model, optimizer, config=config)[:2]
    model(x).backward()
    if stage is None:
        assert model.first.grad.data_ptr() == model.second.grad.data_ptr()
    optimizer.step()
    return [model.first.detach().clone(), model.second.detach().clone()]


def run_both(stage: int) -> list[float]:
    x = torch.arange(128.0)  # small whole numbers, so that every result is exact
    wanted = weights_after_a_step(x, None)
    found = weights_after_a_step(x, stage)
    return [(a - b).abs().max().item() for a, b in zip(wanted, found, strict=True)]


@pytest.mark.parametrize("stage", [1, 2])
def test_two_gradients_in_one_memory_are_each_scaled_once(stage: int, pool2: Any) -> None:
    # Scaled in place, both would be scaled twice: by 1/4 instead of by 1/2.
    assert pool2.run(run_both, stage) == [[0.0, 0.0]] * 2
