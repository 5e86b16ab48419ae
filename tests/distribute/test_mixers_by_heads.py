"""Mixers of which each rank of tp has some heads equal one process, and each rank has its share of their weights.

Tolerance 1e-10 of a tensor's largest value: in float64 only the order of sums differs, about 1e-16 a sum, and the steps
of AdamW divide tiny differences by tiny moments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

import meshwright as mw
from harness import WorkerError
from meshwright.distribute.decide import structure_of
from meshwright.layout.row_layout import RowLayout
from meshwright.parallel.tensor_parallel.structure import DecoderStructure
from meshwright.parallel.tensor_parallel.wide_norms import GroupedNorm
from meshwright.roles.blocks import Mixer, mixers_of
from meshwright.roles.blocks.mixer_kinds import MixerHeads
from support.exact import Float64
from support.hybrid_models import FAMILIES, SHARED_BY_RANKS, build, loader
from support.parity import pool_for
from support.planted_hooks import of_runtime
from support.tiers import crossings
from support.whole_runs import assert_equals_one_process, differences, train_whole

PLANS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2+sp": {"tp": 2, "sequence_parallel": True},
    "tp4+sp": {"tp": 4, "sequence_parallel": True},
    "dp2 x tp2, zero1": {"dp": 2, "tp": 2, "zero_stage": 1},
}
BY_HEADS = [name for name in SHARED_BY_RANKS if name != "delta net, 3 heads"]
CASES = [
    *((name, plan) for name in BY_HEADS for plan in ("tp2", "tp2+sp")),
    *((name, "tp4+sp") for name in ("qwen3_5_text", "mamba2", "bamba", *BY_HEADS)),
    *((name, "dp2 x tp2, zero1") for name in ("qwen3_5_text", "falcon_h1, norm of one group")),
]


def train(plan: dict[str, Any] | None, name: str) -> dict[str, Tensor]:
    with Float64():
        return train_whole(build(name), plan, loader)


reference = functools.cache(functools.partial(train, None))


@pytest.mark.parametrize(
    ("name", "plan"), crossings(CASES, but=[("delta net, rows by one key head", "tp2+sp"), ("granitemoehybrid", "tp2")])
)
def test_equals_one_process(name: str, plan: str, request: pytest.FixtureRequest) -> None:
    results = pool_for(PLANS[plan], request).run(train, PLANS[plan], name)
    assert_equals_one_process(results, reference(name))


def _by_part(heads: MixerHeads, parts: tuple[str, ...], **_: Any) -> RowLayout:
    return RowLayout.even(sum(map(heads._size, parts)), heads.layout.tp)


FAULTS: dict[str, tuple[str, str, Callable[[], AbstractContextManager[object]]]] = {
    "rows as if they were of one part": (
        "bamba",
        "loss 0",
        lambda: mock.patch.object(MixerHeads, "rows", _by_part),
    ),
    "a norm over the channels of one rank": (
        "granitemoehybrid",
        "loss 0",
        lambda: mock.patch.object(GroupedNorm, "_rescale", of_runtime(lambda *_: None)),
    ),
}


def train_with_fault(plan: dict[str, Any], name: str, fault: str) -> dict[str, Tensor]:
    with FAULTS[fault][2]():
        return train(plan, name)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_would_be_caught(fault: str, pool2: Any) -> None:
    name, result, _ = FAULTS[fault]
    assert differences(pool2.run(train_with_fault, PLANS["tp2"], name, fault), reference(name))[result] > 1e-3


def train_without_sums(plan: dict[str, Any], name: str) -> dict[str, Tensor]:
    with mock.patch.object(RowLayout, "has_copies", False):
        return train(plan, name)


def test_gradients_of_a_key_head_on_several_ranks_are_summed(pool2: Any) -> None:
    with pytest.raises(WorkerError, match="that the ranks of tp share are no longer equal"):
        pool2.run(train_without_sums, PLANS["tp2"], "delta net, one key head")


@pytest.mark.parametrize("name", [*FAMILIES, *BY_HEADS])
@pytest.mark.parametrize("tp", [2, 4])
def test_each_rank_has_its_share_of_the_weights(name: str, tp: int) -> None:
    model = build(name)
    if tp == 4 and name == "olmo_hybrid":  # two heads
        return
    found = structure_of(model, mw.ParallelPlan(tp=tp, sequence_parallel=True), mw.ToDistributedConfig())
    assert isinstance(found, DecoderStructure) and not found.whole
    mixers = [block for block in found.blocks if isinstance(block, Mixer)]
    assert mixers
    for mixer in mixers:
        shared = {*mixer.kind.norms, *mixer.kind.shared}
        for own, parameter in mixer.module.named_parameters():
            layout = found.parameters[f"{mixer.name}.{own}"]
            is_bias_of_output = own.endswith("bias") and parameter.shape == (32,) and "out" in own
            if own.rpartition(".")[0] in shared or is_bias_of_output:
                assert not layout.is_sharded, own
            elif layout.over("tp").has_copies:  # those of groups, B and C, which as few ranks hold as can be
                assert any(word in own for word in ("qkv", "ba", "k_proj", "q_proj", "in_proj", "conv1d"))
            else:
                assert layout.over("tp").local_size * tp == layout.over("tp").size, own


def test_an_mlp_that_a_hint_names_is_no_mixer() -> None:
    """Row 90: ranks of cp would compute it for all tokens, although its fused projection alone hides what it is."""
    model = build("granitemoehybrid")
    assert {name.rpartition(".")[2] for name in mixers_of(model)} == {"mamba"}
    model.config.model_type = "a family without hints"
    assert {name.rpartition(".")[2] for name in mixers_of(model)} == {"mamba", "shared_mlp"}
