"""The figures of an interval, their line and the count of FLOPs, against counts by hand."""

from __future__ import annotations

import dataclasses
import functools
import io
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from meshwright.choose.model_sizes import kind_of
from meshwright.choose.picked_plan import plan_card
from meshwright.distribute.decide import call_of, runnable_plans
from meshwright.monitor.card import Card, Comparison, Estimate, Machine, candidate_of, estimate
from meshwright.monitor.figures import Figures, RankFigures, StepFigures, clock, line, say, together
from meshwright.plan.config import ParallelPlan, ToDistributedConfig
from meshwright_plan.job.shapes import describe
from meshwright_plan.machine.hardware import Cluster, Coefficients, HardwareProfile, device
from support.models import build

LENGTH = 16
COMMAND = "meshwright calibrate --processes 4 --output machine.json"


def rank(**changes: Any) -> RankFigures:
    return RankFigures(
        **{"seconds": 2.0, "steps": 4, "tokens": 400, "flops": 4e9, "waited": 0.0, "peak": 1.0, **changes}
    )


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_flops_are_those_that_torch_counts(family: str) -> None:
    """torch counts each matmul that runs: six operations per weight and token, and attention over the whole row."""
    model = build(family, attn_implementation="eager")
    ids = torch.randint(3, 97, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    shape = describe(model.config)
    matmuls = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    scores = 12 * shape.layers * shape.runs[0].query_width  # for each position that a token attends to
    # The planner's formula, which MFU uses, counts only the positions that a causal mask leaves.
    assert shape.flops(LENGTH) == 6 * matmuls + scores * shape.runs[0].attended(LENGTH)
    # Rotary embeddings multiply tiny matrices (positions by frequencies), which nobody counts.
    counted = counter.get_total_flops() / ids.numel()
    assert counted == pytest.approx(6 * matmuls + scores * LENGTH, rel=1e-3)


def test_mfu_and_tokens_per_second_by_hand() -> None:
    shape = describe(build("llama").config)
    rows, length, dp, tp, peak = 3, 12, 2, 2, 1e9
    own = rank(tokens=4 * rows * length, flops=4 * rows * length * shape.flops(length), seconds=2.0, steps=4)
    found = together(
        StepFigures(step=8), dict.fromkeys(range(dp * tp), own), row_copies=tp, peak_flops=peak, max_steps=10
    )
    tokens = 4 * rows * length * dp  # ranks of tp share their rows
    assert found.tokens == tokens and found.tokens_per_second == tokens / 2.0
    assert found.mfu == pytest.approx(tokens * shape.flops(length) / 2.0 / (peak * dp * tp), rel=1e-12)
    assert found.left == 2 * 0.5


@pytest.mark.parametrize(
    ("waited", "slowest", "behind"),
    [
        ((1.0, 0.2, 1.0, 1.2), 1, 0.2),  # the median of the others waits 0.8 s longer in 4 steps
        ((0.5, 0.5), 0, 0.0),
        ((0.3,), None, 0.0),
    ],
)
def test_the_slowest_rank_is_the_one_that_waits_least(waited: Any, slowest: int | None, behind: float) -> None:
    ranks = {index: rank(waited=seconds) for index, seconds in enumerate(waited)}
    found = together(StepFigures(step=4), ranks, row_copies=1, peak_flops=None)
    assert found.slowest == slowest and found.behind == pytest.approx(behind)
    assert ("slowest_rank" in found.as_logs()) == (slowest is not None)


def test_a_line_leaves_out_what_is_unknown() -> None:
    found = together(StepFigures(step=3, loss=math.nan), {0: rank(peak=2.0**29)}, row_copies=1, peak_flops=None)
    text = line(found)
    assert text == "step 3  loss nan  200 tokens/s  200 per device  peak 512 MiB (rank 0)"
    beyond = line(found, max_steps=2)  # the program goes on after max_steps
    assert beyond == text and line(found, max_steps=3).startswith("step 3/3  loss nan")
    assert "mfu" not in found.as_logs() and found.as_logs()["peak_memory_gib"] == 0.5


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00:00"), (59.6, "0:01:00"), (90061, "1d 1:01:01")])
def test_a_duration(seconds: float, text: str) -> None:
    assert clock(seconds) == text


@pytest.mark.parametrize(
    ("plan", "rows", "label"),
    [
        ("dp2", 4, "dp2 zero0 mb4x1"),
        ("dp2 zero3", 4, "dp2 zero3 mb4x1"),
        ("dp1 pp2 mb1", 4, "dp1 pp2 zero0 mb1x4"),
        ("dp1 cp2(ring)", 1, "dp1 cp2(ring) zero0 mb1x1"),
        ("dp2 recompute=full(1)", 4, "dp2 zero0 mb4x1 recompute=full(1)"),
    ],
)
def test_a_plan_as_the_planner_writes_it(plan: str, rows: int, label: str) -> None:
    from meshwright.choose.given_plan import resolve_plan

    assert candidate_of(resolve_plan(plan), rows).label == label


def machine(**changes: Any) -> Machine:
    cluster = Cluster(device=device("h100-sxm"), gpus=2)
    known = {"shape": describe(build("llama").config), "cluster": cluster, "is_known": True}
    return Machine(**{**known, "profile": HardwareProfile(name="catalogue"), **changes})


def estimated() -> Estimate:
    return estimate(machine(), ParallelPlan(dp=2), torch.bfloat16, (4, LENGTH), 1)


def test_the_card_shows_the_plan_and_its_estimate() -> None:
    card = Card(
        model="LlamaForCausalLM", parameters=22176, plan=ParallelPlan(dp=2), source="given in the call",
        device="h100-sxm", batch=(4, LENGTH), estimate=estimated(), basis=machine().basis,
    )  # fmt: skip
    text = str(card)
    for words in (
        "22,176 parameters, on 2 x h100-sxm",
        "dp2 zero0",
        "given in the call",
        "dp=2",
        "128 per step (8 rows of 16",
    ):
        assert words in text
    assert "per rank estimated" in text and "per step estimated, ±40% (from data sheets" in text
    assert "MFU" not in text


def compared(ratio: float, *, launches: float = 0.1, **changes: Any) -> Comparison:
    found = dataclasses.replace(estimated(), launches=launches)
    facts: dict[str, Any] = {
        "has_profile": False, "is_cpu": False, "command": COMMAND, "processes": 2, "cores": 2, "rank": 1,
    }  # fmt: skip
    return Comparison(
        **{**facts, "estimate": found, "seconds": ratio * found.time.total, "peak": found.fullest.total, **changes}
    )


@pytest.mark.parametrize(("ratio", "hints"), [(1.0, 0), (1.39, 0), (1.41, 1), (0.5, 1)])
def test_a_hint_names_what_is_outside_the_band(ratio: float, hints: int) -> None:
    found = compared(ratio).hints
    assert len(found) == hints
    assert all(COMMAND in hint and f"{ratio:.2f}x" in hint for hint in found)


CROWDED, SMALL = "4 processes on 2 cores", "layers so small that launching operations takes most of the time"


@pytest.mark.parametrize(
    ("ratio", "facts", "causes"),
    [
        (4.44, {}, []),
        (4.44, {"processes": 4}, [CROWDED]),
        (4.44, {"launches": 0.6}, [SMALL]),
        (4.44, {"processes": 4, "launches": 0.6}, [CROWDED, SMALL]),
        (0.4, {"processes": 4, "launches": 0.6}, []),  # these make a step slower, not faster
        (4.44, {"processes": 4, "is_cpu": False}, []),
    ],
)
def test_likely_causes_come_before_a_changed_machine(ratio: float, facts: dict[str, Any], causes: list[str]) -> None:
    (hint,) = compared(ratio, **{"has_profile": True, "is_cpu": True, **facts}).hints
    assert [cause for cause in (CROWDED, SMALL) if cause in hint] == causes
    assert hint.endswith(COMMAND)
    assert ("the machine is not as it was" in hint) == (not causes)
    assert all(hint.index(cause) < hint.index("busier than") for cause in causes)


def test_a_guess_for_some_cpu_is_no_reason_for_a_warning() -> None:
    shown = compared(4.44, is_cpu=True, peak=2e12, processes=4)
    assert shown.hints == [] and len(str(shown).splitlines()) == 1
    assert "measured " in str(shown) and "of memory on rank 1" in str(shown) and COMMAND in str(shown)
    assert "4.44" not in str(shown) and "estimated" not in str(shown)  # a guess says nothing about this machine


@pytest.mark.parametrize(("launch", "is_small"), [(1e-3, True), (1e-9, False)])
def test_launches_count_against_the_time_of_a_layer(launch: float, is_small: bool) -> None:
    own = machine(profile=HardwareProfile(name="mine", coefficients=Coefficients(launch=launch)))
    share = estimate(own, ParallelPlan(dp=2), torch.bfloat16, (4, LENGTH), 1).launches
    assert (share > 0.5) == is_small and share > 0


@pytest.mark.parametrize(
    ("make", "tensors"),
    [(torch.optim.AdamW, 2), (functools.partial(torch.optim.SGD, momentum=0.9), 1), (torch.optim.SGD, 0)],
)
def test_the_state_is_that_of_the_optimizer(make: Any, tensors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Cards name the memory that is available, which other processes change from one card to the next.
    monkeypatch.setattr("meshwright.choose.picked_plan.available_memory", lambda: 2.0**33)
    model = build("llama")
    found = Machine.find(model, ToDistributedConfig(), make(model.parameters(), lr=0.1))
    memory = estimate(found, ParallelPlan(), torch.float32, (4, LENGTH), 1).fullest
    assert memory.optimizer == tensors * memory.weights
    loader = DataLoader([{"input_ids": torch.arange(LENGTH)}] * 4, batch_size=4)
    optimizers = (None, make(model.parameters(), lr=0.1))
    plans = runnable_plans(call_of(model, ToDistributedConfig(), None, torch.device("cpu")))
    kinds = (kind_of(optimizer, model) for optimizer in optimizers)
    of_adam, of_this = (plan_card(plans, loader, rows=4, optimizer=kind) for kind in kinds)
    assert (of_adam == of_this) == (tensors == 2), of_this


def test_a_profile_of_other_processes_leaves_the_estimates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "machine.json"
    measured = dataclasses.replace(device("cpu"), shares_host=True)
    HardwareProfile(name="AMD EPYC, 1 node(s) x 2", device=measured, dtype="float32", processes=2, rows=9).save(path)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    found = Machine.find(build("llama"), ToDistributedConfig(hardware_profile=path))
    command = f"meshwright calibrate --processes 4 --output {path}"
    assert found.command == command and found.profile.rows == 0 and found.peak_flops is None
    assert found.unused_profile.endswith(f"Measure with {command}") and "--gpus-per-node" not in found.unused_profile
    card = shown(found, is_cpu=True)
    assert "per rank estimated (process and libraries" in card and "per step estimated" in card
    assert f"profile not used: {path}: profile 'AMD EPYC" in card and "MFU     unknown: it needs the peak" in card
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    found = Machine.find(build("llama"), ToDistributedConfig(hardware_profile=path))
    assert found.profile.rows == 9 and found.peak_flops == measured.flops
    assert "MFU" not in (card := shown(found, is_cpu=True)) and "not used" not in card


def shown(found: Machine, *, is_cpu: bool) -> str:
    plan = ParallelPlan(dp=found.cluster.per_node)
    card = Card(
        model="LlamaForCausalLM", parameters=22176, plan=plan, source="given in the call", device="cpu",
        batch=(4, LENGTH), estimate=estimate(found, plan, torch.float32, (4, LENGTH), 1), basis=found.basis,
        unknown_peak=found.unknown_peak, unused_profile=found.unused_profile, is_cpu=is_cpu,
    )  # fmt: skip
    return str(card)


def test_the_card_of_a_cpu_has_the_whole_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    card = shown(Machine.find(build("llama"), ToDistributedConfig()), is_cpu=True)
    assert f"{COMMAND}, and pass ToDistributedConfig(hardware_profile='machine.json')" in card
    assert "slack" not in card


def test_a_card_begins_on_a_line_of_its_own_beside_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    tqdm = pytest.importorskip("tqdm")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with tqdm.tqdm(total=40, file=sys.stderr):
        say("meshwright: a\n  b")
    say("meshwright: c")
    lines = sys.stderr.getvalue().replace("\r", "\n").splitlines()  # type: ignore[attr-defined]
    assert {"meshwright: a", "  b", "meshwright: c"} <= set(lines)


def test_figures_are_numbers_for_a_tracker() -> None:
    found = together(StepFigures(step=4, loss=1.0), {0: rank(), 1: rank(waited=1.0)}, row_copies=1, peak_flops=1e12)
    assert isinstance(found, Figures)
    assert all(isinstance(value, int | float) for value in found.as_logs().values())
    assert set(found.as_logs()) == {
        "seconds_per_step", "tokens_per_second", "tokens_per_second_per_device", "mfu", "peak_memory_gib",
        "peak_memory_rank", "slowest_rank", "slowest_rank_behind_ms",
    }  # fmt: skip
