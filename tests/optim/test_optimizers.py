"""ZeRO-1 and re-bound optimizers: state, semantics, accumulation, half precision, clipping."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import meshwright as mw
from meshwright.optim import trained_parameters
from meshwright.optim.runtime import runtime_of
from meshwright.optim.zero.segments import EqualSlices
from meshwright.plan.parts import flat_offsets
from support.exact import Float64, relative_difference
from support.models import build, labels_for, tokens
from support.optimizers import OfOneNorm, TrustRatio
from support.reference import make_optimizer
from support.tiers import crossing, crossings

ZERO = {"dp": 2, "zero_stage": 1}
SP = {"tp": 2, "sequence_parallel": True}
OPTIMIZERS: list[tuple[type, dict[str, Any]]] = [
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
    (torch.optim.Adam, {"maximize": True}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
    (torch.optim.Adagrad, {}),
]


def batch(step: int = 0) -> dict[str, torch.Tensor]:
    ids = tokens(4, 12, seed=step + 1)
    return {"input_ids": ids, "labels": labels_for(ids)}


def own_rows(full: dict[str, torch.Tensor], plan: dict[str, Any]) -> dict[str, torch.Tensor]:
    size = plan.get("dp", 1)
    rank = dist.get_rank() // plan.get("tp", 1)
    return {name: value.chunk(size)[rank] for name, value in full.items()}


def train(
    plan: dict[str, Any] | None,
    optimizer_class: type = torch.optim.AdamW,
    *,
    steps: int = 4,
    warm: int = 0,
    schedule: str = "none",
    zero_grad: str = "optimizer",
    clip: float | None = 0.5,
    norm_type: float = 2.0,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Weights after some steps in float64, of which the first ``warm`` run before the call."""
    with Float64():
        model = build("qwen3").double()
        optimizer = make_optimizer(model, optimizer_class, **options)
        scheduler = None
        if schedule == "before":
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        is_distributed = False
        for step in range(steps):
            if plan is not None and step == warm:
                settings = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan), **(config or {}))
                model, optimizer, _ = mw.to_distributed(model, optimizer, config=settings)
                is_distributed = True
            if step == 0 and schedule == "after":
                scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
            rows = own_rows(batch(step), plan or {}) if is_distributed else batch(step)
            model(**rows).loss.backward()
            if clip is not None:
                mw.clip_grad_norm_(model, clip, norm_type)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            if zero_grad == "optimizer":
                optimizer.zero_grad()
            elif zero_grad == "zeros":
                optimizer.zero_grad(set_to_none=False)
            else:
                model.zero_grad(set_to_none=zero_grad == "model")
        return mw.full_state_dict(model)


def assert_equal_training(pool: Any, plan: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    expected = train(None, *args, **kwargs)
    actual = pool.run(train, plan, *args, **kwargs)[0]
    # 1e-10 in float64: only the order of sums differs.
    worst = max(relative_difference(actual[name], weight) for name, weight in expected.items())
    assert worst < 1e-10, worst


@pytest.mark.parametrize(
    ("optimizer", "options", "plan"),
    crossings(
        [(*each, plan) for each in OPTIMIZERS for plan in (ZERO, SP, {"dp": 2})],
        but=[(*each, plan) for each, plan in zip(OPTIMIZERS, itertools.cycle([SP, {"dp": 2}, ZERO]), strict=False)],
    ),
)
def test_optimizers_keep_their_semantics(
    optimizer: type, options: dict[str, Any], plan: dict[str, Any], pool2: Any
) -> None:
    assert_equal_training(pool2, plan, optimizer, **options)


@pytest.mark.parametrize("plan", [ZERO, SP])
@pytest.mark.parametrize("schedule", ["before", "after"])
def test_schedulers_made_before_or_after_the_call_work(plan: dict[str, Any], schedule: str, pool2: Any) -> None:
    assert_equal_training(pool2, plan, schedule=schedule)


@pytest.mark.parametrize("plan", [ZERO, SP])
def test_state_from_before_the_call_is_kept(plan: dict[str, Any], pool2: Any) -> None:
    assert_equal_training(pool2, plan, warm=2)


@pytest.mark.parametrize("zero_grad", ["zeros", "model", "model zeros"])
def test_every_way_to_zero_gradients(zero_grad: str, pool2: Any) -> None:
    assert_equal_training(pool2, ZERO, zero_grad=zero_grad)


@pytest.mark.parametrize("norm_type", [crossing(1.0), 3.0, math.inf])
def test_other_norms(norm_type: float, pool4: Any) -> None:
    assert_equal_training(pool4, {**SP, **ZERO}, norm_type=norm_type, clip=0.05)


def clip_by_torch(plan: dict[str, Any]) -> None:
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan))
    model = build("llama")
    model, optimizer, _ = mw.to_distributed(model, make_optimizer(model), config=config)
    model(**own_rows(batch(), plan)).loss.backward()
    of_optimizer = [p for group in optimizer.param_groups for p in group["params"]]
    for parameters in (list(model.parameters()), of_optimizer):
        for foreach in (None, False):
            with pytest.raises(mw.UnreadableTensorError, match=r"meshwright\.clip_grad_norm_"):
                torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=foreach)


@pytest.mark.parametrize("plan", [{"tp": 2}, SP, ZERO])
def test_torch_clipping_is_an_error_that_names_ours(plan: dict[str, Any], pool2: Any) -> None:
    pool2.run(clip_by_torch, plan)


def state_bytes(plan: dict[str, Any]) -> int:
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan))
    model = build("llama")
    model, optimizer, _ = mw.to_distributed(model, make_optimizer(model), config=config)
    model(**own_rows(batch(), plan)).loss.backward()
    optimizer.step()
    return sum(
        value.numel() * value.element_size()
        for state in dict.values(optimizer.state)
        for name, value in state.items()
        if name != "step"
    )


def test_zero_state_per_rank_is_a_share_of_the_total(pool2: Any, pool4: Any) -> None:
    total = 2 * 4 * sum(p.numel() for p in build("llama").parameters())
    for pool, dp in ((pool2, 2), (pool4, 4)):
        assert max(pool.run(state_bytes, {"dp": dp, "zero_stage": 1})) <= 1.02 * total / dp


def half_precision(plan: dict[str, Any] | None, steps: int = 30) -> tuple[list[float], set[str]]:
    """Losses of a bf16 model whose steps are far below a bf16 rounding step of its weights."""
    model = build("llama").bfloat16() if plan is not None else build("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if plan is not None:
        config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan))
        model, optimizer, _ = mw.to_distributed(model, optimizer, config=config)
    losses = []
    for _ in range(steps):
        loss = model(**(own_rows(batch(), plan) if plan else batch())).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    zero = None if plan is None else runtime_of(model).gradients.zero
    stepped = model.parameters() if zero is None else (piece.stepped for piece in zero.slices)
    return losses, {str(p.dtype) for p in stepped}


def test_bf16_parameters_have_float32_masters(pool2: Any) -> None:
    expected, _ = half_precision(None)
    without_masters, dtypes = pool2.run(half_precision, {"dp": 2})[0]
    assert dtypes == {"torch.bfloat16"}
    losses, dtypes = pool2.run(half_precision, ZERO)[0]
    assert dtypes == {"torch.float32"}
    progress, lost = expected[0] - expected[-1], without_masters[0] - without_masters[-1]
    # The masters keep the progress of float32 training up to the rounding of the forward pass;
    # plain bf16 weights swallow part of every step.
    assert abs((losses[0] - losses[-1]) - progress) < 0.1 * progress
    assert abs(lost - progress) > abs((losses[0] - losses[-1]) - progress)


def accumulate_in_half_precision(use_no_sync: bool) -> float:
    """How far the gradients of 64 equal micro-batches are from 64 times one."""
    model = build("llama").bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**ZERO))
    model, optimizer, _ = mw.to_distributed(model, optimizer, config=config)
    rows = own_rows(batch(), ZERO)
    model(**rows).loss.backward()
    one = mw.full_gradients(model)
    optimizer.zero_grad()
    for i in range(64):
        if use_no_sync and i < 63:
            with mw.no_sync(model):
                model(**rows).loss.backward()
        else:
            model(**rows).loss.backward()
    many = mw.full_gradients(model)
    return max((relative_difference(many[n], 64 * g) for n, g in one.items()), default=0.0)


@pytest.mark.parametrize("use_no_sync", [False, True])
def test_gradients_accumulate_in_float32(use_no_sync: bool, pool2: Any) -> None:
    # float32 sums of 64 equal numbers: 1e-6. In bf16 a sum stops growing after 2**8 equal terms and
    # is off by several percent at 64.
    assert pool2.run(accumulate_in_half_precision, use_no_sync)[0] < 1e-5


def skip_a_window(discard: str) -> float:
    """Drop an accumulated gradient in mid-window, then step on one batch only."""
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**ZERO))
    gradients = []
    for dropped in (False, True):
        model = build("llama")
        model, optimizer, _ = mw.to_distributed(model, make_optimizer(model), config=config)
        if dropped:
            with mw.no_sync(model):
                model(**own_rows(batch(1), ZERO)).loss.backward()
            (optimizer if discard == "optimizer" else model).zero_grad()
        model(**own_rows(batch(), ZERO)).loss.backward()
        gradients.append(mw.full_gradients(model))
    return max((relative_difference(gradients[1][n], g) for n, g in gradients[0].items()), default=0.0)


@pytest.mark.parametrize("discard", ["optimizer", "model"])
def test_zero_grad_discards_unsynchronised_gradients_too(discard: str, pool2: Any) -> None:
    assert pool2.run(skip_a_window, discard)[0] == 0.0


def step_without_sync(plan: dict[str, Any]) -> None:
    model = build("llama")
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan))
    model, optimizer, _ = mw.to_distributed(model, make_optimizer(model), config=config)
    with mw.no_sync(model):
        model(**own_rows(batch(), plan)).loss.backward()
    optimizer.step()


@pytest.mark.parametrize("plan", [ZERO, {"dp": 2}])
def test_a_step_on_unsynchronised_gradients_is_refused(plan: dict[str, Any], pool2: Any) -> None:
    for kind, message in pool2.run_expecting_error(step_without_sync, plan):
        assert kind == "ValueError" and "no_sync" in message


def shard_alone() -> list[float]:
    """The primitive on its own: a plain model, a plain loop, a mesh."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.randn(8, 6)
    if dist.is_initialized():
        mesh = mw.ProcessMesh([0, 1], ["dp"])
        optimizer = mw.shard_optimizer(optimizer, mesh=mesh, stage=1)
        x = x.chunk(2)[dist.get_rank()]
    for _ in range(3):
        model(x).square().mean().backward()
        mw.clip_grad_norm_(optimizer, 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return [p.sum().item() for p in model.parameters()]


def test_shard_optimizer_by_itself(pool2: Any) -> None:
    expected = shard_alone()
    for actual in pool2.run(shard_alone):
        # 1e-5: float32, another order of sums.
        assert actual == pytest.approx(expected, rel=1e-5, abs=1e-6)


class WithClosure(OfOneNorm):
    """Steps only with a closure."""

    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


class InBackward(OfOneNorm):
    """Has changed the parameters before it steps, as LOMO."""

    def step(self, closure: Any = None) -> None: ...


def use_unknown_optimizer(plan: dict[str, Any], optimizer_class: type) -> None:
    model = build("llama")
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan))
    before = list(model.parameters())
    optimizer = optimizer_class(p for p in model.parameters() if p.ndim == 2)
    try:
        mw.to_distributed(model, optimizer, config=config)
    finally:
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("plan", [ZERO, SP])
@pytest.mark.parametrize(
    ("optimizer_class", "why"),
    [
        (OfOneNorm, "changes with the other parameters"),
        (WithClosure, "has a step that needs a closure"),
        (InBackward, "changes nothing"),
    ],
)
def test_optimizers_that_read_several_parameters_are_refused_by_name(
    plan: dict[str, Any], optimizer_class: type, why: str, pool2: Any
) -> None:
    for kind, message in pool2.run_expecting_error(use_unknown_optimizer, plan, optimizer_class):
        assert kind == "OptimizerMismatchError" and optimizer_class.__name__ in message and why in message


def test_any_optimizer_works_where_nothing_is_sharded(pool2: Any) -> None:
    pool2.run(use_unknown_optimizer, {"dp": 2}, OfOneNorm)


class WholeParameters(EqualSlices):
    """Each rank steps as many consecutive parameters of a bucket, none of which another rank steps."""

    def pack(self, sizes: Sequence[int]) -> tuple[list[int], int]:
        count = -(-len(sizes) // self.axis.size)
        groups = [flat_offsets(sizes[first : first + count]) for first in range(0, len(sizes), count)]
        length = max(ends[-1] for ends in groups)
        offsets = [rank * length + offset for rank, ends in enumerate(groups) for offset in ends[:-1]]
        return [*offsets, (len(groups) - 1) * length + groups[-1][-1]], length * self.axis.size


def train_with(ownership: type[EqualSlices], plan: dict[str, Any]) -> dict[str, torch.Tensor]:
    with mock.patch.object(trained_parameters, "EqualSlices", ownership):
        return train(plan, TrustRatio, config={"optimizer_is_elementwise": True, "bucket_size_mb": 0.03})


@pytest.mark.quick
def test_an_ownership_of_whole_parameters_steps_them_as_one_device(pool2: Any) -> None:
    expected = train(None, TrustRatio)
    for ownership, is_equal in ((WholeParameters, True), (EqualSlices, False)):
        actual = pool2.run(train_with, ownership, {"dp": 2, "zero_stage": 1})[0]
        worst = max(relative_difference(actual[name], weight) for name, weight in expected.items())
        assert (worst < 1e-10) == is_equal, worst  # in float64, only the order of sums differs
