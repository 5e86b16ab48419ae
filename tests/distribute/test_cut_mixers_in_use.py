"""What programs do with models whose mixers are cut by heads: padding, generation, adapters, checkpoints, construction.

Tolerance 1e-10 of a tensor's largest value: in float64 only the order of sums differs.
"""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn

import meshwright as mw
from conformance.spmd import check_plan
from support.exact import Float64, relative_difference
from support.hybrid_models import FAMILIES, build, from_config
from support.models import labels_for, tokens
from support.short_programs import distribute, gradients_of
from support.tiers import crossings
from support.traffic import Traffic

SP = {"tp": 2, "sequence_parallel": True}
# The input projections, by which a hybrid's mixers are adapted.
TARGETS = {
    "qwen3_5_text": ["in_proj_qkv", "in_proj_a", "out_proj"],
    "delta net, rows by one key head": ["in_proj_qkvz", "in_proj_ba", "out_proj"],
    "granitemoehybrid": ["in_proj", "out_proj"],
    "recurrent_gemma": ["linear_x", "linear_out"],
    "lfm2, biases": ["conv.in_proj", "conv.out_proj"],
}


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    worst = {name: relative_difference(actual[name], value) for name, value in expected.items()}
    assert max(worst.values()) <= 1e-10, max(worst.items(), key=lambda item: item[1])


def padded(plan: dict[str, Any] | None, name: str) -> dict[str, Tensor]:
    """The loss and gradients of rows with padding, whose length tp does not divide; and tokens generated from them."""
    with Float64():
        model = distribute(plan, build(name))[0]
        ids = tokens(3, 11)
        mask = torch.ones_like(ids)
        mask[0, :4], mask[1, :1] = 0, 0
        labels = labels_for(ids).masked_fill(mask == 0, -100)
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        found = {"loss": loss.detach(), **gradients_of(model, plan)}
        new = model.eval().generate(input_ids=ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
        return {**found, "generated": new.double()}


@pytest.mark.parametrize(
    ("name", "plan"),
    crossings(
        [(name, plan) for name in (*FAMILIES, *TARGETS) for plan in ("tp2", "tp2+sp")],
        but=[("granitemoehybrid", "tp2+sp"), ("qwen3_5_text", "tp2")],
    ),
)
def test_padding_and_generation(name: str, plan: str, pool2: Any) -> None:
    results = pool2.run(padded, SP if plan == "tp2+sp" else {"tp": 2}, name)
    assert_close(results[0], padded(None, name))
    assert torch.equal(results[0]["generated"], results[1]["generated"])


def adapted(plan: dict[str, Any] | None, name: str, folder: Path | None = None) -> dict[str, Tensor]:
    with Float64():
        torch.manual_seed(3)
        model: Any = get_peft_model(build(name), LoraConfig(r=3, target_modules=TARGETS[name])).double()
        for own, parameter in model.named_parameters():
            if "lora_B" in own:
                nn.init.normal_(parameter, std=0.1)
        model = distribute(plan, model)[0]
        ids = tokens(4, 11)
        loss = model(input_ids=ids, labels=labels_for(ids)).loss
        loss.backward()
        if folder is not None:
            model.save_pretrained(folder)
        return {"loss": loss.detach(), **gradients_of(model, plan)}


@pytest.mark.parametrize(
    ("name", "plan"),
    crossings(
        [(name, plan) for name in TARGETS for plan in ("tp2", "tp2+sp")],
        but=[("delta net, rows by one key head", "tp2+sp")],
    ),
)
def test_adapters(name: str, plan: str, pool2: Any, tmp_path: Path) -> None:
    whole = adapted(None, name, tmp_path / "whole")
    assert_close(pool2.run(adapted, SP if plan == "tp2+sp" else {"tp": 2}, name, tmp_path / "parts")[0], whole)
    files = [load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("parts", "whole")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][key], value) for key, value in files[1].items())


def with_adapted_convolution() -> None:
    model = get_peft_model(build("bamba"), LoraConfig(r=128, target_modules=["in_proj", "conv1d"]))
    distribute({"tp": 2}, model)


def test_an_adapted_convolution_is_refused_by_name(pool2: Any) -> None:
    for kind, message in pool2.run_expecting_error(with_adapted_convolution):
        assert kind == "PlanError" and "conv1d" in message and "target_modules" in message


def step(model: Any, optimizer: Any, number: int) -> Tensor:
    ids = tokens(8, 11)[4 * number : 4 * number + 4]
    loss = model(input_ids=ids, labels=labels_for(ids)).loss
    loss.backward()
    mw.clip_grad_norm_(model, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    detached: Tensor = loss.detach()
    return detached


def in_one_process(name: str) -> dict[str, Tensor]:
    with Float64():
        model = build(name)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = {f"loss {number}": step(model, optimizer, number) for number in range(2)}
        return losses | model.state_dict()


def resumed(first: dict[str, Any], second: dict[str, Any], name: str, folder: Path) -> dict[str, Tensor]:
    """A step under one plan, and one under another from the checkpoint of the first."""
    found: dict[str, Tensor] = {}
    with Float64():
        for number, plan in enumerate((first, second)):
            model = build(name)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            model, optimizer, _ = distribute(plan, model, optimizer)
            if number == 1:
                mw.load_checkpoint(folder / "0", model, optimizer)
            found[f"loss {number}"] = step(model, optimizer, number)
            mw.save_checkpoint(folder / f"{number}", model, optimizer)
        model.save_pretrained(folder / "weights")
        return found | mw.full_state_dict(model)


ZERO = {"dp": 2, "zero_stage": 1}


@pytest.mark.parametrize(
    ("name", "plans"),
    crossings(
        [(name, plans) for name in FAMILIES for plans in ("cut, then whole", "whole, then cut")],
        but=[("bamba", "cut, then whole")],
    ),
)
def test_a_run_goes_on_under_another_tp(name: str, plans: str, pool2: Any, tmp_path: Path) -> None:
    first, second = (SP, ZERO) if plans == "cut, then whole" else (ZERO, SP)
    results = pool2.run(resumed, first, second, name, tmp_path)
    assert_close(results[0], in_one_process(name))
    # The stock model writes the same file, which may have the names in which the family is published.
    stock = build(name).double()
    stock.load_state_dict({key: value for key, value in results[0].items() if not key.startswith("loss")})
    stock.save_pretrained(tmp_path / "stock")
    ours, whole = (load_file(tmp_path / folder / "model.safetensors") for folder in ("weights", "stock"))
    assert ours.keys() == whole.keys() and all(torch.equal(ours[key], whole[key]) for key in whole)


def constructed(name: str, how: str, folder: Path) -> dict[str, Tensor]:
    """A loss and the weights of a model that no process has held whole, of the weights in a folder."""
    with torch.device("meta") if how == "meta" else mw.deferred_init():
        model = from_config(name)
    model = distribute(SP, model, weights=folder)[0]
    ids = tokens(2, 11)
    return {"loss": model(input_ids=ids, labels=ids).loss.detach(), **mw.full_state_dict(model)}


@pytest.mark.parametrize(
    ("name", "how"),
    crossings([(name, how) for name in FAMILIES for how in ("meta", "deferred")], but=[("falcon_h1", "meta")]),
)
def test_construction_by_slices(name: str, how: str, pool2: Any, tmp_path: Path) -> None:
    model = build(name).float()
    model.save_pretrained(tmp_path)
    found = pool2.run(constructed, name, how, tmp_path)[0]
    ids = tokens(2, 11)
    assert relative_difference(found.pop("loss"), model(input_ids=ids, labels=ids).loss.detach()) < 1e-5  # in float32
    assert all(torch.equal(found[key], value) for key, value in model.state_dict().items())


def collectives(plan: dict[str, Any], name: str, layers: int) -> tuple[Counter[str], Counter[str]]:
    model = distribute(plan, from_config(name, num_hidden_layers=layers).train())[0]
    ids = tokens(2, 12)
    with Traffic() as forward:
        loss = model(input_ids=ids, labels=ids).loss
    with Traffic() as backward:
        loss.backward()
    return forward.calls, backward.calls


def collectives_of_a_layer(pool: Any, name: str) -> tuple[Counter[str], Counter[str]]:
    two, three = (pool.run(collectives, SP, name, layers)[0] for layers in (2, 3))
    return three[0] - two[0], three[1] - two[1]


def test_a_mixer_has_the_collectives_of_a_block(pool2: Any) -> None:
    """One gather and one reduction in each direction, and one small all-reduce for a norm over several ranks."""
    forward, backward = collectives_of_a_layer(pool2, "mamba2")  # a layer is a mixer
    assert forward == Counter(all_gather=1, reduce_scatter=1)
    assert backward == Counter(all_gather=2, reduce_scatter=1)  # backward gathers the input again
    of_one_group = collectives_of_a_layer(pool2, "mamba2, one group")
    norm = Counter(all_reduce=1)
    assert of_one_group == (forward + norm, backward + norm)


@pytest.mark.parametrize(
    ("name", "plan"),
    crossings(
        [(name, plan) for name in (*FAMILIES, "falcon_h1, norm of one group") for plan in ("tp2", "tp2+sp")],
        but=[("falcon_h1, norm of one group", "tp2+sp")],
        one_in=2,
    ),
)
def test_the_static_check_follows_mixers(name: str, plan: str) -> None:
    fields = SP if plan == "tp2+sp" else {"tp": 2}
    assert check_plan(lambda: build(name).float(), mw.ParallelPlan(**fields)) == []


def in_training(plan: dict[str, Any], name: str, module: str) -> tuple[list[bool], bool, dict[str, Tensor]]:
    """Whether each mixer computes in training mode, when transformers may call a kernel that holds all of it."""
    model = distribute(plan, build(name).float())[0].train()
    seen: list[bool] = []
    kernel = "mamba2_split_conv1d_scan_combined"
    code = importlib.import_module(module)
    ids = tokens(2, 12)
    with mock.patch.object(code, kernel, lambda *_, **__: seen.append(True)):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return seen, all(m.training for m in model.modules()), {"loss": loss.detach()}


def test_a_kernel_with_the_norm_and_the_output_projection_inside_is_not_called_on_parts(pool2: Any) -> None:
    code = "transformers.models.mamba2.modeling_mamba2"
    seen, trains, _ = pool2.run(in_training, {"tp": 2}, "mamba2", code)[0]
    assert not seen and trains
    seen, trains, _ = pool2.run(in_training, ZERO, "mamba2", code)[0]
    assert len(seen) == 2 and trains
