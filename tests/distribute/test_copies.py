"""Copies of a distributed model: averages of weights (EMA, SWA), frozen references, models that train on."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import AutoModelForCausalLM

import meshwright as mw
from meshwright.optim.runtime import runtime_of
from support.exact import Float64, relative_difference
from support.models import build, tokens
from support.parity import pool_for
from support.tiers import crossing, crossings, quick

SP2 = {"tp": 2, "sequence_parallel": True}
PLANS = [{"tp": 2}, SP2, *({"dp": 2, "zero_stage": stage} for stage in (0, 1, 2, 3))]
FOUR = {"dp": 2, "tp": 2, "sequence_parallel": True, "zero_stage": 3}


def start(plan: dict[str, Any] | None, **options: Any) -> tuple[Any, Any, Tensor]:
    model: Any = build("llama", **options).double()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = tokens(4, 12)
    if plan is not None:
        config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan), bucket_size_mb=0.01)
        model, optimizer, _ = mw.to_distributed(model, optimizer, config=config)
        ids = ids.chunk(plan.get("dp", 1))[torch.distributed.get_rank() // plan.get("tp", 1)]
    return model, optimizer, ids


def train(model: Any, optimizer: Any, ids: Tensor) -> None:
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def averaged(kind: str, plan: dict[str, Any] | None, folder: str | None = None) -> dict[str, Tensor]:
    """The average of the weights over a few steps, its logits, and the weights themselves."""
    with Float64():
        model, optimizer, ids = start(plan, tie_word_embeddings=kind == "tied")
        train(model, optimizer, ids)
        if kind == "by hand":
            ema: Any = copy.deepcopy(model)
        elif kind == "swa":
            ema = AveragedModel(model)
        else:
            ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        for _ in range(3):
            train(model, optimizer, ids)
            if kind == "by hand":
                with torch.no_grad():
                    for average, parameter in zip(ema.parameters(), model.parameters(), strict=True):
                        average.mul_(0.5).add_(parameter, alpha=0.5)
            else:
                ema.update_parameters(model)
        whole = ema if kind == "by hand" else ema.module
        ema.eval()
        with torch.no_grad():
            logits = ema(input_ids=tokens(2, 12, seed=7)).logits
        if folder is not None:
            whole.save_pretrained(folder)
        found = {f"average of {name}": x for name, x in mw.full_state_dict(whole).items()}
        return {**mw.full_state_dict(model), **found, "logits": logits}


@pytest.mark.parametrize("kind", [quick("ema"), crossing("tied"), crossing("swa"), crossing("by hand")])
def test_an_average_made_after_the_call(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Row 30, and the copy that could not be made: what AveragedModel and loops over parameters keep is the average."""
    expected = averaged(kind, None)
    for number, plan in enumerate([*(PLANS if kind == "ema" else PLANS[1::2]), *([FOUR] if kind == "tied" else [])]):
        folder = tmp_path / str(number)
        actual = pool_for(plan, request).run(averaged, kind, plan, str(folder))[0]
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            # 1e-9 in float64: the order of sums. The average differs from the weights by 1e-3 and more.
            assert "k_proj.bias" in name or relative_difference(actual[name], value) < 1e-9, (plan, name)
        saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).state_dict()
        assert all(torch.equal(saved[name], actual[f"average of {name}"]) for name in saved)
    name = "model.layers.0.mlp.up_proj.weight"
    assert relative_difference(expected[name], expected[f"average of {name}"]) > 1e-3


def train_both(plan: dict[str, Any] | None, *, copies_optimizer: bool = False) -> dict[str, Tensor]:
    """A copy that trains on its own while the model does, with an optimizer or with a copy of the model's."""
    with Float64():
        model, optimizer, ids = start(plan)
        train(model, optimizer, ids)
        other, copied = copy.deepcopy((model, optimizer)) if copies_optimizer else (copy.deepcopy(model), None)
        if plan is not None and "dp" in plan:
            counts = [sum(len(sync.buckets) for sync in runtime_of(m).gradients.syncs) for m in (model, other)]
            assert counts[0] == counts[1] > 2, "the copy reduces its gradients in buckets of another size"
        second: Any = copied or torch.optim.SGD(other.parameters(), lr=0.5)
        if plan is not None and copied is None:
            other, second, _ = mw.to_distributed(other, second)
        for _ in range(2):
            train(other, second, ids)
            train(model, optimizer, ids)
        return {**mw.full_state_dict(model), **{f"copy's {n}": x for n, x in mw.full_state_dict(other).items()}}


@pytest.mark.parametrize(
    "plan",
    crossings([*PLANS[1:], {**SP2, "gradient_accumulation_steps": 2}], only=[SP2, {"dp": 2, "zero_stage": 2}]),
    ids=str,
)
def test_a_copy_trains_on_its_own(plan: dict[str, Any], pool2: Any) -> None:
    expected, actual = train_both(None), pool2.run(train_both, plan)[0]
    for name, value in expected.items():  # 1e-9 in float64: the order of sums
        assert "k_proj.bias" in name or relative_difference(actual[name], value) < 1e-9, name


def test_a_copy_of_the_optimizer_steps_the_copy(pool2: Any) -> None:
    actual = pool2.run(train_both, PLANS[2], copies_optimizer=True)[0]
    for name, value in train_both(None, copies_optimizer=True).items():  # 1e-9 in float64: the order of sums
        assert "k_proj.bias" in name or relative_difference(actual[name], value) < 1e-9, name


@pytest.mark.parametrize("plan", [SP2, {"dp": 2, "zero_stage": 1}, {"dp": 2, "zero_stage": 3}], ids=str)
def test_a_copy_of_a_part_of_the_state_is_refused(plan: dict[str, Any], pool2: Any) -> None:
    for kind, message in pool2.run_expecting_error(train_both, plan, copies_optimizer=True):
        assert kind == "AlreadyDistributedError" and "to_distributed(other, new)" in message


def step_a_shallow_copy() -> None:
    model, optimizer, ids = start({"dp": 2, "zero_stage": 1})
    train(model, copy.copy(optimizer), ids)


def test_a_step_of_a_shallow_copy_is_refused(pool2: Any) -> None:
    for kind, message in pool2.run_expecting_error(step_a_shallow_copy):
        assert kind == "UnreadableTensorError" and "A copy of the optimizer cannot step" in message


def made_before(plan: dict[str, Any], is_distributed: bool) -> str:
    """An average that was made of the whole model, updated from the distributed one."""
    with Float64():
        model: Any = build("llama").double()
        ema: Any = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        config = mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan))
        model, _, _ = mw.to_distributed(model, config=config)
        if is_distributed:
            mw.to_distributed(ema.module, config=config)
        try:
            for factor in (2.0, 0.5):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(factor)
                ema.update_parameters(model)
        except mw.UnreadableTensorError as error:
            return str(error)
        found = mw.full_state_dict(ema.module)
    # The first update copies twice the weights, the second goes half of the way to the weights.
    expected = {name: 1.5 * x.double() for name, x in build("llama").state_dict().items()}
    assert all(relative_difference(x, expected[name]) < 1e-12 for name, x in found.items())
    return "equal"


@pytest.mark.parametrize("plan", [SP2, PLANS[-1]], ids=str)
def test_an_average_made_before_the_call(plan: dict[str, Any], pool2: Any) -> None:
    """Row 30: it holds whole tensors, so it is told to be distributed too; then it is the average."""
    assert all("mw.to_distributed(ema.module, config=config)" in said for said in pool2.run(made_before, plan, False))
    assert pool2.run(made_before, plan, True) == ["equal"] * 2
