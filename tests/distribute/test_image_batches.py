"""Batches whose rows differ in images equal one process: the loss, every gradient, the norm and the weights.

Tolerance 1e-10 of a tensor's largest value: in float64 only the order of sums differs, about 1e-16 a sum, and the steps
of AdamW divide tiny differences by tiny moments.
"""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.optim.zero.zero_optimizer import ReduceScatter
from support.exact import Float64
from support.image_training import FOURS, PAIRS, Counts, one_process, train, train_each, train_on
from support.parity import pool_for
from support.short_programs import distribute, weights_of
from support.tiers import crossings
from support.vision_models import FAMILIES, IMAGE, LENGTH, START, VIDEO, build, collate, samples
from support.whole_runs import assert_equals_one_process

SPLIT = {"gradient_accumulation_steps": 2}
PLANS: dict[str, tuple[dict[str, Any], Counts]] = {
    "dp2": ({"dp": 2}, PAIRS),
    "dp2 zero1": ({"dp": 2, "zero_stage": 1}, PAIRS),
    "dp2 zero2": ({"dp": 2, "zero_stage": 2}, PAIRS),
    "dp2 zero3": ({"dp": 2, "zero_stage": 3}, PAIRS),
    "ga2": (SPLIT, PAIRS),
    "tp2+sp": ({"tp": 2, "sequence_parallel": True}, PAIRS),
    "pp2 mb1": ({"pp": 2, "micro_batch_size": 1}, PAIRS),
    "dp2 tp2+sp zero1": ({"dp": 2, "tp": 2, "sequence_parallel": True, "zero_stage": 1}, PAIRS),
    "cp2 mb1": ({"cp": 2, "micro_batch_size": 1}, PAIRS),
    "dp2 zero2 ga2": ({"dp": 2, "zero_stage": 2, **SPLIT}, FOURS),
    "dp2 zero3 ga2": ({"dp": 2, "zero_stage": 3, **SPLIT}, FOURS),
    "dp2 pp2 mb1": ({"dp": 2, "pp": 2, "micro_batch_size": 1}, FOURS),
}


@pytest.mark.parametrize("plan_name", crossings(PLANS, one_in=3))
def test_each_family_equals_one_process(plan_name: str, request: pytest.FixtureRequest) -> None:
    plan, counts = PLANS[plan_name]
    if plan is SPLIT:
        results = [train_each(plan, FAMILIES, counts)]
    else:
        results = pool_for(plan, request).run(train_each, plan, FAMILIES, counts)
    for family in FAMILIES:
        assert_equals_one_process([result[family] for result in results], one_process(family, counts))


SOME = [("qwen3_vl", "dp2 zero3"), ("smolvlm", "pp2 mb1")]


@pytest.mark.parametrize(("family", "plan_name"), SOME)
def test_one_family_equals_one_process(family: str, plan_name: str, pool2: Any) -> None:
    plan, counts = PLANS[plan_name]
    assert_equals_one_process(pool2.run(train, plan, family, counts), one_process(family, counts))


def freeze_tower(model: Any) -> None:
    model.model.vision_tower.requires_grad_(False)


def recompute(model: Any) -> None:
    """Recompute the layers of the decoder and of the tower in backward, where a tower must not be gathered again."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


class Gated(nn.Linear):
    """A layer with a weight of which only the first elements get a gradient that is not zero."""

    @staticmethod
    def put_into(model: Any) -> None:
        projector = model.model.multi_modal_projector
        gated = Gated(projector.linear_2.in_features, projector.linear_2.out_features, dtype=torch.float64)
        gated.load_state_dict(projector.linear_2.state_dict())
        gated.gate = nn.Parameter(torch.linspace(-1, 1, 2**17, dtype=torch.float64))
        projector.linear_2 = gated

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.gate[: self.out_features]


VARIANTS = {"frozen tower": freeze_tower, "recomputed": recompute, "a slice of zeros": Gated.put_into}


def train_variants(plan: dict[str, Any] | None) -> dict[str, dict[str, Tensor]]:
    return {name: train(plan, "llava", PAIRS[:5], prepare=prepare) for name, prepare in VARIANTS.items()}


@pytest.mark.parametrize("stage", crossings([1, 2, 3], but=[3]))
def test_frozen_and_recomputed_towers_and_slices_of_zeros(stage: int, pool2: Any) -> None:
    results = pool2.run(train_variants, {"dp": 2, "zero_stage": stage})
    expected = train_variants(None)
    for name in VARIANTS:
        assert_equals_one_process([result[name] for result in results], expected[name])
    assert not any(name.startswith("gradient 0 of model.vision_tower") for name in results[0]["frozen tower"])


def train_without_telling(plan: dict[str, Any]) -> dict[str, Tensor]:
    """A fault: a rank without images tells from the values of a slice whether another rank has its gradient."""
    never = property(lambda self: False, lambda self, value: None)
    with mock.patch.object(ReduceScatter, "is_uneven", never, create=True):
        return train(plan, "llava", PAIRS[:5], prepare=Gated.put_into)


def test_a_slice_of_zeros_is_a_gradient(pool2: Any) -> None:
    """The weights that get no gradient but zeros decay on one device, so the ranks would step them unlike."""
    for kind, message in pool2.run_expecting_error(train_without_telling, {"dp": 2, "zero_stage": 1}):
        assert kind == "DivergenceError" and "counts of model.multi_modal_projector.linear_2.gate" in message


def with_video_and_sizes() -> list[dict[str, Tensor]]:
    """Batches of four rows with images of several sizes, and a video in one row."""
    generator = torch.Generator().manual_seed(3)
    batches = []
    for kinds in ("iv..", ".i.v", "iiv.", "...i"):
        rows, pixels = [], {"i": [], "v": []}  # type: ignore[var-annotated]
        grids: dict[str, list[list[int]]] = {"i": [], "v": []}
        for number, kind in enumerate(kinds):
            ids = (torch.arange(LENGTH) * 7 + number) % 80 + 3
            types = torch.zeros(LENGTH, dtype=torch.int)
            for at, item in enumerate(kind.strip(".") * (1 + number % 2)):
                grid = [2, 4, 4] if item == "v" else [1, 4, 4 + 4 * (number % 2)]
                begin, count = 2 + 11 * at, math.prod(grid) // 4
                ids[begin - 1] = START
                places = slice(begin, begin + count)
                ids[places], types[places] = (VIDEO, 2) if item == "v" else (IMAGE, 1)
                pixels[item].append(torch.randn(math.prod(grid), 96, generator=generator, dtype=torch.float64))
                grids[item].append(grid)
            rows.append({"input_ids": ids, "labels": ids.masked_fill(types > 0, -100), "mm_token_type_ids": types})
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        names = {"i": ("pixel_values", "image_grid_thw"), "v": ("pixel_values_videos", "video_grid_thw")}
        for item, (values, sizes) in names.items():
            if pixels[item]:
                batch |= {values: torch.cat(pixels[item]), sizes: torch.tensor(grids[item])}
        batches.append(batch)
    return batches


VIDEO_PLANS: list[dict[str, Any]] = [
    {"dp": 2, "zero_stage": 3, **SPLIT},
    {"dp": 2, "zero_stage": 1},
    {"pp": 2, "micro_batch_size": 1},
    {"cp": 2, "micro_batch_size": 2},
]


def train_on_video(plan: dict[str, Any] | None) -> dict[str, Tensor]:
    return train_on(plan, build("qwen2_5_vl"), with_video_and_sizes())


@pytest.mark.parametrize("plan", crossings(VIDEO_PLANS, but=VIDEO_PLANS[:1]), ids=str)
def test_videos_and_images_of_several_sizes(plan: dict[str, Any], pool2: Any) -> None:
    """One rank or micro-batch runs the tower for images, another for a video, another for both."""
    assert_equals_one_process(pool2.run(train_on_video, plan), train_on_video(None))


def accumulate(plan: dict[str, Any] | None) -> dict[str, Tensor]:
    """Two passes before their backward passes, of which the second would gather a tower again; and an evaluation."""
    with Float64():
        model: Any = build("llava")
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        batches: Any = [collate("llava", samples("llava", counts)) for counts in ((2, 0), (1, 0), (0, 2), (0, 1))]
        model, optimizer, loader = distribute(plan, model, optimizer, batches)
        found = {}
        for step, (one, other) in enumerate(batched_pairs(loader)):
            losses = [model(**one).loss, model(**other).loss]
            for loss in losses:
                loss.backward()
            found[f"norm {step}"] = mw.clip_grad_norm_(model, 0.5)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                found[f"evaluation {step}"] = model(**one).loss
        return found | {f"weight {name}": value for name, value in weights_of(model, plan).items()}


def batched_pairs(loader: Any) -> Any:
    batches = iter(loader)
    return zip(batches, batches, strict=True)


def test_two_passes_before_their_backward_passes(pool2: Any) -> None:
    assert_equals_one_process(pool2.run(accumulate, {"dp": 2, "zero_stage": 3}), accumulate(None))


def load_images_of_unknown_rows() -> None:
    ids = torch.full((2, 6), IMAGE)
    sizes = torch.tensor([[8, 8], [8, 16], [16, 16]])
    batch = {"input_ids": ids, "labels": ids, "pixel_values": torch.ones(3, 3, 16, 16), "image_sizes": sizes}
    model, _, loader = mw.to_distributed(build("mistral3"), loader=[batch], plan="dp2")
    model(**next(iter(loader)))


def test_images_of_unknown_rows_are_refused_on_every_rank(pool2: Any) -> None:
    for kind, said in pool2.run_expecting_error(load_images_of_unknown_rows):
        assert kind == "PlanError" and "pixel_values has shape (3, 3, 16, 16)" in said and "batch_dims" in said
