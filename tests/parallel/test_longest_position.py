"""Frequencies that a model chooses by the longest position are those of the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.facts import Facts
from meshwright.parallel.batch.longest_position import depends_on_longest
from support.exact import Float64
from support.models import build, tokens
from support.short_programs import Plan, train, worst

LENGTH = 12
ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("llama", {"rope_type": "default"}),
    "linear": ("llama", {"rope_type": "linear", "factor": 4.0}),
    "dynamic": ("llama", {"rope_type": "dynamic", "factor": 4.0}),
    "longrope": (
        "phi3",
        {
            "rope_type": "longrope",
            "long_factor": [3.0, 5.0],
            "short_factor": [1.0, 1.0],
            "original_max_position_embeddings": 8,
        },
    ),
}


def model_with(rope: str) -> Any:
    family, options = ROPES[rope]
    sizes = {"max_position_embeddings": 8, "original_max_position_embeddings": 8}
    options = {"rope_theta": 10000.0, **options}
    return build(family, rope_parameters=options, **(sizes if family == "phi3" else {"max_position_embeddings": 8}))


def packed(step: int) -> dict[str, Tensor]:
    """Four rows of packed documents; the only one of 12 tokens is in another row at each step, if there is one."""
    ends = [[4, 8], [0, 6], [3, 7], [5, 9]]
    if step < 2:
        ends[3 * step] = []
    ids = tokens(4, LENGTH, seed=step)
    positions = torch.arange(LENGTH).repeat(4, 1)
    for row, places in enumerate(ends):
        for place in places:
            positions[row, place:] = torch.arange(LENGTH - place)
    return {"input_ids": ids, "labels": ids, "position_ids": positions}


def run(plan: Plan, rope: str) -> tuple[list[float], dict[str, Tensor]]:
    with Float64():
        model = model_with(rope).double()
        if plan is None:
            model.config.use_cache = False  # with it, stock transformers attends across documents
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        return train(model, plan, [packed(step) for step in range(3)], optimizer)


PLANS = [{"dp": 2}, {"gradient_accumulation_steps": 2, "tp": 2}, {"pp": 2, "gradient_accumulation_steps": 2}]


@pytest.mark.parametrize(
    ("plan", "rope"), [*((plan, "dynamic") for plan in PLANS), ({"dp": 2, "zero_stage": 3}, "longrope")], ids=str
)
def test_packed_rows_have_the_frequencies_of_one_device(plan: dict[str, Any], rope: str, pool2: Any) -> None:
    """In float64, where only the order of sums differs; a rank's own longest position differs by 1e-6 and more."""
    losses, weights = run(None, rope)
    found = pool2.run(run, plan, rope)[0]
    assert found[0] == pytest.approx(losses, rel=1e-11)
    assert worst(found[1], weights) < 1e-10


def positions(model: nn.Module) -> list[nn.Module]:
    facts = Facts(model)
    return [module for module in facts.names if depends_on_longest(facts, module)]


def test_modules_are_found_by_what_they_compute() -> None:
    found = {rope: positions(model_with(rope)) for rope in ROPES}
    assert {rope: len(modules) for rope, modules in found.items()} == {
        "default": 0, "linear": 0, "dynamic": 1, "longrope": 1,
    }  # fmt: skip
    assert not positions(nn.Linear(2, 2))


class PlacesOfPatches(nn.Module):
    """Angles of two coordinates for each patch of an image, as towers compute them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.tensor([1.0, 0.1]))

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        return (position_ids[..., None] * self.inv_freq).transpose(1, 2).flatten(1).cos()


def test_places_of_patches_are_no_positions_of_a_row() -> None:
    assert not positions(PlacesOfPatches())
