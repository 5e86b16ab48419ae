"""Odd uses of a Trainer: too few rows for the ranks, no labels, training twice, an optimizer of the user's.

Tolerance 1e-5: see test_trainer.py.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, default_data_collator

import meshwright as mw
import meshwright_hf
from meshwright.optim.owners import unwrapped
from meshwright.plan.parts import flat_offsets
from support.models import build
from support.tiers import crossing
from support.trainers import Rows, Run, arguments, fresh_accelerate, run_trainer


def twice(rows: list[Any]) -> dict[str, torch.Tensor]:
    """A collate function that makes two rows of each sample."""
    batch = {name: x.repeat_interleave(2, dim=0) for name, x in default_data_collator(rows).items()}
    return {name: torch.stack([x[::2], x[1::2].flip(1)], dim=1).flatten(0, 1) for name, x in batch.items()}


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
        found["two rows of each sample"] = trainer_for(build("llama"), data_collator=twice).predict(Rows(8)).predictions
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

        args.max_steps = 2
        trainer = trainer_for(build("llama"), train_dataset=Rows(8), eval_dataset=Rows(7))
        args.learning_rate, args.weight_decay, args.adam_beta1 = 0.05, 0.3, 0.5  # stock makes the optimizer in train()
        trainer.train()
        found["arguments set after the Trainer was made"] = trainer.evaluate()["eval_loss"]
        args.eval_use_gather_object = True
        found["labels gathered as objects"] = trainer_for(build("llama")).predict(Rows(7)).label_ids
        args.eval_use_gather_object = False

        args.batch_eval_metrics, args.label_smoothing_factor = True, 0.1
        trainer = trainer_for(build("llama"), eval_dataset=Rows(7), compute_metrics=batch_metrics)
        metrics = trainer.evaluate()
        found["smoothed loss"], found["rows"], found["calls"] = metrics["eval_loss"], metrics["eval_rows"], calls
    return found


@pytest.mark.parametrize("plan", [crossing({"tp": 2}), {"dp": 2}, {"pp": 2, "micro_batch_size": 1}], ids=str)
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


def train_what_is_distributed(output_dir: Path, plan: dict[str, Any], *, is_loaded: bool) -> Any:
    """A model that the user has distributed before, alone or with its optimizer, or as it was loaded."""
    chosen = mw.ParallelPlan(**plan)
    with fresh_accelerate():
        args, optimizer = arguments(output_dir / "run", 2, max_steps=4), None
        if is_loaded:
            meshwright_hf.register()
            model = AutoModelForCausalLM.from_pretrained(output_dir / "model", distributed_config=chosen)
            meshwright_hf.unregister()
        else:
            model = build("llama")
            optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay)
            model, optimizer, _ = mw.to_distributed(model, optimizer, config=mw.ToDistributedConfig(plan=chosen))
            with pytest.raises(mw.PlanError, match=r"optimizers=\(optimizer, None\)"):
                meshwright_hf.MeshwrightTrainer(model, args, train_dataset=Rows(37))
        with pytest.raises(mw.PlanError, match=r"ParallelPlan.dp=1, but the model was distributed with dp=2"):
            other = mw.ParallelPlan(dp=1, tp=2)
            meshwright_hf.MeshwrightTrainer(
                model, args, train_dataset=Rows(37), optimizers=(optimizer, None), meshwright=other
            )
        trainer = meshwright_hf.MeshwrightTrainer(model, args, train_dataset=Rows(37), optimizers=(optimizer, None))
        trainer.train()
        state = sum(x.numel() for own in dict.values(unwrapped(trainer.optimizer).state) for x in own.values())
        logs = [log for log in trainer.state.log_history if "loss" in log]
        return [log["loss"] for log in logs], [log["grad_norm"] for log in logs], state


@pytest.mark.parametrize(
    ("zero_stage", "is_loaded"), [crossing(1, True), (1, False), (3, True), crossing(3, False)],
    ids=["1-as it was loaded", "1-with its optimizer", "3-as it was loaded", "3-with its optimizer"],
)  # fmt: skip
def test_a_model_that_is_distributed_already_trains_by_its_plan(
    zero_stage: int, is_loaded: bool, pool2: Any, tmp_path: Path
) -> None:
    model = build("llama")
    model.save_pretrained(tmp_path / "model")
    count = sum(p.numel() for p in model.parameters())
    with fresh_accelerate():
        args = arguments(tmp_path / "stock", max_steps=4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay)
        # The Trainer's own decays no norms and biases.
        trainer = Trainer(model, args, train_dataset=Rows(37), optimizers=(None if is_loaded else optimizer, None))
        trainer.train()
    expected = [log for log in trainer.state.log_history if "loss" in log]
    plan = {"dp": 2, "zero_stage": zero_stage}
    ranks = pool2.run(train_what_is_distributed, tmp_path, plan, is_loaded=is_loaded, timeout=200)
    losses, norms, _ = ranks[0]
    # float32: sums in another order. Gradients that are not averaged over dp, or a rank's own, have other norms.
    assert losses == pytest.approx([log["loss"] for log in expected], rel=1e-5)
    assert norms == pytest.approx([log["grad_norm"] for log in expected], rel=1e-4)
    # Two moments of half of the parameters, padding and step counters aside; unsharded it would be twice as many. One
    # half may have most of the padding.
    padding = flat_offsets(p.numel() for p in model.parameters())[-1] - count
    assert padding < 0.05 * count
    assert all(count - padding <= state < 1.1 * count for _, _, state in ranks)


def hidden_at_random(rows: list[Any]) -> dict[str, torch.Tensor]:
    """A collate function that draws which labels count, from each library's own state."""
    batch = default_data_collator(rows)
    drawn = torch.rand(batch["labels"].shape) + float(np.random.rand()) * random.random()
    return {**batch, "labels": batch["labels"].where(drawn > 0.5, -100)}


def draw_evaluate_and_resume(output_dir: Path, plan: dict[str, Any] | None, *, stream: bool) -> list[Run]:
    """Six steps, with an evaluation in mid-epoch and a checkpoint, and the last three again (not of a stream)."""
    options: dict[str, Any] = {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 3, "stream": stream}
    options["extra"] = {"data_collator": hidden_at_random, "eval_dataset": Rows(7)}
    runs = [run_trainer(output_dir, plan, save_strategy="steps", save_steps=3, **options)]
    if not stream:
        runs.append(run_trainer(output_dir, plan, resume=str(output_dir / "checkpoint-3"), **options))
    return runs


@pytest.mark.parametrize(
    ("plan", "stream"), [({"dp": 2}, False), ({"dp": 2}, True), crossing({"tp": 2}, False)], ids=str
)
def test_random_draws_around_the_middle_of_an_epoch(
    plan: dict[str, Any], stream: bool, pool2: Any, tmp_path: Path
) -> None:
    """Other draws change the losses by more than 1e-1. Those of a resumed run are not those of the whole one."""
    expected = draw_evaluate_and_resume(tmp_path / "stock", None, stream=stream)
    found = pool2.run(draw_evaluate_and_resume, tmp_path / "plan", plan, stream=stream, timeout=200)[0]
    for run, stock in zip(found, expected, strict=True):
        assert len(run.losses) == 6 and len(run.evaluations) == 2
        np.testing.assert_allclose(
            [*run.losses, *run.norms, *run.evaluations], [*stock.losses, *stock.norms, *stock.evaluations], rtol=1e-5
        )
