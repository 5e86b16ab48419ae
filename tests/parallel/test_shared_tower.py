"""Ranks with the same rows share the images of a tower, if it computes each image by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.mesh.axes import Axis
from meshwright.parallel.method_chain import add_step, find_step
from meshwright.parallel.tensor_parallel.shared_tower import Images, SharedTower, _mapped
from meshwright.roles.decoder import towers_of
from support.exact import Float64
from support.tiers import crossings
from support.vision_models import FAMILIES, build, loader


def observed(model: Any, family: str) -> dict[bool, bool]:
    """Whether the towers of a model are shared, in training and evaluation, after two images."""
    alone = Axis("tp")
    (tower,) = towers_of(model)
    step = SharedTower(tower, alone, (alone,), has_own_tokens=False)
    add_step(tower, step)
    for batch in loader(family, [(1, 0), (1, 1)]):
        model(**batch)
    return step._is_shared


@pytest.mark.parametrize("family", crossings(FAMILIES, but=["llava", "qwen3_vl", "mistral3"]))
def test_towers_whose_results_have_a_part_for_each_image(family: str) -> None:
    # Mistral 3 joins the patches of all images to one row.
    assert observed(build(family), family) == {True: family != "mistral3"}


class MeanOfImages(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


@pytest.mark.parametrize("change", [nn.Dropout(0.5), MeanOfImages()], ids=["dropout", "mean"])
def test_towers_whose_images_depend_on_each_other_are_not_shared(change: nn.Module) -> None:
    model = build("llava")
    model.model.vision_tower.encoder.layers[0].mlp.activation_fn = change
    assert observed(model, "llava") == {True: False}


def test_images_of_a_call() -> None:
    patches, sizes = torch.rand(20, 6), torch.tensor([[1, 2, 2], [2, 2, 4]])
    images = Images.of({"hidden_states": patches, "grid_thw": sizes, "return_dict": True})
    assert images is not None and list(images.rows) == [4, 16]
    part = images.part(1, 2)
    assert torch.equal(part["hidden_states"], patches[4:]) and torch.equal(part["grid_thw"], sizes[1:])
    assert part["return_dict"]
    assert Images.of({"pixel_values": torch.rand(3, 2, 2, 2), "mask": torch.ones(4)}) is None
    assert Images.of({"hidden_states": patches}) is None  # of how many images is not known


def test_values_of_a_tuple_are_made_when_they_are_read() -> None:
    made: list[Tensor] = []
    values = _mapped(lambda x: made.append(x) or x + 1, (torch.zeros(1), torch.ones(1), torch.ones(1)))
    assert len(values) == 3 and not made
    assert values[-2] is values[1] and len(made) == 1
    assert [int(x) for x in values] == [1, 2, 2] and len(values[1:]) == 2 and len(made) == 3
    with pytest.raises(TypeError):
        torch.stack(values)


def images_seen(plan: dict[str, Any], family: str, counts: list[tuple[int, int]]) -> list[int]:
    """How many images, or patches, the first layer of a rank's tower gets in each of some batches."""
    seen = []
    with Float64():
        model = mw.to_distributed(build(family), plan=mw.ParallelPlan(**plan))[0]
        (tower,) = towers_of(model)
        assert (find_step(tower, SharedTower) is None) == (plan.get("zero_stage") == 3)
        layer = next(m for m in tower.modules() if isinstance(m, nn.ModuleList))[0]
        layer.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])), prepend=True)
        for batch in loader(family, counts):
            model(**batch)
    return seen


@pytest.mark.parametrize(
    ("plan", "family", "sizes"),
    [
        ({"tp": 2, "sequence_parallel": True}, "llava", ([2, 1, 1, 2, 1, 1], [2, 1, 1, 2, 2, 1])),
        ({"cp": 2}, "qwen3_vl", ([32, 16, 16, 32, 16, 16], [32, 16, 16, 32, 32, 16])),
    ],
)
def test_each_rank_runs_its_own_images(plan: dict[str, Any], family: str, sizes: Any, pool2: Any) -> None:
    # The first batch with several images runs whole, and in two parts; one image runs on each rank.
    assert pool2.run(images_seen, plan, family, [(1, 1), (3, 1), (2, 1), (0, 1)]) == list(sizes)


def test_weights_that_are_gathered_for_each_call_are_not_shared(pool2: Any) -> None:
    plan = {"cp": 2, "zero_stage": 3}
    assert pool2.run(images_seen, plan, "llava", [(1, 1), (3, 1)]) == [[2, 4], [2, 4]]
