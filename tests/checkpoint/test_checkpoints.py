"""``save_checkpoint`` and ``load_checkpoint``: whole under every pair of plans, and exact to the bit."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from test_optimizer_state import Training
from torch import Tensor

import meshwright as mw
from meshwright.checkpoint.format.load_checkpoint import loaded_line
from meshwright.checkpoint.format.load_weights import OpenCheckpoint
from meshwright.errors import CheckpointError
from meshwright.layout.tensor_layout import TensorLayout
from support import anatomies
from support.exact import Float64
from support.tiers import crossings

PLANS: dict[str, dict[str, Any]] = {
    "one": {},
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "tp2+sp": {"tp": 2, "sequence_parallel": True},
    "tp4": {"tp": 4},
    "dp2+zero1": {"dp": 2, "zero_stage": 1},
    "dp3+zero2": {"dp": 4, "zero_stage": 2},
    "dp4+zero3": {"dp": 4, "zero_stage": 3},
    "tp2xdp2+zero1": {"dp": 2, "tp": 2, "zero_stage": 1},
    "pp2": {"pp": 2, "gradient_accumulation_steps": 2},
    "pp2xdp2+zero1": {"pp": 2, "dp": 2, "zero_stage": 1, "schedule": "zb-h1"},
    "pp2xtp2+sp": {"pp": 2, "tp": 2, "sequence_parallel": True, "micro_batch_size": 1},
    "tp2+spxdp2+zero3": {"dp": 2, "tp": 2, "sequence_parallel": True, "zero_stage": 3},
}


def size(plan: dict[str, Any]) -> int:
    return mw.ParallelPlan(**plan).world_size


def on(plan: dict[str, Any], pools: dict[int, Any], function: Any, *args: Any) -> Any:
    """Rank 0's result under a plan; one process without a launcher for the empty one."""
    return pools[size(plan)].run(function, plan, *args)[0] if plan else function(plan, *args)


@pytest.fixture(scope="module")
def pools(pool2: Any, pool4: Any) -> dict[int, Any]:
    return {2: pool2, 4: pool4}


@dataclass(frozen=True)
class Saved:
    """A checkpoint of three steps under a plan, what it holds, and the weights that were saved."""

    folder: Path
    held: dict[str, Tensor]
    weights: dict[str, Tensor]


@pytest.fixture(scope="module")
def saved(pools: dict[int, Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """Trains and saves under a plan once, for all the plans that load it."""

    @functools.cache
    def save(source: str) -> Saved:
        folder = tmp_path_factory.mktemp("saved") / "a"
        weights = on(PLANS[source], pools, train_and_save, folder)
        return Saved(folder, contents(folder), weights)

    return save


def contents(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole."""
    opened = OpenCheckpoint.read(folder)
    found = {}
    for key, (dtype, shape) in opened.manifest.tensors.items():
        found[key] = opened.read_tensor(key, dtype, TensorLayout(shape=torch.Size(shape)), lambda _: None)
    return found


def train_and_save(plan: dict[str, Any], folder: Path) -> dict[str, Tensor]:
    with Float64():
        training = Training(plan)
        training.run(0, 3)
        mw.save_checkpoint(folder, training.model, training.optimizer, step=3, extra={"a": [1, None]})
        return mw.full_state_dict(training.model)


def load_and_save(plan: dict[str, Any], before: Path, after: Path) -> Any:
    with Float64():
        training = Training(plan, seed=1, lr=1.0)
        loaded = mw.load_checkpoint(before, training.model, training.optimizer)
        mw.save_checkpoint(after, training.model, training.optimizer, step=3)
    return loaded


@pytest.mark.parametrize(
    ("source", "target"),
    crossings(
        itertools.product(PLANS, PLANS),
        but=[
            ("one", "tp2xdp2+zero1"),
            ("tp2xdp2+zero1", "one"),
            ("tp2+spxdp2+zero3", "tp4"),
            ("tp4", "dp4+zero3"),
            ("pp2xtp2+sp", "dp4+zero3"),
            ("dp4+zero3", "pp2xdp2+zero1"),
        ],
        one_in=2,
    ),
)
def test_every_pair_of_plans(
    source: str, target: str, saved: Callable[[str], Saved], pools: dict[int, Any], tmp_path: Path
) -> None:
    before = saved(source)
    loaded = on(PLANS[target], pools, load_and_save, before.folder, tmp_path / "b")
    assert (loaded.step, loaded.extra) == (3, {"a": [1, None]})
    after = contents(tmp_path / "b")
    assert before.held.keys() == after.keys() and len(after) > 60
    assert all(torch.equal(before.held[key], after[key]) for key in after)
    kept = {key.removeprefix("weights/"): value for key, value in before.held.items() if key.startswith("weights/")}
    assert all(torch.equal(before.weights[key], value) for key, value in kept.items())
    assert len(list(before.folder.glob("*.safetensors"))) == size(PLANS[source])


def train_experts(plan: dict[str, Any], before: Path | None, after: Path) -> None:
    """Load a model with experts, or train it, and save it."""
    with Float64():
        model: Any = anatomies.build("mixtral")
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        batches = anatomies.loader("mixtral")
        if plan:
            model, optimizer, batches = mw.to_distributed(model, optimizer, batches, plan=mw.ParallelPlan(**plan))
        if before is not None:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            mw.load_checkpoint(before, model, optimizer)
        for batch in () if before else batches:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        mw.save_checkpoint(after, model, optimizer, step=3)


def test_experts_go_from_any_ep_to_any_other(pools: dict[int, Any], tmp_path: Path) -> None:
    plans: list[dict[str, Any]] = [
        {"dp": 4, "ep": 2},
        {"dp": 2, "ep": 2},
        {"tp": 2, "sequence_parallel": True, "ep": 2},
        {"dp": 4, "ep": 2, "zero_stage": 3},
        {"dp": 2, "zero_stage": 3},
        {"pp": 2, "dp": 2, "ep": 2, "zero_stage": 1},
        {},
        {"cp": 2, "dp": 2, "ep": 2, "zero_stage": 2},
        {"dp": 2, "tp": 2, "sequence_parallel": True, "ep": 4},
        {"tp": 4, "sequence_parallel": True, "ep": 2, "zero_stage": 1},
        {"dp": 4, "ep": 2, "etp": 2},
        {"dp": 4, "etp": 2, "zero_stage": 3},
        {"dp": 4, "ep": 4},
    ]
    folders = [tmp_path / str(index) for index in range(len(plans))]
    for plan, before, after in zip(plans, [None, *folders], folders, strict=False):
        on(plan, pools, train_experts, before, after)
    first, *others = map(contents, folders)
    experts = "weights/model.layers.0.mlp.experts.gate_up_proj"
    assert first[experts].shape[0] == 4 and all(expert.norm() > 0 for expert in first[experts])
    assert sum(key.endswith("exp_avg_sq") for key in first) > 20
    for other in others:
        assert first.keys() == other.keys() and all(torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize(
    ("step", "plan", "line"),
    [
        (20, {"dp": 2, "tp": 2, "sequence_parallel": True, "zero_stage": 1}, ", step 20, saved under dp2 tp2+sp zero1"),
        (0, None, ", step 0"),
        (None, {"tp": 2}, ", saved under dp1 tp2 zero0"),
        (None, {"dp": "2"}, ""),  # damaged, or of another version: the line is no reason to fail
        (None, {"unknown": 1}, ""),
    ],
)
def test_the_line_of_a_checkpoint(step: int | None, plan: dict[str, Any] | None, line: str) -> None:
    for folder in ("runs/a", str(Path("runs/a").absolute())):
        assert loaded_line(folder, step=step, plan=plan) == f"meshwright: loaded runs/a{line}"


def test_a_vector_with_gaps_in_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.arange(10.0)[::2])
    mw.save_checkpoint(tmp_path / "a", model, None)
    model.weight.data.zero_()
    mw.load_checkpoint(tmp_path / "a", model, None)
    assert f"meshwright: loaded {tmp_path / 'a'}\n" in capsys.readouterr().err
    assert model.weight.tolist() == [0, 2, 4, 6, 8]


def test_a_model_that_deepspeed_has_partitioned_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    model.weight.ds_id = 0  # ZeRO-3's mark; the weight itself is then empty
    optimizer = torch.optim.SGD(model.parameters())
    for call in (
        lambda: mw.save_checkpoint(tmp_path / "a", model, optimizer),
        lambda: mw.load_checkpoint(tmp_path, model, optimizer, missing_ok=True),
        lambda: mw.save_optimizer(model, optimizer, tmp_path / "b"),
    ):
        with pytest.raises(CheckpointError, match=r"engine\.save_checkpoint"):
            call()
    assert not list(tmp_path.iterdir())
