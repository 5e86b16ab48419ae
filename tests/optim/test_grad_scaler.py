"""A GradScaler under every plan: its scale, the steps that it skips and the weights are those of one device."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import meshwright as mw
from meshwright.optim import attach_gradients
from meshwright.parallel.gradients.summed import LossScale
from support.exact import Float64, relative_difference
from support.models import build, labels_for, tokens
from support.own_gradients import on_arrival
from support.tiers import crossings

SP = {"tp": 2, "sequence_parallel": True}
PLANS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2},
    "dp2 zero1": {"dp": 2, "zero_stage": 1},
    "dp2 zero2": {"dp": 2, "zero_stage": 2},
    "dp2 zero3": {"dp": 2, "zero_stage": 3},
    "tp2": {"tp": 2},
    "tp2+sp": SP,
    "pp2": {"pp": 2},
    "cp2 zero1": {"cp": 2, "zero_stage": 1},
    "dp2 tp2+sp zero1": {**SP, "dp": 2, "zero_stage": 1},
    "dp2 tp2 zero3": {"tp": 2, "dp": 2, "zero_stage": 3},
}
STEPS, INFINITE = 30, (3, 4, 17)
ROW = "model.layers.0.self_attn.q_proj.weight"  # a row of it is infinite in these steps, on the first rank alone


def train(plan: dict[str, Any] | None, *, unscales: bool, fused: bool = False) -> tuple[list[float], dict[str, Any]]:
    """The scale after each step, and the weights after the last."""
    scales, number = [], 0
    model = build("llama").double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    if plan is not None:
        config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan))
        model, optimizer, _ = mw.to_distributed(model, optimizer, config=config)

    def overflow(gradient: torch.Tensor) -> torch.Tensor:
        is_here = number in INFINITE and (plan is None or dist.get_rank() == 0)
        return gradient.index_fill(0, torch.tensor([0]), torch.inf) if is_here else gradient

    on_arrival(model.get_parameter(ROW), overflow)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=5)
    rank = 0 if plan is None else dist.get_rank() // (plan.get("tp", 1) * plan.get("cp", 1))
    for number in range(STEPS):
        ids = tokens(4, 12, seed=number)
        rows = {"input_ids": ids, "labels": labels_for(ids)}
        if plan is not None:
            rows = {name: value.chunk(plan.get("dp", 1))[rank % plan.get("dp", 1)] for name, value in rows.items()}
        scaler.scale(torch.zeros(()))  # makes the scale, in float32
        with Float64():
            scaler.scale(model(**rows).loss).backward()
        if unscales:
            scaler.unscale_(optimizer)
            mw.clip_grad_norm_(model, 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, mw.full_state_dict(model)


def assert_equal(pool: Any, plan: dict[str, Any], **options: Any) -> None:
    scales, weights = train(None, **options)
    assert [b < a for a, b in zip([256.0, *scales], scales, strict=False)] == [i in INFINITE for i in range(STEPS)]
    for rank, (own, actual) in enumerate(pool.run(train, plan, **options)):
        assert own == scales
        if rank == 0:
            # 1e-10 in float64: only the order of sums differs, in 27 steps.
            worst = max(relative_difference(actual[name], weight) for name, weight in weights.items())
            assert worst < 1e-10, worst


@pytest.mark.parametrize("plan", crossings(PLANS, but=["dp2 zero1", "tp2+sp"]))
def test_an_overflow_on_one_rank_is_one_on_all(plan: str, pool2: Any, pool4: Any) -> None:
    assert_equal(pool4 if "dp2 tp2" in plan else pool2, PLANS[plan], unscales=True)


@pytest.mark.parametrize("plan", crossings(["dp2 zero1", "tp2", "pp2"], but=["pp2"]))
def test_an_optimizer_that_unscales_in_its_kernel(plan: str, pool2: Any) -> None:
    assert_equal(pool2, PLANS[plan], unscales=False, fused=True)


def half_gradients(plan: dict[str, Any], *, is_scaled: bool = True) -> dict[str, torch.Tensor]:
    """The unscaled gradients of the second of two steps in float16, whose rows run one by one under every plan."""
    torch.manual_seed(0)
    model = build("llama", tie_word_embeddings=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer, _ = mw.to_distributed(model, optimizer, plan=mw.ParallelPlan(**plan))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    dp = plan.get("dp", 1)
    gradients: dict[str, torch.Tensor] = {}
    for number in range(2):
        ids = tokens(4, 12, seed=number).chunk(dp)[dist.get_rank() if dp > 1 else 0]
        optimizer.zero_grad()
        for row in [ids] if "gradient_accumulation_steps" in plan else ids.split(1):
            with (
                torch.autocast("cpu", dtype=torch.float16),
                mock.patch.object(LossScale, "of", LossScale.of if is_scaled else lambda *_: None),
            ):
                loss = model(input_ids=row, labels=row).loss
            scaler.scale(loss * len(row) * dp / 4).backward()
        scaler.unscale_(optimizer)
        gradients = mw.full_gradients(model)
        scaler.step(optimizer)
        scaler.update()
    return gradients


HALF = [
    {"dp": 2, "zero_stage": 2, "gradient_accumulation_steps": 2},
    {"dp": 2, "gradient_accumulation_steps": 2},
    {"pp": 2, "gradient_accumulation_steps": 4},
]


@pytest.mark.parametrize("plan", crossings(HALF, but=HALF[2:]), ids=str)
def test_backward_inside_of_forward_is_scaled(plan: dict[str, Any], pool2: Any) -> None:
    expected = pool2.run(half_gradients, {"dp": 2})[0]
    for is_scaled in (True, False):
        actual = pool2.run(half_gradients, plan, is_scaled=is_scaled)[0]
        worst = max(relative_difference(actual[name], each) for name, each in expected.items())
        # The same float16 numbers, summed in float32 in another order. The stages of a pipeline round in other places:
        # 11 bits. Unscaled, the gradients of keys' biases, which are small, round to 0.
        assert (worst < (2e-3 if "pp" in plan else 1e-5)) == is_scaled, worst


def train_with_own_overflow(plan: dict[str, Any]) -> None:
    with mock.patch.object(attach_gradients, "_of_all_ranks", lambda found, *_: found):
        train(plan, unscales=True)


@pytest.mark.parametrize("plan", ["dp2 zero1", "tp2+sp"])
def test_a_search_in_own_gradients_alone_would_not_do(plan: str, pool2: Any) -> None:
    for kind, _ in pool2.run_expecting_error(train_with_own_overflow, PLANS[plan]):
        assert kind in ("DivergenceError", "PeerFailedError")
