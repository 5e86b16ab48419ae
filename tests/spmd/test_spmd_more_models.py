"""The static check of models with towers, with an image in each row, and of hybrids whose mixers are cut by heads."""

from __future__ import annotations

import functools
from typing import Any

import pytest

import meshwright as mw
from conformance.spmd.check import check_plan
from support import hybrid_models, vision_models
from support.tiers import crossings

FAMILIES = ("qwen3_vl", "llava", "qwen3_5_text", "mamba2")


def build(family: str) -> Any:
    module: Any = vision_models if family in vision_models.FAMILIES else hybrid_models
    return module.build(family).float()


@pytest.mark.parametrize("family", crossings(FAMILIES, but=["mamba2"]))
def test_nothing_is_found(family: str) -> None:
    batch = None
    if family in vision_models.FAMILIES:
        batch = vision_models.collate(family, vision_models.samples(family, (1, 1)))
        batch = {name: x.float() if x.is_floating_point() else x for name, x in batch.items()}
    plan = mw.ParallelPlan(tp=2, sequence_parallel=True)
    assert check_plan(functools.partial(build, family), plan, batch=batch) == []
