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
from meshwright_hf.callback import MeshwrightCallback, check_replicas
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


@pytest.mark.parametrize("plan", [{"tp": 2}, {"dp": 2, "zero_stage": 1}], ids=str)
def test_in_ours_it_has_nothing_to_complain_of(plan: dict[str, Any], pool2: Any, tmp_path: Path) -> None:
    """One rank asks the planner, so no question may run the forward of all ranks."""
    (lines, logs), _ = pool2.run(watch, tmp_path, plan, timeout=100)
    assert "slowest_rank" in logs[-1]  # the trainer's own figures, which need no collective
    assert len(lines) == 1 and f"in use: {mw.ParallelPlan(**plan)}" in lines[0] and "picked" in lines[0]
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


class Statistics(torch.nn.Module):
    """Writes a buffer in forward, as BatchNorm does, and has one that nothing writes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)
        self.scale = torch.nn.Linear(3, 3)
        self.scale.register_buffer("factor", torch.ones(3))

    def forward(self, x: Any) -> Any:
        return self.scale(self.norm(x)) * self.scale.factor


def drift(kind: dict[str, Any] | str, name: str) -> None:
    """Rank 1 changes one element of one tensor, by a little."""
    model: Any = Statistics() if isinstance(kind, str) else build("llama")
    if kind == "DataParallel":
        model = mw.DataParallel(model)
    elif kind == "DDP":
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        mw.to_distributed(model, config=mw.ToDistributedConfig(plan=mw.ParallelPlan(**kind)))
    if isinstance(kind, str):
        model(torch.randn(4, 3) + dist.get_rank()).sum().backward()  # each rank has its own statistics
        assert model.module.norm.running_mean.ne(0).any()
    check_replicas(model, step=3)
    if dist.get_rank() == 1:
        tensor = dict(model.named_parameters()).get(name, dict(model.named_buffers()).get(name))
        tensor.numpy(force=True).reshape(-1)[-1] += 1e-5  # as a faulty memory does, which torch does not see
    check_replicas(model, step=4)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("DDP", "module.scale.weight"),
        ("DataParallel", "scale.factor"),
        ({"dp": 2}, "model.embed_tokens.weight"),
        ({"tp": 2}, "model.norm.weight"),
        ({"dp": 2}, "model.rotary_emb.inv_freq"),
        ({"pp": 2, "dp": 2}, "model.embed_tokens.weight"),
    ],
    ids=str,
)
def test_a_tensor_that_drifts_is_named(kind: Any, name: str, request: pytest.FixtureRequest) -> None:
    size = 2 if isinstance(kind, str) else mw.ParallelPlan(**kind).world_size
    name_in_model = name.removeprefix("module.")
    for error, message in request.getfixturevalue(f"pool{size}").run_expecting_error(drift, kind, name):
        assert error == "DivergenceError" and name_in_model in message and "0" in message and "1" in message, message


def test_a_wrong_interval_is_refused() -> None:
    with pytest.raises(ValueError, match="check_every=-1"):
        MeshwrightCallback(check_every=-1)
