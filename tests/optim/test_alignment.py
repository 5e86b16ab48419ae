"""Where parameters begin in flat tensors: at a multiple of 128 bytes, after a parameter of any size.

Tolerance 1e-10 in float64 for the reason of test_parity.py: only the order of sums differs.
"""

from __future__ import annotations

import contextlib
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForTokenClassification

import meshwright as mw
from meshwright.mesh.axes import Axis
from meshwright.optim.runtime import runtime_of
from meshwright.optim.zero.flat_parameters import FlatShard
from meshwright.optim.zero.segments import EqualSlices
from meshwright.parallel.gradients.buckets import Bucket
from support.exact import Float64, relative_difference
from support.models import SIZES, tokens

LINE = 128  # bytes
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def parameters_of(sizes: list[int], dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((size,), 2.0, dtype=dtype)) for size in sizes]


@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=9),
    ranks=st.integers(1, 9),
    extra=st.integers(0, 9),
    dtype=st.sampled_from(DTYPES),
)
def test_offsets_of_any_sizes(sizes: list[int], ranks: int, extra: int, dtype: torch.dtype) -> None:
    parameters = parameters_of(sizes, dtype)
    bucket = Bucket(parameters, dtype, EqualSlices(Axis("dp", ranks)).pack)
    assert all(offset * dtype.itemsize % LINE == 0 for offset in bucket.offsets)
    assert bucket.numel % ranks == 0 and bucket.numel < sum(sizes) + 64 * len(sizes) + ranks
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    flat = bucket.flatten_gradients(3.0, extra=extra)
    assert len(flat) == bucket.numel + extra
    for _, segment in bucket.segments(flat):
        assert segment.unique().tolist() == [3.0]
        segment.zero_()
    assert not flat.any()  # the segments do not overlap, and all else was zero
    # The units of stage 3, whose gradients are reduced in such buckets, have the same offsets.
    shards = [FlatShard(parameters, [p.shape for p in parameters], EqualSlices(Axis("dp", ranks, rank)), flat.device)
              for rank in range(ranks)]  # fmt: skip
    assert shards[0].bucket.offsets == bucket.offsets
    for index, parameter in enumerate(parameters):
        for shard in shards:
            shard.keep(index, parameter.data)
        assert sum(shard.own(index).numel() for shard in shards) == parameter.numel()
    whole = torch.cat([shard.master for shard in shards])
    for _, segment in shards[0]._segments(whole):
        assert segment.unique().tolist() == [2.0]
        segment.zero_()
    assert not whole.any()


@given(blocks=st.lists(st.integers(1, 9), min_size=1, max_size=9), ranks=st.integers(1, 9))
def test_multiples_of_64_elements_have_no_padding(blocks: list[int], ranks: int) -> None:
    sizes = [64 * count for count in blocks]
    bucket = Bucket(parameters_of(sizes, torch.bfloat16), torch.float32, EqualSlices(Axis("dp", ranks)).pack)
    *offsets, total = accumulate(sizes, initial=0)
    assert bucket.offsets == offsets
    assert 0 <= bucket.numel - total < ranks  # only what makes the ranks' shares equal


def build() -> Any:
    """A model with a head of 3 labels, whose bias has 3 elements and is the first parameter of a bucket."""
    torch.manual_seed(0)
    return LlamaForTokenClassification(LlamaConfig(**SIZES, num_labels=3, classifier_dropout=0.0)).train()


def train(plan: str | None, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Train three steps; return numbers, and how far weights and gradients begin after a multiple of 128 bytes."""
    weights, gradients, padding = {}, {}, torch.zeros(())
    with Float64() if dtype is torch.float64 else contextlib.nullcontext():
        model = build().to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
        if plan:
            model, optimizer, _ = mw.to_distributed(model, optimizer, plan=plan)
        for module in model.modules():  # in stage 3, parameters are views only while their module runs
            module.register_forward_pre_hook(lambda of, _: weights.update(_remainders(of)))
        ids, losses, norms = tokens(4, 8), [], []
        for _ in range(3):
            loss = model(input_ids=ids, labels=ids % 3).loss
            loss.backward()
            losses.append(loss.item())
            if plan == "dp2":  # under ZeRO, gradients of the parameters are stand-ins
                gradients = {name: _remainder(p.grad) for name, p in model.named_parameters()}
            norms.append((mw.clip_grad_norm_ if plan else _clip)(model, 0.1).item())
            optimizer.step()
            optimizer.zero_grad()
        if plan:
            padding = _largest_padding(model)
        values = mw.full_state_dict(model) if plan else dict(model.state_dict())
    return {"losses": losses, "norms": norms, "values": values, "weights": set(weights.values()),
            "gradients": gradients, "padding": padding.item()}  # fmt: skip


def _clip(model: nn.Module, limit: float) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), limit)


def _remainders(module: nn.Module) -> dict[int, int]:
    return {id(p): _remainder(p) for p in module.parameters(recurse=False)}


def _remainder(tensor: Tensor) -> int:
    # The allocator of the CPU aligns a tensor to 64 bytes only, that of a GPU to 512.
    return tensor.storage_offset() * tensor.element_size() % LINE + tensor.data_ptr() % 64


def _largest_padding(model: nn.Module) -> Tensor:
    """Return the largest number in the padding of what the optimizer steps; zero without ZeRO."""
    zero = runtime_of(model).gradients.zero
    largest = torch.zeros(())
    for sharded in zero.sharded if zero else ():
        rest = sharded.weights.master.clone()
        for piece in sharded.slices:
            rest[piece.in_shard] = 0
        largest = torch.maximum(largest, rest.abs().amax().float())
    return largest


@pytest.mark.parametrize("plan", ["dp2", "dp2 zero1", "dp2 zero2", "dp2 zero3"])
def test_a_head_of_three_labels(plan: str, pool2: Any) -> None:
    expected = train(None)
    for dtype in (torch.float64, torch.bfloat16):
        ranks = pool2.run(train, plan, dtype)
        for rank in ranks:
            assert rank["weights"] == {0} and rank["padding"] == 0
            assert not any(rank["gradients"].values())
        if dtype is torch.float64:
            assert ranks[0]["losses"] == pytest.approx(expected["losses"], rel=1e-10)
            assert ranks[0]["norms"] == pytest.approx(expected["norms"], rel=1e-10)
            for name, value in expected["values"].items():
                assert relative_difference(ranks[0]["values"][name], value) <= 1e-10, name


def train_without_padding(plan: str) -> dict[str, Any]:
    from meshwright.plan import parts

    before, parts.ALIGNMENT = parts.ALIGNMENT, 1
    try:
        return train(plan, torch.bfloat16)
    finally:
        parts.ALIGNMENT = before


def test_parameters_without_padding_would_be_caught(pool2: Any) -> None:
    for plan in ("dp2 zero1", "dp2 zero3"):
        assert any(pool2.run(train_without_padding, plan)[0]["weights"])
    assert any(pool2.run(train_without_padding, "dp2")[0]["gradients"].values())
