"""MeshwrightCallback in a stock Trainer, and in ours."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import Trainer

import meshwright as mw
from meshwright_hf.callback import MeshwrightCallback
from meshwright_hf.replicas import check_replicas
from meshwright_hf.trainer import MeshwrightTrainer
from support.models import build
from support.trainers import LENGTH, Rows, arguments, fresh_accelerate


class Heard(logging.Handler):
    """What the callback logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("meshwright_hf.callback").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def watch(output_dir: Path, plan: dict[str, Any] | None) -> tuple[list[str], list[dict[str, float]]]:
    heard = Heard()
    with fresh_accelerate():
        args = arguments(output_dir, max_steps=2, gradient_accumulation_steps=1)
        given: dict[str, Any] = {"train_dataset": Rows(32), "callbacks": [MeshwrightCallback(check_every=1)]}
        if plan is None:
            trainer = Trainer(build("llama"), args, **given)
        else:
            trainer = MeshwrightTrainer(build("llama"), args, **given, meshwright=mw.ParallelPlan(**plan))
        trainer.train()
    logging.getLogger("meshwright_hf.callback").removeHandler(heard)
    return heard.lines, [entry for entry in trainer.state.log_history if "loss" in entry]


def test_in_a_stock_trainer_it_says_what_it_cannot_do_and_watches(pool2: Any, tmp_path: Path) -> None:
    (lines, logs), (silent, _) = pool2.run(watch, tmp_path, None, timeout=200)
    assert "cannot shard" in lines[0] and "+ trainer = meshwright_hf.trainer.MeshwrightTrainer(...)" in lines[0]
    assert "picked" in lines[1] and "tokens/s in all" in lines[1]
    assert silent == []  # one rank speaks
    for entry in logs:
        assert entry["tokens_per_second"] > 0 and entry["peak_memory_gib"] > 0
        assert "mfu" not in entry  # nobody knows what this CPU could do


def test_in_ours_it_has_nothing_to_complain_of(pool2: Any, tmp_path: Path) -> None:
    (lines, logs), _ = pool2.run(watch, tmp_path, {"tp": 2}, timeout=200)
    assert "slowest_rank" in logs[-1]  # the trainer's own figures, which need no collective
    assert len(lines) == 1 and "in use: ParallelPlan(dp=1, tp=2" in lines[0]
    assert all(entry["tokens_per_second"] > 0 for entry in logs)


def test_rows_that_two_ranks_share_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    callback, model = MeshwrightCallback(), build("llama")
    monkeypatch.setattr(callback, "_peak", 1e9)
    monkeypatch.setattr(callback, "_flops", lambda length: 6e3 * length)
    callback._count_tokens_of(type("Args", (), {"torch_compile": False}), model)
    model(input_ids=torch.ones(4, LENGTH, dtype=torch.int64))
    with torch.no_grad():
        model(input_ids=torch.ones(4, LENGTH, dtype=torch.int64))  # not training
    found = callback._telemetry(model, elapsed=2.0)
    assert found["tokens_per_second"] == 4 * LENGTH / 2
    assert found["mfu"] == pytest.approx(4 * LENGTH / 2 * 6e3 * LENGTH / 1e9, abs=1e-4)


def drift(plan: dict[str, Any] | None, name: str) -> None:
    """Rank 1 changes one element of one weight, by a millionth."""
    model = build("llama")
    if plan is None:
        model = model.double()
    else:
        mw.to_distributed(model, config=mw.ToDistributedConfig(plan=mw.ParallelPlan(**plan)))
    check_replicas(model, step=3)
    if dist.get_rank() == 1:
        model.get_parameter(name).data.view(-1)[-1] += 1e-5
    check_replicas(model, step=4)


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        (None, "lm_head.weight"),
        ({"dp": 2}, "model.embed_tokens.weight"),
        ({"tp": 2}, "model.norm.weight"),
        ({"pp": 2, "dp": 2}, "model.embed_tokens.weight"),
    ],
    ids=str,
)
def test_a_weight_that_drifts_is_named(plan: dict[str, Any] | None, name: str, request: pytest.FixtureRequest) -> None:
    pool = request.getfixturevalue("pool2" if plan is None else f"pool{mw.ParallelPlan(**plan).world_size}")
    for kind, message in pool.run_expecting_error(drift, plan, name):
        assert kind == "DivergenceError" and f"step 4: rank(s) 1 have other values of {name} than rank 0" in message


def test_a_wrong_interval_is_refused() -> None:
    with pytest.raises(ValueError, match="check_every=-1"):
        MeshwrightCallback(check_every=-1)
