"""Families with experts train under expert parallelism as on one device, also where a rank has no tokens or no rows.

All tokens of the first layer go to the same two of its four experts, so the ranks of the others get none, and their
weights have a gradient of zeros. Some batches have fewer rows than there are ranks of dp.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import meshwright as mw
from harness import WorkerPool
from support import planted_experts
from support.anatomies import EXPERTS, LENGTH
from support.exact import Float64, relative_difference
from support.models import SIZES, labels_for, tokens
from support.parity import pool_for
from support.tiers import crossings

_LATENT = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}
_GROUPS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 2, "first_k_dense_replace": 0, "n_shared_experts": 1}
_NARROW = {"moe_intermediate_size": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "mixtral, 8 experts": ("Mixtral", {"num_local_experts": 8}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "head_dim": 4, **_NARROW}),
    "qwen2_moe": ("Qwen2Moe", {"num_experts": 4, "shared_expert_intermediate_size": 24, **_NARROW}),
    "olmoe": ("Olmoe", {"num_experts": 4}),
    "gpt_oss": ("GptOss", {"num_local_experts": 4, "head_dim": 4, "attn_implementation": "eager"}),
    "deepseek_v3": ("DeepseekV3", {**_LATENT, **_GROUPS, **_NARROW, "num_key_value_heads": 8}),
    "granitemoe": ("GraniteMoe", {"num_local_experts": 4}),
    "glm4_moe": ("Glm4Moe", {**_GROUPS, **_NARROW, "head_dim": 4}),
}
PLANS: dict[str, dict[str, Any]] = {
    "dp4 ep2": {"dp": 4, "ep": 2},
    "dp4 ep4 zero1": {"dp": 4, "ep": 4, "zero_stage": 1},
    "dp2 tp2+sp ep4": {"dp": 2, "tp": 2, "sequence_parallel": True, "ep": 4},
    "dp2 pp2 ep2": {"dp": 2, "pp": 2, "ep": 2},
    "cp2 dp2 ep4": {"cp": 2, "dp": 2, "ep": 4},
    "dp4 ep2 etp2": {"dp": 4, "ep": 2, "etp": 2},
    "dp4 etp2 zero1": {"dp": 4, "etp": 2, "zero_stage": 1},
    "tp2+sp dp2 ep2 etp2": {"tp": 2, "sequence_parallel": True, "dp": 2, "ep": 2, "etp": 2},
}
STEPS = 20


def build(family: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    kind, fields = FAMILIES[family]
    fields = {**SIZES, **EXPERTS, **fields}
    if dtype is torch.float32:
        fields["experts_implementation"] = "grouped_mm"  # transformers' default
    config = getattr(transformers, f"{kind}Config")(**fields)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.05))
        routers = [p for name, p in model.named_parameters() if "layers.0." in name and p.shape in ((4, 32), (8, 32))]
        for router in routers:
            router.zero_().requires_grad_(False)  # its gradient would be rounding alone
        assert routers
    return model.to(dtype).train()


def batches() -> list[dict[str, Tensor]]:
    """Batches of 4, 3 and 1 rows."""
    found, first, ids = [], 0, tokens(STEPS * 4, LENGTH)
    labels = labels_for(ids)
    for step in range(STEPS):
        rows = slice(first, first := first + (4, 3, 1)[step % 3])
        found.append({"input_ids": ids[rows], "labels": labels[rows]})
    return found


def train(
    plan: dict[str, Any] | None, family: str, dtype: torch.dtype = torch.float64, *, steps: int = STEPS
) -> dict[str, Tensor]:
    with Float64() if dtype is torch.float64 else contextlib.nullcontext():
        model, data = build(family, dtype), batches()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # A gradient that is rounding alone, about 1e-9 in float32, must be small beside eps, or AdamW makes it a step.
        eps = 1e-8 if dtype is torch.float64 else 1e-3
        optimizer: Any = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1, eps=eps)
        if plan is not None:
            model, optimizer, data = mw.to_distributed(model, optimizer, data, plan=mw.ParallelPlan(**plan))
        found = {}
        for step, batch in zip(range(steps), data, strict=False):
            loss = model(**batch).loss
            loss.backward()
            found |= {f"loss {step}": loss.detach(), f"norm {step}": mw.clip_grad_norm_(model, 0.5)}
            optimizer.step()
            optimizer.zero_grad()
        weights = model.state_dict() if plan is None else mw.full_state_dict(model)
        return found | {f"weight {name}": value.clone() for name, value in weights.items()}


@functools.cache
def reference(family: str, dtype: torch.dtype) -> dict[str, Tensor]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as on each rank; the operations are too small for several
    try:
        return train(None, family, dtype)
    finally:
        torch.set_num_threads(threads)


def differences(results: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> dict[str, float]:
    assert results[0].keys() == expected.keys() and len(expected) > 2 * STEPS
    return {name: relative_difference(results[0][name], value) for name, value in expected.items()}


CASES = [(family, plan) for family in FAMILIES for plan in PLANS if "8" not in family]
IN_FLOAT32 = CASES[:: len(PLANS) + 1]  # another plan for each family


@pytest.mark.parametrize(("family", "plan"), crossings(CASES, but=[("gpt_oss", "dp2 tp2+sp ep4")], one_in=2))
def test_twenty_steps(family: str, plan: str, request: pytest.FixtureRequest) -> None:
    """1e-9 of a tensor's largest value: AdamW divides differences of 1e-16 by small moments, at most 1e-11 so far."""
    found = differences(
        pool_for(PLANS[plan], request).run(train, PLANS[plan], family), reference(family, torch.float64)
    )
    assert max(found.values()) <= 1e-9, max(found.items(), key=lambda item: item[1])


@pytest.mark.parametrize(("family", "plan"), crossings(IN_FLOAT32, but=IN_FLOAT32[1:2], one_in=4))
def test_twenty_steps_in_float32(family: str, plan: str, request: pytest.FixtureRequest) -> None:
    """1e-5: one sum in another order differs by 1e-7."""
    results = pool_for(PLANS[plan], request).run(train, PLANS[plan], family, torch.float32)
    found = differences(results, reference(family, torch.float32))
    assert max(found.values()) <= 1e-5, max(found.items(), key=lambda item: item[1])


@pytest.mark.crossing
def test_three_ranks_share_eight_experts() -> None:
    pool, expected = WorkerPool(3), reference("mixtral, 8 experts", torch.float64)
    try:
        for plan in ({"dp": 3, "ep": 3}, {"dp": 3, "ep": 3, "zero_stage": 3}):
            found = differences(pool.run(train, plan, "mixtral, 8 experts"), expected)
            assert max(found.values()) <= 1e-9, max(found.items(), key=lambda item: item[1])
    finally:
        pool.close()


# Planted faults, each with a family and a plan under which it shows.
FAULTS: dict[str, tuple[str, str]] = {
    "a norm that counts experts once per rank of dp": ("gpt_oss", "dp2 tp2+sp ep4"),
    "the gradient of a token is not summed over slices of experts": ("qwen3_moe", "dp4 etp2 zero1"),
    "the bias of experts on every rank": ("gpt_oss", "dp4 ep2 etp2"),
    "gate and up are cut as one piece": ("qwen3_moe", "dp4 etp2 zero1"),
}


def first_step_with(fault: str) -> dict[str, Tensor]:
    family, plan = FAULTS[fault]
    with planted_experts.FAULTS[fault].plant():
        return train(PLANS[plan], family, steps=1)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_would_be_caught(fault: str, pool4: Any) -> None:
    found, expected = pool4.run(first_step_with, fault)[0], train(None, FAULTS[fault][0], steps=1)
    assert max(relative_difference(found[name], expected[name]) for name in ("loss 0", "norm 0")) > 1e-4
