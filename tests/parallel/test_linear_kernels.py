"""A kind of linear layer with a registered kernel has what the stock one has: overlap, zero-bubble, chunked head."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
from torch import Tensor

from support.exact import Float64, relative_difference
from support.fused_loss import counting_fused_losses
from support.models import build, labels_for, tokens
from support.rounded_linear import RAN, with_rounded_linears
from support.short_programs import distribute, gradients_of
from support.traffic import Traffic

LAYERS = 2
SP = {"tp": 2, "sequence_parallel": True}
ZB = {"pp": 2, "gradient_accumulation_steps": 2, "schedule": "zb-h1"}
# The plan, whether the embedding is frozen, and the share of a layer's 7 projections whose gradients the kernel gives
# on all ranks: under tp the output projections keep their own node.
CASES: dict[str, tuple[dict[str, Any], bool, int]] = {
    "tp2": ({"tp": 2}, False, 5),
    "tp2+sp": (SP, False, 5),
    "tp2+sp, the first block's input needs no gradient": (SP, True, 5),
    "pp2, zb-h1": (ZB, False, 7),
    "dp2 zero3": ({"dp": 2, "zero_stage": 3}, False, 0),
}


def one_step(
    plan: dict[str, Any] | None, is_frozen: bool, *, is_rounded: bool = True
) -> tuple[float, dict[str, Tensor], Counter[str], Counter[str], int]:
    """The loss, whole gradients, how gradients were computed, the collectives, and the calls of the fused loss."""
    with Float64(), counting_fused_losses(tokens_per_chunk=5) as fused:
        model: Any = build("llama", num_hidden_layers=LAYERS, mlp_bias=False).double()
        model.model.embed_tokens.requires_grad_(not is_frozen)
        model, _, _ = distribute(plan, with_rounded_linears(model) if is_rounded else model)
        ids = tokens(4, 12)
        RAN.clear()
        with Traffic() as traffic:
            loss = model(input_ids=ids, labels=labels_for(ids)).loss
            loss.backward()
        return loss.item(), gradients_of(model, plan), Counter(RAN), traffic.calls, len(fused)


@functools.cache
def reference(is_frozen: bool) -> tuple[float, dict[str, Tensor]]:
    loss, gradients, ran, _, _ = one_step(None, is_frozen)
    assert ran == {"own": 7 * LAYERS + 1}
    return loss, gradients


@pytest.mark.parametrize("case", CASES)
def test_one_kernel_gives_all(case: str, pool2: Any) -> None:
    plan, is_frozen, kernels = CASES[case]
    ranks = pool2.run(one_step, plan, is_frozen)
    loss, expected = reference(is_frozen)
    assert ranks[0][0] == pytest.approx(loss, rel=1e-12)
    for name, gradient in expected.items():
        # float64: only the order of sums differs, and rounding to the grid is that of the whole tensor.
        floor = 1e-12 if name.endswith("k_proj.bias") else 1e-17
        is_zero = max(gradient.abs().max(), ranks[0][1][name].abs().max()) <= floor
        assert is_zero or relative_difference(ranks[0][1][name], gradient) < 1e-10, name
    passes = plan.get("gradient_accumulation_steps", 1)
    own = sum(ran["own"] for _, _, ran, _, _ in ranks)
    held = LAYERS * passes if "pp" in plan else LAYERS * 2  # the layers that both ranks run, counted with their passes
    assert own == (7 - kernels) * held
    assert sum(ran["weight"] for _, _, ran, _, _ in ranks) > kernels * held  # and the head, in chunks
    assert ranks[-1][4] > 0


@pytest.mark.parametrize("is_frozen", [False, True])
def test_the_collectives_are_those_of_the_stock_layer(is_frozen: bool, pool2: Any) -> None:
    """The gathered input is not kept, although the layer's own forward saves a copy of it."""
    of_rounded, of_stock = (
        pool2.run(one_step, SP, is_frozen, is_rounded=is_rounded)[0][3] for is_rounded in (True, False)
    )
    assert of_rounded == of_stock and of_stock["all_gather"] >= 4 * LAYERS


def test_rounding_changes_the_gradients() -> None:
    """A plan that took the stock product would be off by far."""
    stock = one_step(None, False, is_rounded=False)[1]
    differences = [relative_difference(stock[name], gradient) for name, gradient in reference(False)[1].items()]
    assert max(differences) > 1e-3
