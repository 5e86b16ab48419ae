"""Models that see images equal one process under every axis, with any number of images in each row.

Tolerance 1e-10 of a tensor's largest value: in float64 only the order of sums differs, about 1e-16 a sum, and the steps
of AdamW divide tiny differences by tiny moments.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from meshwright.parallel.tensor_parallel.shared_tower import SharedTower
from support.exact import Float64
from support.parity import pool_for
from support.tiers import crossings
from support.vision_models import FAMILIES, IMAGE, VIDEO, build, loader
from support.whole_runs import assert_equals_one_process, differences, summed_over_tp, train_whole

PLANS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2+sp": {"tp": 2, "sequence_parallel": True},
    "dp2 x tp2+sp, zero1": {"dp": 2, "tp": 2, "sequence_parallel": True, "zero_stage": 1},
    "dp2": {"dp": 2},
    "pp2": {"pp": 2},
    "pp2 x tp2+sp": {"pp": 2, "tp": 2, "sequence_parallel": True},
    "cp2": {"cp": 2},
    "cp2 x tp2+sp": {"cp": 2, "tp": 2, "sequence_parallel": True},
    "cp2, ulysses": {"cp": 2, "context": "ulysses"},
    "cp2, ring": {"cp": 2, "context": "ring"},
    "cp4, hybrid": {"cp": 4, "context": "hybrid", "ulysses": 2},
}
SEES_AHEAD = ("gemma3", "paligemma")  # the tokens of an image, or of all before the answer, see those that follow
CASES = [(f, p) for f in FAMILIES for p in PLANS if "context" not in PLANS[p] or f in SEES_AHEAD]
MAIN = [("gemma3", "tp2+sp"), ("qwen3_vl", "tp2+sp"), ("qwen3_vl", "cp2"), ("gemma3", "cp2, ring")]


def train(plan: dict[str, Any] | None, family: str, *, freezes_tower: bool = False) -> dict[str, Tensor]:
    with Float64():
        return train_whole(build(family, freezes_tower=freezes_tower), plan, functools.partial(loader, family))


reference = functools.cache(functools.partial(train, None))


@pytest.mark.parametrize(("family", "plan_name"), crossings(CASES, but=MAIN))
def test_equals_one_process(family: str, plan_name: str, request: pytest.FixtureRequest) -> None:
    results = pool_for(PLANS[plan_name], request).run(train, PLANS[plan_name], family)
    assert_equals_one_process(results, reference(family))


def train_with_sums(plan: dict[str, Any], family: str) -> dict[str, Tensor]:
    """A fault: the gradients of a tower, which each rank has whole, are summed over tp."""
    with (
        summed_over_tp(),
        mock.patch.object(SharedTower, "__call__", lambda step, *args, **more: step.method(*args, **more)),
    ):
        return train(plan, family)


def test_summed_gradients_of_a_tower_would_be_caught(pool2: Any) -> None:
    found = differences(pool2.run(train_with_sums, PLANS["tp2+sp"], "llava"), reference("llava"))
    towers = [x for name, x in found.items() if name.startswith("gradient of model.vision_tower")]
    assert towers and min(towers) > 0.5
    assert found["norm 0"] > 1e-3


def train_causally(plan: dict[str, Any]) -> dict[str, Tensor]:
    """A fault: the tokens of an image see those before them alone."""

    def none_ahead(ids: Tensor) -> Any:
        return lambda row, head, query, key: ids[row, query] < -1

    with mock.patch("transformers.masking_utils.blockwise_overlay", none_ahead):
        return train(plan, "paligemma")


def test_a_mask_without_images_would_be_caught(pool2: Any) -> None:
    found = differences(pool2.run(train_causally, PLANS["cp2"]), reference("paligemma"))
    assert found["loss 0"] > 1e-6 and found["norm 0"] > 1e-4


def train_video(plan: dict[str, Any] | None, family: str) -> dict[str, Tensor]:
    """Each image of a batch is a video of one frame."""
    names = {"pixel_values": "pixel_values_videos", "image_grid_thw": "video_grid_thw"}

    def batches() -> list[dict[str, Tensor]]:
        found = []
        for batch in loader(family, [(1, 2), (2, 1)]):
            batch = {names.get(name, name): x for name, x in batch.items()}
            batch["input_ids"] = batch["input_ids"].where(batch["input_ids"] != IMAGE, VIDEO)
            found.append({**batch, "mm_token_type_ids": 2 * batch["mm_token_type_ids"]})
        return found

    with Float64():
        return train_whole(build(family), plan, batches)


@pytest.mark.parametrize(
    ("family", "plan_name"),
    crossings(itertools.product(("qwen2_5_vl", "qwen3_vl"), ("tp2+sp", "pp2", "cp2")), but=[("qwen3_vl", "cp2")]),
)
def test_videos(family: str, plan_name: str, request: pytest.FixtureRequest) -> None:
    results = pool_for(PLANS[plan_name], request).run(train_video, PLANS[plan_name], family)
    assert_equals_one_process(results, train_video(None, family))


def train_frozen(plan: dict[str, Any] | None) -> dict[str, Tensor]:
    return train(plan, "internvl", freezes_tower=True)


def test_a_frozen_tower(pool2: Any) -> None:
    results = pool2.run(train_frozen, PLANS["tp2+sp"])
    assert not any(name.startswith("gradient of model.vision_tower") for name in results[0])
    assert_equals_one_process(results, train_frozen(None))
