"""A decoder written by hand, without a transformers config: planned by its structure, and trained as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import meshwright as mw
from meshwright.choose.model_sizes import shape_of
from meshwright.roles import plan_for
from meshwright_plan.job.shapes import describe
from support.decoder import HEADS, HIDDEN, INTERMEDIATE, LAYERS, LENGTH, VOCAB, make_decoder
from support.exact import Float64
from support.models import build
from support.tiers import crossing

STEPS, ROWS = 3, 4


def loader() -> Any:
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(VOCAB, (2, STEPS * ROWS, LENGTH), generator=generator)
    return DataLoader(TensorDataset(ids, labels), batch_size=ROWS)


def trained(**call: Any) -> tuple[list[float], Any, Any]:
    """The losses of every step, the whole weights at the end (on rank 0), and the plan."""
    with Float64():
        model = make_decoder()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        batches: Any = loader()
        if call:
            model, optimizer, batches = mw.to_distributed(model, optimizer, batches, **call)
        losses = []
        for inputs, labels in batches:
            loss, _ = model(inputs, labels=labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if not call:
            return losses, {name: p.detach() for name, p in model.named_parameters()}, None
        return losses, mw.full_state_dict(model), mw.plan_of(model)


def compare(ranks: list[Any]) -> None:
    """Sums in another order differ by 1e-15; a gradient that is not reduced, or reduced twice, by 1e-2."""
    losses, weights, _ = trained()
    # Under dp each rank's own loss is the mean over its rows, as with any loss of a model's own.
    dp = ranks[0][2].dp
    means = [sum(steps) / len(steps) for steps in zip(*(rank[0] for rank in ranks), strict=True)]
    assert means == pytest.approx(losses, abs=1e-12), dp
    found = ranks[0][1]
    assert set(found) == set(weights)
    for name, expected in weights.items():
        assert torch.allclose(found[name].to(expected.dtype), expected, rtol=0, atol=1e-12), name
    start = dict(make_decoder().named_parameters())
    assert max((weights[name] - start[name]).abs().max() for name in weights) > 1e-2


@pytest.mark.parametrize("plan", [crossing("dp2"), crossing("tp2"), "tp2+sp", crossing("dp2 zero1"), "dp2 zero3"])
def test_its_training_is_that_of_one_process(plan: str, pool2: Any) -> None:
    compare(pool2.run(trained, plan=plan))


def test_the_planner_picks_by_its_structure(pool2: Any) -> None:
    """List B: a model without a transformers config, and no plan given, was an error."""
    config = mw.ToDistributedConfig()
    config.sequence_parallel = True
    ranks = pool2.run(trained, device_num=2, node_num=1, config=config)
    assert ranks[0][2].world_size == 2
    compare(ranks)


def test_two_axes(pool4: Any) -> None:
    compare(pool4.run(trained, plan="dp2 tp2+sp zero1"))


def test_its_shape() -> None:
    model = make_decoder()
    shape = shape_of(model, plan_for(model))
    layer = shape.runs[0]
    assert (shape.layers, shape.hidden, layer.heads, layer.kv_heads) == (LAYERS, HIDDEN, HEADS, HEADS)
    assert (layer.ffn, shape.vocab, layer.gated, shape.tied) == (INTERMEDIATE, VOCAB, True, False)
    assert shape.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "olmo2"])
def test_structure_and_config_tell_the_same_sizes(family: str) -> None:
    model: Any = build(family)
    found, told = shape_of(model, plan_for(model)), describe(model.config)
    for name in ("layers", "vocab", "tied", "positions"):
        assert getattr(found, name) == getattr(told, name), name
    for name in ("hidden", "heads", "kv_heads", "head_dim", "ffn", "gated"):
        assert getattr(found.runs[0], name) == getattr(told.runs[0], name), name
    assert found.parameters == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.01)
