"""Scripts of transformers and accelerate that count processes, under plans whose processes share batches.

Tolerance 1e-10 relative in float64, where only the order of sums differs; see test_accelerate.py.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import os
from typing import Any
from unittest import mock

import accelerate
import pytest
import torch
from accelerate.local_sgd import LocalSGD
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import meshwright as mw
import meshwright_hf.accelerate
from meshwright.choose.given_plan import plan_line
from meshwright.errors import PlanError
from meshwright_hf.accelerate import activate, deactivate
from support.accelerated import dataset, forget
from support.exact import Float64
from support.models import build
from support.parity import pool_for
from support.recipes import Curve, accumulation_for_causal_lms, clm_no_trainer
from support.reference import make_optimizer
from support.tiers import crossing, crossings, quick

TP2, DP2_ZERO1 = {"tp": 2}, {"dp": 2, "zero_stage": 1}
SP_DP_ZERO = {"dp": 2, "tp": 2, "sequence_parallel": True, "zero_stage": 1}
PP_DP = {"pp": 2, "dp": 2, "micro_batch_size": 1}
HOWS = {"activate": TP2, "class": SP_DP_ZERO, "launched": DP2_ZERO1}
TOLERANCE = 1e-10
SCRIPTS = {"no_trainer": clm_no_trainer, "accumulation": accumulation_for_causal_lms}


def config(plan: dict[str, Any]) -> mw.ToDistributedConfig:
    return mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan))


def run(script: str, plan: dict[str, Any] | None, how: str = "", dp: int = 1, **options: Any) -> Curve:
    """Run a script, stock in one process, or by one of the ways to give it a plan."""
    forget()
    made = {"cpu": True, "gradient_accumulation_steps": 2}
    body = functools.partial(SCRIPTS[script], dp=dp, **options)
    variables = {"MESHWRIGHT_PLAN": plan_line(plan)} if plan and how == "launched" else {}
    try:
        with Float64(), mock.patch.dict(os.environ, variables):
            if how in ("class", "launched"):
                given = {"plan": mw.ParallelPlan(**plan)} if plan and how == "class" else {}
                accelerator: Any = meshwright_hf.accelerate.Accelerator(**made, **given)
                return body(accelerator, accelerator.prepare)
            if how == "activate":
                assert plan is not None
                activate(config(plan))
            kind = meshwright_hf.accelerate.Accelerator if how.startswith("class") else accelerate.Accelerator
            accelerator = kind(**made)
            if how.endswith("prepare"):
                assert plan is not None
                by_plan = functools.partial(meshwright_hf.accelerate.prepare, accelerator, config=config(plan))
                return body(accelerator, by_plan)
            return body(accelerator, accelerator.prepare)
    finally:
        deactivate()
        forget()


@functools.cache
def reference(script: str, **options: Any) -> Curve:
    return run(script, None, **options)


@pytest.mark.parametrize(
    ("max_train_steps", "how"),
    crossings(itertools.product([5, None], HOWS), but=[(5, "activate"), (None, "launched")]),
)
def test_a_stock_schedule_ends_where_it_should(
    max_train_steps: int | None, how: str, request: pytest.FixtureRequest
) -> None:
    """Row 35: the learning rate falls to 0 with the last step, whether lengths are times num_processes or not."""
    plan = HOWS[how]
    dp = plan.get("dp", 1)
    expected = reference("no_trainer", max_train_steps=max_train_steps)
    assert expected.rates[-1] == 0 < expected.rates[-2], "the schedule has an end to miss"
    for rank in pool_for(plan, request).run(
        run, "no_trainer", plan, how, dp, max_train_steps=max_train_steps, timeout=120
    ):
        assert rank.difference(expected) <= TOLERANCE


@pytest.mark.parametrize(("before", "after"), [crossing(DP2_ZERO1, TP2), (TP2, DP2_ZERO1)], ids=["to tp2", "to dp2"])
def test_a_stock_schedule_goes_on_under_another_dp(
    before: dict[str, Any], after: dict[str, Any], pool2: Any, tmp_path: Any
) -> None:
    """The global batch stays, so that a rank's batch, by which the schedule counts, has other rows."""
    script = {"max_train_steps": 5, "state": str(tmp_path / "state"), "timeout": 120}
    pool2.run(run, "no_trainer", before, "class", before.get("dp", 1), save_after=3, **script)
    resumed = pool2.run(run, "no_trainer", after, "class", after.get("dp", 1), completed=3, **script)
    whole = reference("no_trainer", max_train_steps=5)
    rest = Curve(whole.losses[3:], whole.norms[3:], whole.rates[3:])
    assert len(set(rest.rates)) > 1, "a count of its own would show"
    for rank in resumed:
        assert rank.difference(rest) <= TOLERANCE


def test_a_schedule_of_another_number_is_refused(pool2: Any) -> None:
    """Row 35: the plan comes with prepare, and the script has read num_processes before."""
    errors = pool2.run_expecting_error(run, "no_trainer", TP2, "class, then prepare", 1, max_train_steps=5)
    for kind, message in errors:
        assert kind == "PlanError"
        assert "num_processes was read before prepare and was 2, but the plan has dp=1" in message
        assert "from meshwright_hf.accelerate import Accelerator" in message


def warnings_of(plan: dict[str, Any], how: str) -> list[str]:
    logger = logging.getLogger("meshwright_hf.accelerate.checks")
    with mock.patch.object(logger, "warning") as warning:
        run("no_trainer", plan, how, plan.get("dp", 1), max_train_steps=5)
    return [call.args[0] % call.args[1:] for call in warning.call_args_list]


@pytest.mark.parametrize(("plan", "how"), [(TP2, "prepare"), (DP2_ZERO1, "prepare"), (TP2, "class")])
def test_a_stock_accelerator_warns_of_a_schedule_of_another_number(plan: dict[str, Any], how: str, pool2: Any) -> None:
    """Row 35: accelerate's own class does not record who has read num_processes."""
    for said in pool2.run(warnings_of, plan, how, timeout=120):
        if plan is TP2 and how == "prepare":
            [text] = said
            assert "accelerator.num_processes is 2, but the plan has dp=1" in text
            assert "from meshwright_hf.accelerate import Accelerator" in text
        else:
            assert not said


@pytest.mark.parametrize(
    ("how", "plan"),
    [
        crossing("prepare", DP2_ZERO1),
        crossing("prepare", TP2),
        quick("class", SP_DP_ZERO),
        crossing("class", PP_DP),
    ],
    ids=["dp2", "tp2", "dp2xtp2", "pp2xdp2"],
)
def test_the_accumulation_recipe_counts_each_row_once(
    how: str, plan: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """Row 36: the count of the window over all processes, and the loss times their number."""
    expected = reference("accumulation")
    for rank in pool_for(plan, request).run(run, "accumulation", plan, how, plan.get("dp", 1), timeout=120):
        assert rank.difference(expected) <= TOLERANCE


def collectives(plan: dict[str, Any]) -> dict[str, Any]:
    forget()
    try:
        accelerator: Any = meshwright_hf.accelerate.Accelerator(cpu=True, plan=mw.ParallelPlan(**plan))
        before = accelerator.num_processes
        model = build("llama")
        model, loader = accelerator.prepare(model, DataLoader(dataset(8), batch_size=8 // before))
        ids = next(iter(loader))["input_ids"]
        with accelerator.split_between_processes(list(range(5))) as part, torch.no_grad():
            prompts = list(part)
        own = torch.tensor(float(len(ids)))
        return {
            "counts": (before, accelerator.num_processes, accelerator.state.num_processes),
            "rows": accelerator.gather(ids),
            "sum": accelerator.reduce(own).item(),
            "mean": accelerator.reduce({"x": own}, "mean")["x"].item(),
            "most": accelerator.reduce(own, "max").item(),
            "part": prompts,
            "is_last": accelerator.is_last_process,
        }
    finally:
        forget()


@pytest.mark.parametrize("plan", [TP2, {"dp": 2}, {"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}, {"cp": 2, "dp": 2}], ids=str)
def test_collectives_of_the_accelerator_are_over_the_data_parallel_ranks(
    plan: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """Row 36: ranks that share rows count once; before, gather under tp returned each row tp times."""
    dp, tp = plan.get("dp", 1), plan.get("tp", 1)
    ranks = pool_for(plan, request).run(collectives, plan)
    assert len(ranks) == math.prod(plan.values())
    rows = torch.stack([row["input_ids"] for row in dataset(8)])
    for index, found in enumerate(ranks):
        assert found["counts"] == (dp, dp, len(ranks))
        assert torch.equal(found["rows"], rows)
        assert (found["sum"], found["mean"], found["most"]) == (8, 8 / dp, 8 / dp)
        assert found["part"] == (
            [0, 1, 2, 3, 4] if dp == 1 else [[0, 1, 2], [3, 4]][index // (tp * plan.get("cp", 1)) % dp]
        )
        assert found["is_last"] == (index == len(ranks) - 1)


def average_now_and_then(plan: dict[str, Any]) -> None:
    """accelerate's local_sgd.py."""
    forget()
    try:
        accelerator = accelerate.Accelerator(cpu=True)
        model = build("llama")
        objects = (model, make_optimizer(model), DataLoader(dataset(8), batch_size=2))
        model, optimizer, loader = meshwright_hf.accelerate.prepare(accelerator, *objects, config=config(plan))
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2) as local_sgd:
            for batch in loader:
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
    finally:
        forget()


def test_local_sgd_is_refused_by_name(pool2: Any) -> None:
    for kind, message in pool2.run_expecting_error(average_now_and_then, {"dp": 2}):
        assert kind == "PlanError"
        assert "LocalSGD(..., enabled=False)" in message


def test_the_cause_of_an_accelerator_for_itself_is_a_partial_state(monkeypatch: pytest.MonkeyPatch) -> None:
    # As under `meshwright launch` on CPU, with a PartialState() before the Accelerator.
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    forget()
    accelerate.PartialState()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("WORLD_SIZE", "2")
    try:
        with pytest.raises(PlanError, match=r"has 1: a PartialState was made before.*PartialState\(cpu=True\) there"):
            meshwright_hf.accelerate.prepare(accelerate.Accelerator(), build("llama"), config=config({"dp": 2}))
    finally:
        forget()


def schedule_elsewhere(plan: dict[str, Any]) -> str:
    """A launch that picks no plan, and an Accelerator that was asked before one was."""
    forget()
    try:
        accelerator = meshwright_hf.accelerate.Accelerator(cpu=True)
        model = build("llama")
        optimizer = make_optimizer(model)
        scheduler = LambdaLR(optimizer, lambda step: 1 / accelerator.num_processes)
        accelerator._config = config(plan)  # as if the planner picked it
        accelerator.prepare(model, optimizer)
        try:
            accelerator.prepare(scheduler)
        except PlanError as error:
            return str(error)
        return ""
    finally:
        forget()


def test_a_schedule_that_is_prepared_later_is_refused_too(pool2: Any) -> None:
    assert all("was 2, but the plan has dp=1" in message for message in pool2.run(schedule_elsewhere, TP2))


def schedule_of_another_model() -> str:
    forget()
    activate(plan="tp2")
    try:
        accelerator = accelerate.Accelerator(cpu=True)
        model = torch.nn.Linear(2, 2)
        optimizer = make_optimizer(model)
        scheduler = LambdaLR(optimizer, lambda step: 1 / accelerator.num_processes)
        accelerator.prepare(model, optimizer, scheduler)
        return ""
    except PlanError as error:
        return str(error)
    finally:
        deactivate()
        forget()


def test_a_schedule_of_a_model_without_a_plan_is_refused(pool2: Any) -> None:
    assert all("accelerate steps its scheduler 2 times" in text for text in pool2.run(schedule_of_another_model))
