"""Muon and AdamW for one model: in a plain loop, in accelerate and in the Trainer, as on one device."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import Trainer

import meshwright as mw
import meshwright_hf.accelerate
from support.exact import Float64, relative_difference
from support.models import build, labels_for, tokens
from support.tiers import crossings
from support.trainers import Rows, arguments, fresh_accelerate

PLANS = {
    "dp2 zero1": mw.ParallelPlan(dp=2, zero_stage=1),
    "dp2 zero3": mw.ParallelPlan(dp=2, zero_stage=3),
    "tp2+sp": mw.ParallelPlan(tp=2, sequence_parallel=True),
    "dp2 zero1 offload": mw.ParallelPlan(dp=2, zero_stage=1, offload="optimizer"),
    "pp2": mw.ParallelPlan(pp=2),
}


def make(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "head" not in n]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    return torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-2)


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    # 1e-10 in float64: only the order of the sums of gradients differs.
    assert max(relative_difference(actual[name], weight) for name, weight in expected.items()) < 1e-10


def by_hand(plan: mw.ParallelPlan | None) -> dict[str, torch.Tensor]:
    """Weights after steps of both, of the first alone, and of the second alone twice."""
    with Float64():
        torch.manual_seed(0)
        model: Any = build("qwen3").double()
        muon, adamw = make(model)
        scheduler = torch.optim.lr_scheduler.StepLR(adamw, 1, 0.5)
        if plan is not None:
            model, _, _ = mw.to_distributed(model, mw.ChainedOptimizer(muon, adamw), plan=plan)
        late = torch.optim.lr_scheduler.StepLR(muon, 2, 0.5)
        for step, stepped in enumerate([(muon, adamw), (muon,), (adamw,), (adamw, muon)]):
            ids = tokens(4, 12, seed=step)
            batch = {"input_ids": ids, "labels": labels_for(ids)}
            if plan is not None and plan.dp > 1:
                batch = {name: x.chunk(plan.dp)[dist.get_rank()] for name, x in batch.items()}
            model(**batch).loss.backward()
            mw.clip_grad_norm_(model, 0.5)
            for optimizer in stepped:
                optimizer.step()
            for optimizer in stepped:  # the gradients of others add up
                optimizer.zero_grad()
            scheduler.step()
            late.step()
        return mw.full_state_dict(model)


@pytest.mark.parametrize("plan", crossings(PLANS, but=["dp2 zero1"]))
def test_each_may_step_alone(plan: str, pool2: Any) -> None:
    assert_equal(pool2.run(by_hand, PLANS[plan])[0], by_hand(None))


def accelerated(
    plan: mw.ParallelPlan | None, folder: str | None = None, *, resumes: bool = False
) -> dict[str, torch.Tensor]:
    """Weights after four steps, of which a run that resumes makes the last two; others save after two."""
    with Float64(), fresh_accelerate():
        torch.manual_seed(0)
        model: Any = build("qwen3").double()
        muon, adamw = make(model)
        loader: Any = DataLoader(Rows(16), batch_size=4 if plan is None else 4 // plan.dp)
        accelerator = Accelerator(cpu=True)
        if plan is not None:
            objects = model, muon, adamw, loader
            model, muon, adamw, loader = meshwright_hf.accelerate.prepare(accelerator, *objects, plan=plan)
        if resumes:
            accelerator.load_state(folder)
        for index, batch in enumerate(loader):
            accelerator.backward(model(**batch).loss)
            mw.clip_grad_norm_(model, 0.5)
            muon.step()
            adamw.step()
            muon.zero_grad()
            adamw.zero_grad()
            if folder is not None and index == 1 and not resumes:
                accelerator.save_state(folder)
        return mw.full_state_dict(model)


@pytest.mark.parametrize(
    ("before", "after"), crossings([("dp2 zero1", "tp2+sp"), ("tp2+sp", "dp2 zero3")], but=[("dp2 zero1", "tp2+sp")])
)
def test_accelerate_prepares_saves_and_resumes_several(before: str, after: str, pool2: Any, tmp_path: Path) -> None:
    expected = accelerated(None)
    assert_equal(pool2.run(accelerated, PLANS[before], str(tmp_path / "state"))[0], expected)
    assert_equal(pool2.run(accelerated, PLANS[after], str(tmp_path / "state"), resumes=True)[0], expected)


def in_trainer(plan: mw.ParallelPlan | None, folder: str, *, resume: str | None = None) -> dict[str, torch.Tensor]:
    with Float64(), fresh_accelerate():
        torch.manual_seed(0)
        model: Any = build("qwen3").double()
        optimizer = mw.ChainedOptimizer(*make(model))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        given = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
        own = arguments(folder, 1 if plan is None else plan.dp, **given)
        options: dict[str, Any] = {} if plan is None else {"meshwright": mw.ToDistributedConfig(plan=plan)}
        trainer = (Trainer if plan is None else meshwright_hf.MeshwrightTrainer)(
            model, own, train_dataset=Rows(32), optimizers=(optimizer, scheduler), **options
        )
        trainer.train(resume_from_checkpoint=resume)
        return mw.full_state_dict(trainer.model)


def test_the_trainer_steps_saves_and_resumes_a_chain(pool2: Any, tmp_path: Path) -> None:
    expected = in_trainer(None, str(tmp_path / "one"))
    assert_equal(pool2.run(in_trainer, PLANS["dp2 zero1"], str(tmp_path / "run"), timeout=200)[0], expected)
    checkpoint = str(tmp_path / "run" / "checkpoint-2")
    resumed = pool2.run(in_trainer, PLANS["tp2+sp"], str(tmp_path / "again"), resume=checkpoint, timeout=200)
    assert_equal(resumed[0], expected)


def test_a_chain_refuses_the_state_of_a_part_and_another_chain() -> None:
    muon, adamw = make(build("qwen3"))
    chain = mw.ChainedOptimizer(muon, adamw)
    with pytest.raises(mw.UnreadableTensorError, match="save_optimizer"):
        adamw.state_dict()
    with pytest.raises(mw.UnreadableTensorError, match="of the chain"):
        muon.load_state_dict(chain.state_dict())
    with pytest.raises(ValueError, match="part of another"):
        mw.ChainedOptimizer(chain)


def test_a_copy_of_a_chain_steps_a_copy_of_its_model() -> None:
    model = build("qwen3")
    chain = mw.ChainedOptimizer(*make(model))
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    chain.step()
    other, copied = copy.deepcopy((model, chain))
    for parameter, own in zip(other.parameters(), model.parameters(), strict=True):
        parameter.grad = own.grad
    copied.optimizers[1].step()
    chain.optimizers[1].step()
    assert not any(id(p) in set(map(id, model.parameters())) for g in copied.param_groups for p in g["params"])
    assert_equal(dict(other.named_parameters()), dict(model.named_parameters()))
    assert copied.optimizers[0].state is copied.state and copied.state is not chain.state
    for part in copied.optimizers:
        with pytest.raises(mw.UnreadableTensorError, match="of the chain"):
            part.state_dict()


def test_a_refused_prepare_leaves_the_optimizers_as_they_were() -> None:
    with fresh_accelerate():
        model = build("qwen3")
        parts = make(model)
        before = [(part.param_groups, part.state, part.state_dict()) for part in parts]
        for plan, config in [("dp1 tp2", None), ("zero1", mw.ToDistributedConfig(logging_dir="runs"))]:
            with pytest.raises(mw.PlanError):
                meshwright_hf.accelerate.prepare(Accelerator(cpu=True), model, *parts, plan=plan, config=config)
            for part, (groups, state, saved) in zip(parts, before, strict=True):
                assert part.param_groups is groups and part.state is state and part.state_dict() == saved
        prepared = meshwright_hf.accelerate.prepare(Accelerator(cpu=True), model, *parts, plan="zero1")
        assert prepared[0] is model


def different_parts(plan: str, then: str) -> None:
    """Step another part of a chain on each rank. ZeRO 3 and tp send nothing in steps that read elements alone."""
    model = build("qwen3")
    parts = make(model)
    if plan != "dp2 zero1":
        parts = torch.optim.SGD(parts[0].param_groups, lr=0.1), parts[1]
    model, _, _ = mw.to_distributed(model, mw.ChainedOptimizer(*parts), plan=plan)
    model(input_ids=tokens(2, 12), labels=labels_for(tokens(2, 12))).loss.backward()
    parts[dist.get_rank()].step()
    if then == "the next pass":
        model(input_ids=tokens(2, 12), labels=labels_for(tokens(2, 12)))
    else:
        mw.full_state_dict(model)


@pytest.mark.parametrize(
    ("plan", "then", "words"),
    [
        ("dp2 zero1", "", ("Muon alone", "AdamW alone")),
        ("dp2 zero3", "the next pass", ("step() of SGD, number 1 of the chain", "called 0 times", "called 1 times")),
        ("tp2", "the next pass", ("step() of SGD, number 1 of the chain", "called 0 times", "called 1 times")),
        ("tp2", "the end", ("optimizer steps",)),
    ],
)
def test_ranks_that_step_different_parts_are_an_error(plan: str, then: str, words: tuple[str, ...], pool2: Any) -> None:
    for kind, message in pool2.run_expecting_error(different_parts, plan, then):
        assert kind == "DivergenceError" and all(word in message for word in words), message
