"""The stages of a model with a tower, or other weights before its layers: the first alone holds them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import RoFormerConfig, RoFormerForCausalLM

import meshwright as mw
from meshwright.parallel.shards.stand_in import reading_shards
from meshwright.parallel.shards.state_of_parts import state_of
from meshwright.pipeline.cut import cut_decoder
from meshwright.roles import find_decoder
from support.exact import Float64
from support.models import SIZES, tokens
from support.tiers import crossings
from support.vision_models import build, loader


def train_one_step(family: str, plan: dict[str, Any], *, folder: Path | None = None, saved: Path | None = None) -> Any:
    """Return the model and the optimizer after a step, or as a checkpoint has them."""
    model: Any = build(family)
    if folder is not None:  # no process has the weights, each reads those that it holds
        trained = [p.requires_grad for p in model.parameters()]
        with torch.device("meta"):
            model = type(model)(model.config)
        model = model.double().train()
        for parameter, is_trained in zip(model.parameters(), trained, strict=True):
            parameter.requires_grad_(is_trained)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan), weights=folder)
    model, optimizer, _ = mw.to_distributed(model, optimizer, config=config)
    if saved is not None:
        mw.load_checkpoint(saved, model, optimizer)
        return model, optimizer
    for batch in list(loader(family, [(1, 1)])):
        model(**batch).loss.backward()
    optimizer.step()
    return model, optimizer


def beside_layers(model: nn.Module) -> list[nn.Parameter]:
    """The weights of towers, and of what projects their features."""
    decoder = find_decoder(model)
    others = {decoder.embedding, decoder.head, decoder.final_norm, *(m for x in decoder.layers for m in x.modules())}
    return [p for m in model.modules() if m not in others for p in m.parameters(recurse=False)]


def bytes_held(family: str, plan: dict[str, Any], folder: Path | None = None) -> tuple[int, int]:
    """The bytes of these weights, and of the optimizer's state of them."""
    with Float64():
        model, optimizer = train_one_step(family, plan, folder=folder)
    with reading_shards():
        weights = beside_layers(model)
        state = [x for p in weights for x in state_of(optimizer, p).values() if isinstance(x, Tensor) and x.ndim]
        return sum(p.untyped_storage().nbytes() for p in weights), sum(x.nbytes for x in state)


@pytest.mark.parametrize(
    ("family", "constructs"),
    crossings(itertools.product(("llava", "qwen3_vl"), (False, True)), but=[("qwen3_vl", True)]),
)
def test_later_stages_hold_no_part_of_a_tower(family: str, constructs: bool, pool2: Any, tmp_path: Path) -> None:
    model = build(family)
    if constructs:
        model.save_pretrained(tmp_path)
    first, later = pool2.run(bytes_held, family, {"pp": 2}, tmp_path if constructs else None)
    assert first == bytes_held(family, {})  # of one process
    assert later == (8 * len(beside_layers(model)), 0)  # one zero stands in the place of each weight


def weights_under(family: str, plan: dict[str, Any], saved: Path | None, folder: Path) -> dict[str, Tensor]:
    """Save the weights and a checkpoint after a step, or after loading a checkpoint."""
    with Float64():
        model, optimizer = train_one_step(family, plan, saved=saved)
        mw.save_checkpoint(folder / "checkpoint", model, optimizer)
        model.save_pretrained(folder / "pretrained")
        return {name: x.clone() for name, x in mw.full_state_dict(model).items()}


@pytest.mark.parametrize("family", crossings(["gemma3", "qwen3_vl"], but=["qwen3_vl"]))
def test_weights_and_checkpoints_are_those_of_every_plan(family: str, pool2: Any, tmp_path: Path) -> None:
    plans: list[dict[str, Any]] = [{"pp": 2}, {"dp": 2, "zero_stage": 1}, {"tp": 2}, {"pp": 2}]
    saved, expected = None, None
    for number, plan in enumerate(plans):
        folder = tmp_path / str(number)
        found = pool2.run(weights_under, family, plan, saved, folder)[0]
        expected, saved = expected or found, folder / "checkpoint"
        stock = type(build(family)).from_pretrained(folder / "pretrained", dtype=torch.float64).state_dict()
        for weights in (found, stock):
            assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_the_first_stage_has_fewer_layers_for_its_tower() -> None:
    model = build("llava", layers=8)
    decoder = find_decoder(model)
    plan = mw.ParallelPlan(pp=4)

    def layers() -> list[int]:
        return [len(span) for span in cut_decoder(decoder, plan, rank=0).spans]

    # The tower has 3 layers of 24 channels beside 8 of 32: as much work as 1.5 of them, and half of it if frozen.
    assert layers() == [1, 3, 2, 2]
    model.model.vision_tower.requires_grad_(False)
    assert layers() == [2, 2, 2, 2]


def test_the_first_stage_has_the_layers_that_add_features() -> None:
    model = build("qwen3_vl", layers=4)
    decoder = find_decoder(model)

    def layers(**plan: Any) -> list[int]:
        return [len(span) for span in cut_decoder(decoder, mw.ParallelPlan(**plan), rank=0).spans]

    assert layers(pp=2) == [2, 2]
    assert layers(pp=3) == [2, 1, 1]
    with pytest.raises(mw.PlanError, match=r"pp=4.*first 2 layers add features of a tower.*smaller pp"):
        layers(pp=4)
    with pytest.raises(mw.PlanError, match=r"stages=\(1, 3\) has 1 layers on the first stage.*stages=\(2, 2\)"):
        layers(pp=2, stages=(1, 3))


def step_with_weights_that_a_hook_reads(*, are_complex: bool) -> None:
    """A hook of the second stage multiplies a table of positions by a weight that the first stage alone has."""
    sizes = {name: x for name, x in SIZES.items() if name != "num_key_value_heads"}
    model: Any = RoFormerForCausalLM(RoFormerConfig(**sizes, is_decoder=True))

    def multiply(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        table = args[2] * model.roformer.embeddings.token_type_embeddings.weight[0, 0]
        return *args[:2], torch.complex(table, torch.zeros_like(table)) if are_complex else table, *args[3:]

    model = mw.to_distributed(model, plan=mw.ParallelPlan(pp=2))[0]
    model.roformer.encoder.layer[1].register_forward_pre_hook(multiply)
    ids = tokens(2, 8)
    model(input_ids=ids, labels=ids)


@pytest.mark.parametrize("are_complex", [False, True])
def test_a_layer_that_is_given_weights_of_the_first_stage_is_refused(are_complex: bool, pool2: Any) -> None:
    kind, said = pool2.run_expecting_error(step_with_weights_that_a_hook_reads, are_complex=are_complex)[1]
    assert kind == "PlanError" and "layer 1 (RoFormerLayer) is given sinusoidal_pos" in said and "pp=1" in said
