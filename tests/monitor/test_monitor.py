"""A run that shows itself: what rank 0 prints and logs, and what it costs."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshwright as mw
from meshwright.errors import PlanError
from meshwright.faults.guard import active_guard
from meshwright.faults.referee_server import Posted
from meshwright.monitor.monitor import monitor_of
from meshwright.monitor.records import read_records
from meshwright.optim.runtime import runtime_of
from meshwright.plan.config import ParallelPlan, ToDistributedConfig
from meshwright_plan.job.shapes import describe
from support import anatomies
from support.models import build

ROWS, LENGTH, STEPS = 4, 12, 12


def batch(step: int, plan: ParallelPlan) -> Any:
    """The rows of this rank, of a global batch of 4 rows."""
    ids = torch.randint(3, 97, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    rank = dist.get_rank() if dist.is_initialized() else 0
    return ids.chunk(plan.dp)[rank // (plan.cp * plan.tp) % plan.dp]


def train(model: Any, optimizer: Any, steps: range, passes: int = 1) -> list[tuple[float, float]]:
    """Train as a user would; return the loss and the norm of each step."""
    seen = []
    plan = mw.plan_of(model)
    for step in steps:
        for _ in range(passes):
            ids = batch(step, plan)
            loss = model(input_ids=ids, labels=ids).loss
            (loss / passes).backward()
        norm = mw.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(), norm.item()))
    return seen


def made(plan: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = build("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = ToDistributedConfig(plan=ParallelPlan(**plan), **options)
    return mw.to_distributed(model, optimizer, config=config)[:2]


def watched(folder: Path, plan: dict[str, Any]) -> tuple[str, list[tuple[float, float]]]:
    model, optimizer = made(plan, logging_steps=4, logging_dir=folder, max_steps=STEPS)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        seen = train(model, optimizer, range(STEPS), passes=plan.get("gradient_accumulation_steps", 1))
        monitor_of(runtime_of(model)).close()
    return said.getvalue(), seen


@pytest.mark.parametrize("plan", [{"dp": 2, "zero_stage": 1}, {"tp": 2}], ids=str)
def test_rank_0_shows_the_run_from_one_argument(pool2: Any, tmp_path: Path, plan: dict[str, Any]) -> None:
    (said, seen), (silent, _) = pool2.run(watched, tmp_path, plan, timeout=200)
    assert silent == ""
    lines = said.splitlines()
    assert "22,176 parameters, on 2 x cpu" in lines[0] and any("given in the call" in text for text in lines)
    assert any("measured after step 1: peak" in text for text in lines)
    assert [text.split()[1] for text in lines if text.startswith("step ")] == ["1/12", "4/12", "8/12", "10/12", "12/12"]
    assert any("estimated" in text and "measured" in text and "per step" in text for text in lines)

    found = read_records(tmp_path)
    assert [step["step"] for step in found.steps] == [1, 4, 8, 10, 12] and len(found.estimates) == 1
    for step in found.steps:
        # The figures of the step itself, to the bit: nothing is computed again.
        assert (step["loss"], step["norm"]) == seen[step["step"] - 1] and step["lr"] == 1e-3
        assert set(step["peak"]) == {"0", "1"} and step["slowest"] in (0, 1)
        assert step["tokens_per_second"] == pytest.approx(step["tokens"] / (step["seconds_per_step"] * steps_of(step)))
    assert [step["tokens"] for step in found.steps] == [n * ROWS * LENGTH for n in (1, 3, 4, 2, 2)]


def steps_of(step: dict[str, Any]) -> int:
    """The steps since the line before."""
    return {1: 1, 4: 3, 8: 4, 10: 2, 12: 2}[step["step"]]


def logged_loads(folder: Path) -> tuple[str, list[dict[str, list[int]]]]:
    """Train a model with experts over ranks; return what is printed, and the tokens of each expert in each step."""
    model = anatomies.build("qwen3_moe").float()
    model.config._experts_implementation = "grouped_mm"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = ToDistributedConfig(plan="dp2 ep2", logging_steps=4, logging_dir=folder, max_steps=8)
    model, optimizer, _ = mw.to_distributed(model, optimizer, config=config)
    mw.expert_counts(model)
    counts = []
    with contextlib.redirect_stderr(io.StringIO()) as said:
        for step in range(8):
            train(model, optimizer, range(step, step + 1))
            counts.append({name: found.tolist() for name, found in mw.expert_counts(model).items()})
        monitor_of(runtime_of(model)).close()
    return said.getvalue(), counts


def test_the_load_of_experts_is_logged(pool2: Any, tmp_path: Path) -> None:
    (said, counts), _ = pool2.run(logged_loads, tmp_path, timeout=200)
    steps = {step["step"]: step for step in read_records(tmp_path).steps}
    assert list(steps) == [1, 4, 8]
    for interval, last in ((range(1), 1), (range(1, 4), 4), (range(4, 8), 8)):
        of_ranks = [0, 0]
        for name, load in steps[last]["expert_load"].items():
            of_layer = torch.tensor([counts[step][name] for step in interval]).sum(0)
            assert of_layer.sum() == len(interval) * ROWS * LENGTH * 2  # two experts for each token
            assert load == pytest.approx((of_layer.max() * len(of_layer) / of_layer.sum()).item())
            of_ranks[0] += int(of_layer[:3].sum())  # of five experts, the first rank has three
            of_ranks[1] += int(of_layer[3:].sum())
        assert steps[last]["rank_load"] == pytest.approx(max(of_ranks) * 2 / sum(of_ranks))
        assert len(steps[last]["expert_load"]) == len(counts[0]) > 1
        assert f"fullest expert {max(steps[last]['expert_load'].values()):.1f}x the mean" in said


def test_the_parts_of_a_step_add_up_to_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def take(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    model, optimizer = made({}, logging_steps=2, logging_dir=tmp_path)
    model.lm_head.register_forward_hook(lambda *_: take(1.0))
    model.lm_head.weight.register_hook(lambda _: take(4.0))
    optimizer.register_step_pre_hook(lambda *_: take(2.0))
    with contextlib.redirect_stderr(io.StringIO()):
        for step in range(4):
            train(model, optimizer, range(step, step + 1))
            take(0.5)
        monitor_of(runtime_of(model)).close()
    last = read_records(tmp_path).steps[-1]
    assert last["parts"] == {"forward": 1.0, "backward": 4.0, "optimizer": 2.0, "between": 0.5}
    assert last["seconds_per_step"] == 7.5


def collectives(plan: dict[str, Any], options: dict[str, Any]) -> list[int]:
    """The collectives of each step, of all groups."""
    model, optimizer = made(plan, **options)
    guard, counts = active_guard(), []
    assert guard is not None
    with contextlib.redirect_stderr(io.StringIO()):
        for step in range(6):
            before = guard.trace.of((0, 1)).count
            train(model, optimizer, range(step, step + 1))
            counts.append(guard.trace.of((0, 1)).count - before)
    return counts


def two_figures(folder: Path) -> tuple[Any, Any]:
    return collectives({"dp": 2}, {}), collectives({"dp": 2}, {"logging_steps": 2, "logging_dir": folder})


def test_it_adds_no_collective(pool2: Any, tmp_path: Path) -> None:
    for without, shown in pool2.run(two_figures, tmp_path, timeout=200):
        assert without == shown and min(without) > 0


def test_accumulation_a_copy_and_a_resumed_run_in_one_process(tmp_path: Path) -> None:
    options = {"logging_steps": 5, "logging_dir": tmp_path / "log"}
    with contextlib.redirect_stderr(io.StringIO()) as said:
        model, optimizer = made({}, **options)
        seen = train(model, optimizer, range(5), passes=2)
        twin = copy.deepcopy(model)
        twin(input_ids=batch(0, ParallelPlan()), labels=batch(0, ParallelPlan())).loss.backward()  # nobody counts it
        with torch.no_grad():
            model(input_ids=batch(0, ParallelPlan()))
        mw.save_checkpoint(tmp_path / "saved", model, optimizer, step=5)
        train(model, optimizer, range(5, 10), passes=2)
        monitor_of(runtime_of(model)).close()
        model, optimizer = made({}, **options)
        assert mw.load_checkpoint(tmp_path / "saved", model, optimizer).step == 5
        again = train(model, optimizer, range(5, 15), passes=2)
        monitor_of(runtime_of(model)).close()
    assert "2 forward passes per step" in said.getvalue()
    found = read_records(tmp_path / "log")
    assert [run["first_step"] for run in found.runs] == [0, 5]
    assert [step["step"] for step in found.steps] == [1, 5, 6, 10, 15]
    assert [step["tokens"] for step in found.steps] == [n * 2 * ROWS * LENGTH for n in (1, 4, 1, 4, 5)]
    assert found.steps[1]["loss"] == seen[4][0] and found.steps[-1]["loss"] == again[-1][0]


def test_flops_of_a_run_by_hand(tmp_path: Path) -> None:
    """MFU is the FLOPs of the tokens by the planner's formula, divided by the time and the peak of a profile."""
    from meshwright_plan.machine.devices import CATALOGUE
    from meshwright_plan.machine.hardware import HardwareProfile

    profile = HardwareProfile(name="this machine", device=CATALOGUE["cpu"], dtype="float32", rows=3)
    profile.save(tmp_path / "machine.json")
    with contextlib.redirect_stderr(io.StringIO()) as said:
        model, optimizer = made({}, logging_steps=2, logging_dir=tmp_path, hardware_profile=tmp_path / "machine.json")
        train(model, optimizer, range(2))
        monitor_of(runtime_of(model)).close()
    last = read_records(tmp_path).steps[-1]
    rate = last["tokens_per_second"] * describe(model.config).flops(LENGTH)
    assert last["mfu"] == pytest.approx(rate / CATALOGUE["cpu"].flops, rel=1e-9)
    assert "MFU" in said.getvalue().splitlines()[-1] and "MFU     unknown" not in said.getvalue()


def of_memory(plan: dict[str, Any]) -> Any:
    model, optimizer = made(plan)
    ids = batch(0, mw.plan_of(model))
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        found = mw.memory_of(model, optimizer, batch_shape=(ROWS, LENGTH))
        optimizer.zero_grad()
    assert "measured" in str(found) and "estimated" in str(found)
    return found


@pytest.mark.parametrize(
    ("plan", "shares"),
    [
        ({"dp": 2}, (1, 2)),
        ({"dp": 2, "zero_stage": 1}, (1, 1)),
        ({"dp": 2, "zero_stage": 3}, (0.5, 1)),
        ({"tp": 2}, (0.5, 1)),
    ],
    ids=str,
)
def test_the_memory_of_each_rank(pool2: Any, plan: dict[str, Any], shares: tuple[float, float]) -> None:
    """Weights and AdamW's two moments of a float32 model, by hand; ranks hold whole copies or halves."""
    weights = 4 * sum(p.numel() for p in build("llama").parameters())
    mine, theirs = pool2.run(of_memory, plan, timeout=200)
    assert [held.weights for held in mine.measured] == [held.weights for held in theirs.measured]
    for held, expected in zip(mine.measured, mine.estimated, strict=True):
        # Padding of the vocabulary (97 words) and of ZeRO's buckets, norms that tp replicates, Adam's step counts and
        # the buffers of the rotary embedding: up to 10 % of a model of this size.
        assert held.weights == pytest.approx(shares[0] * weights, rel=0.1)
        assert held.optimizer == pytest.approx(shares[1] * weights, rel=0.1)
        assert held.weights == pytest.approx(expected.weights, rel=0.1)
        assert held.weights + held.gradients + held.optimizer + held.rest == pytest.approx(held.peak)


def test_options_without_lines_are_refused() -> None:
    for options in ({"logging_dir": "runs"}, {"max_steps": 3}):
        with pytest.raises(PlanError, match="is used in status lines only; set logging_steps=10 too"):
            mw.to_distributed(build("llama"), config=ToDistributedConfig(plan="dp1", **options))
    with pytest.raises(PlanError, match="logging_steps must be a positive integer, not 0"):
        ToDistributedConfig(logging_steps=0)
    with pytest.raises(PlanError, match=r"logging_dir='' names no folder"):
        ToDistributedConfig(logging_dir="")


def test_memory_of_refuses_wrong_arguments() -> None:
    model, optimizer = made({})
    other = torch.optim.SGD(build("llama").parameters(), lr=0.1)
    cases: list[tuple[Any, Any, str]] = [
        (other, None, "has no parameter of this"),
        ([], None, r"the order is memory_of\(model, optimizer\)"),
        *((optimizer, shape, "must be rows and tokens per row") for shape in (5, (0, 12), (2, 12, 3), (2.0, "x"))),
    ]
    for wrong, shape, message in cases:
        with pytest.raises(PlanError, match=message):
            mw.memory_of(model, wrong, batch_shape=shape)
    with pytest.raises(ValueError, match="this NoneType is not distributed"):
        mw.memory_of(None)


@pytest.mark.parametrize("steps", [None, 5])
def test_memory_of_a_model_that_the_planner_does_not_know(steps: int | None) -> None:
    config = ToDistributedConfig(plan="dp1", logging_steps=steps)
    model, _, _ = mw.to_distributed(torch.nn.Linear(8, 4), config=config)
    assert not mw.memory_of(model).estimated
    with pytest.raises(PlanError, match="the planner does not know the sizes of Linear"):
        mw.memory_of(model, batch_shape=(4, 8))


def test_the_last_step_has_a_line_and_a_second_run_in_a_folder_is_told(tmp_path: Path) -> None:
    for run in range(2):
        with contextlib.redirect_stderr(io.StringIO()) as said:
            model, optimizer = made({}, logging_steps=100, logging_dir=tmp_path, max_steps=3)
            train(model, optimizer, range(4))
            monitor_of(runtime_of(model)).close()
        assert [step["step"] for step in read_records(tmp_path).steps] == [1, 3]
        assert ("has an earlier run" in said.getvalue()) == (run == 1)


def test_a_program_logs_its_own_values(tmp_path: Path) -> None:
    with contextlib.redirect_stderr(io.StringIO()):
        model, optimizer = made({}, logging_steps=1, logging_dir=tmp_path)
        train(model, optimizer, range(2))
        mw.log_values(model, {"eval_loss": torch.tensor(2.5), "accuracy": 1})
        mw.log_values(model, {"eval_loss": math.nan}, step=1)
        monitor_of(runtime_of(model)).close()
    found = [(one["step"], one["values"]) for one in read_records(tmp_path).values]
    assert found == [(2, {"eval_loss": 2.5, "accuracy": 1.0}), (1, {"eval_loss": "nan"})]
    with pytest.raises(mw.PlanError, match="'why' is a str"):
        mw.log_values(model, {"why": "so"})
    with pytest.raises(mw.PlanError, match=r"this run has none; call to_distributed\(.*logging_dir"):
        mw.log_values(made({})[0], {"eval_loss": 1.0})


def test_posted_values_are_taken_once_and_old_topics_are_forgotten() -> None:
    posted = Posted(2)
    posted.add(0, topic="a", value=1)
    assert posted.take("a", patience=0.01) == {0: 1}  # rank 1 has sent nothing
    posted.add(0, topic="a", value=1)
    posted.add(1, topic="a", value=2)
    assert posted.take("a", patience=5.0) == {0: 1, 1: 2} and posted.take("a", patience=0) == {}
    for topic in range(1000):
        posted.add(0, topic=str(topic), value=topic)
    assert posted.take("0", patience=0) == {} and posted.take("999", patience=0) == {0: 999}


def test_records_are_plain_json(tmp_path: Path) -> None:
    with contextlib.redirect_stderr(io.StringIO()):
        model, optimizer = made({}, logging_steps=1, logging_dir=tmp_path)
        train(model, optimizer, range(2))
        monitor_of(runtime_of(model)).close()
    for text in (tmp_path / "meshwright.jsonl").read_text().splitlines():
        assert json.loads(text)["kind"] in ("run", "memory", "step")
