"""``state_dict`` and ``load_state_dict`` of distributed models and optimizers: whole, or an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

import meshwright as mw
from support.exact import Float64, relative_difference
from support.models import build, labels_for, tokens
from support.parity import pool_for
from support.reference import make_optimizer
from support.tiers import crossing

TP2 = {"tp": 2}
SP2 = {"tp": 2, "sequence_parallel": True}
STAGES = [{"dp": 2, "zero_stage": stage} for stage in (0, 1, 2, 3)]


def distribute(model: Any, plan: dict[str, Any], optimizer: Any = None) -> Any:
    return mw.to_distributed(model, optimizer, config=mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan)))


def refusals(plan: dict[str, Any]) -> dict[str, str | None]:
    """What each way to read or write the state of a program says; None where it works."""
    model = build("llama")
    state = torch.optim.AdamW(model.parameters()).state_dict()
    model, optimizer, _ = distribute(model, plan, make_optimizer(model))
    ways = {
        "model.state_dict()": lambda: model.state_dict(),
        "model.model.state_dict()": lambda: model.model.state_dict(),
        "optimizer.state_dict()": lambda: optimizer.state_dict(),
        "optimizer.load_state_dict()": lambda: optimizer.load_state_dict(state),
        "names": lambda: model.state_dict(keep_vars=True),
    }
    said: dict[str, str | None] = dict.fromkeys(ways)
    for name, way in ways.items():
        try:
            way()
        except mw.UnreadableTensorError as error:
            said[name] = str(error)
        except ValueError as error:
            said[name] = None if "parameter group" in str(error) else str(error)
    return said


@pytest.mark.quick
@pytest.mark.parametrize("plan", [TP2, SP2, *STAGES], ids=str)
def test_a_part_of_the_state_is_never_given_out(plan: dict[str, Any], pool2: Any) -> None:
    """Row 7: what one rank saves by ``torch.save(model.state_dict())`` all would load as their own."""
    has_shards = plan.get("tp", 1) == 2 or plan["zero_stage"] == 3
    has_parts = plan.get("tp", 1) == 2 or plan["zero_stage"] > 0
    for said in pool2.run(refusals, plan):
        for name in ("model.state_dict()", "model.model.state_dict()"):
            assert ("full_state_dict(model)" in (said[name] or "")) == has_shards
        assert ("save_optimizer(model" in (said["optimizer.state_dict()"] or "")) == has_parts
        assert ("load_optimizer(model" in (said["optimizer.load_state_dict()"] or "")) == has_parts
        assert said["names"] is None


def built(kind: str, seed: int) -> Any:
    options: dict[str, Any] = {"tie_word_embeddings": True} if kind == "tied" else {}
    options |= {"num_key_value_heads": 2} if kind == "few key heads" else {}
    model: Any = build("phi3" if kind == "fused" else "llama", seed=seed, **options)
    if kind == "adapters":
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "o_proj"], init_lora_weights=False))
    return model


def loaded_then_trained(kind: str, plan: dict[str, Any] | None) -> dict[str, Tensor]:
    """A step, other weights loaded in place, and two more steps."""
    with Float64():
        model = built(kind, seed=0).double()
        optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        state = built(kind, seed=5).double().state_dict()
        if plan is not None:
            model, optimizer, _ = distribute(model, plan, optimizer)
        ids = tokens(4, 12)
        if plan is not None and (dp := plan.get("dp", 1)) > 1:
            ids = ids.chunk(dp)[torch.distributed.get_rank() // plan.get("tp", 1)]
        for step in range(3):
            if step == 1:
                assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
            model(input_ids=ids, labels=labels_for(tokens(4, 12))[: len(ids)] * 0 + ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return mw.full_state_dict(model)


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        crossing("plain", TP2),
        ("tied", SP2),
        ("fused", SP2),
        ("adapters", SP2),
        crossing("plain", STAGES[1]),
        crossing("plain", STAGES[2]),
        ("plain", STAGES[3]),
        crossing("tied", STAGES[3]),
        ("few key heads", {"tp": 4, "sequence_parallel": True}),
        ("tied", {"dp": 2, "tp": 2, "zero_stage": 3}),
    ],
    ids=str,
)
def test_every_rank_loads_a_one_device_state(kind: str, plan: dict[str, Any], request: pytest.FixtureRequest) -> None:
    expected, actual = loaded_then_trained(kind, None), pool_for(plan, request).run(loaded_then_trained, kind, plan)[0]
    # 1e-9 in float64: the order of sums. A weight that was not loaded differs by 1e-2 and more.
    assert max(relative_difference(actual[name], x) for name, x in expected.items() if "k_proj.bias" not in name) < 1e-9
    assert expected.keys() == actual.keys()


def loaded_in_half_precision(plan: dict[str, Any]) -> bool:
    """Whether the loaded weights are still there after a step of size zero, which publishes the float32 masters."""
    model = build("llama").to(torch.bfloat16)
    state = build("llama", seed=5).to(torch.bfloat16).state_dict()
    model, optimizer, _ = distribute(model, plan, torch.optim.SGD(model.parameters(), lr=0.0))
    ids = tokens(2, 12)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    model.load_state_dict(state)
    optimizer.step()
    return all(torch.equal(state[name], x) for name, x in mw.full_state_dict(model).items())


def test_masters_take_over_what_is_loaded(pool2: Any) -> None:
    assert all(pool2.run(loaded_in_half_precision, STAGES[3]))


def wrong_states(plan: dict[str, Any]) -> list[str]:
    model = distribute(build("llama"), plan)[0]
    whole = build("llama").state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    shard = whole[name].chunk(2)[0]
    said = []
    for change, options in [
        ({name: whole[name][:5]}, {}),
        ({name: shard}, {}),
        ({name: None}, {}),
        ({"other": shard}, {}),
        ({}, {"assign": True}),
    ]:
        state = {n: x for n, x in {**whole, **change}.items() if x is not None}
        try:
            model.load_state_dict(state, **options)
            said.append("")
        except (RuntimeError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
    before = mw.full_state_dict(model)
    missing, unexpected = model.load_state_dict({name: whole[name] + 1, "other": shard}, strict=False)
    after = mw.full_state_dict(model)
    if after:
        assert torch.equal(after[name], before[name] + 1)
        assert all(torch.equal(after[n], before[n]) for n in before if n != name)
    assert name not in missing and len(missing) == len(whole) - 1 and unexpected == ["other"]
    return said


@pytest.mark.parametrize("plan", [TP2, STAGES[3]], ids=str)
def test_strict_errors_are_torchs(plan: dict[str, Any], pool2: Any) -> None:
    for shape, shard, lacking, more, assign in pool2.run(wrong_states, plan):
        assert "size mismatch for model.layers.0.mlp.up_proj.weight" in shape and "torch.Size([48, 32])" in shape
        assert ("is one rank's shard" in shard) if plan == TP2 else ("size mismatch" in shard)
        assert "RuntimeError" in lacking and "Missing key(s)" in lacking
        assert "RuntimeError" in more and 'Unexpected key(s) in state_dict: "other"' in more
        assert assign.startswith("UnreadableTensorError") and "load_state_dict(state)" in assign
