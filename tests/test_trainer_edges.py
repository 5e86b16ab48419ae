"""Odd uses of a Trainer: too few rows for the ranks, no labels, training twice, an optimizer of the user's.

Tolerance 1e-5: see test_trainer.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Trainer

import meshwright as mw
from support.models import build
from support.trainers import Rows, arguments, fresh_accelerate


def use_oddly(output_dir: Path, plan: dict[str, Any] | None) -> dict[str, Any]:
    """What each use gives, by name."""
    found: dict[str, Any] = {}
    calls: list[tuple[int, bool]] = []

    def batch_metrics(predictions: Any, compute_result: bool) -> dict[str, float]:
        calls.append((len(predictions.predictions), compute_result))
        return {"rows": sum(rows for rows, _ in calls)} if compute_result else {}

    def trainer_for(model: torch.nn.Module, **given: Any) -> Trainer:
        if plan is None:
            return Trainer(model, args, **given)
        from meshwright_hf.trainer import MeshwrightTrainer

        return MeshwrightTrainer(model, args, **given, meshwright=mw.ParallelPlan(**plan))

    def last_loss(trainer: Trainer) -> float:
        return trainer.state.log_history[-1]["train_loss"]

    with fresh_accelerate():
        args = arguments(output_dir, (plan or {}).get("dp", 1), max_steps=2)
        trainer = trainer_for(build("llama"), train_dataset=Rows(5), eval_dataset=Rows(1))
        found["loss of one row"] = trainer.evaluate()["eval_loss"]
        for rows in (1, 3):
            found[f"{rows} rows without labels"] = trainer.predict(Rows(rows, has_labels=False)).predictions
        found["two datasets"] = trainer.evaluate({"a": Rows(3), "b": Rows(6)})["eval_b_loss"]
        trainer.train()
        found["trained"] = last_loss(trainer)
        trainer.train()
        found["trained again"] = last_loss(trainer)

        args.max_steps, args.num_train_epochs = -1, 2
        model = build("llama")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=10)
        trainer = trainer_for(model, train_dataset=Rows(11), optimizers=(optimizer, scheduler))
        trainer.train()
        found["the user's optimizer"], found["steps of two epochs"] = last_loss(trainer), trainer.state.global_step

        args.batch_eval_metrics, args.label_smoothing_factor = True, 0.1
        trainer = trainer_for(build("llama"), eval_dataset=Rows(7), compute_metrics=batch_metrics)
        metrics = trainer.evaluate()
        found["smoothed loss"], found["rows"], found["calls"] = metrics["eval_loss"], metrics["eval_rows"], calls
    return found


@pytest.mark.parametrize("plan", [{"tp": 2}, {"dp": 2}], ids=str)
def test_odd_uses_equal_one_process(plan: dict[str, Any], pool2: Any, tmp_path: Path) -> None:
    found = pool2.run(use_oddly, tmp_path / "planned", plan, timeout=280)[0]
    expected = use_oddly(tmp_path / "one", None)
    assert expected["calls"] == [(4, False), (3, True)]  # so does accelerate tell the last batch
    for name, value in expected.items():
        if isinstance(value, np.ndarray):
            assert found[name].shape == value.shape and np.allclose(found[name], value, rtol=0, atol=1e-5), name
        elif isinstance(value, float):
            assert found[name] == pytest.approx(value, rel=1e-5), name
        else:
            assert found[name] == value, name


def train_what_is_distributed(output_dir: Path) -> float:
    """A model that the user has distributed before."""
    from meshwright_hf.trainer import MeshwrightTrainer

    with fresh_accelerate():
        args = arguments(output_dir, 2, max_steps=2)
        config = mw.ToDistributedConfig(plan=mw.ParallelPlan(dp=2))
        model, _, _ = mw.to_distributed(build("llama"), config=config)
        trainer = MeshwrightTrainer(model, args, train_dataset=Rows(5))
        trainer.train()
        return trainer.state.log_history[-1]["train_loss"]


def test_a_model_that_is_distributed_already_trains_by_its_plan(pool2: Any, tmp_path: Path) -> None:
    with fresh_accelerate():
        trainer = Trainer(build("llama"), arguments(tmp_path, max_steps=2), train_dataset=Rows(5))
        trainer.train()
    expected = trainer.state.log_history[-1]["train_loss"]
    assert pool2.run(train_what_is_distributed, tmp_path, timeout=200)[0] == pytest.approx(expected, rel=1e-5)
