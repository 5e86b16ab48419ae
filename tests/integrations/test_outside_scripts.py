"""What ``conformance.outside_scripts`` makes of a script and of two runs; the scripts themselves need checkouts."""

from __future__ import annotations

import ast
import dataclasses
import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.outside_scripts.catalogue import SCRIPTS, Edit
from conformance.outside_scripts.page import Row, Verdict, render
from conformance.outside_scripts.running import Run, compare, edited, read_figures
from conformance.outside_scripts.stand_ins.evaluate import load
from meshwright.monitor.figures import RankFigures, StepFigures, together

NAMES = {"rows": 4, "warmup": 4}
EQUAL = Run(error=None, passes=4, weights={"w": torch.tensor([1.0, -2.0])}, figures=[4.5, 0.01])


@pytest.mark.parametrize("script", [s for s in SCRIPTS if s.source == "trl"], ids=lambda script: script.name)
def test_the_installed_scripts_of_trl_have_what_is_changed(script: Any) -> None:
    pytest.importorskip("trl", reason="the environment of the oldest versions has no TRL")
    path = Path(str(metadata.distribution("trl").locate_file(script.path)))
    text = edited(path.read_text(), script.changes, NAMES, script.path)
    ast.parse(text)
    assert "class Planned(MeshwrightTrainerMixin, " in text and "trainer = Planned(" in text
    assert script.changed_lines == 3


def test_an_edit_that_no_longer_fits_is_an_error() -> None:
    assert edited("a = 16\n", (Edit(old="16", new="{rows}"),), NAMES, "x.py") == "a = 4\n"
    assert edited("a = 16\n", (Edit(old="17", new="1", optional=True),), NAMES, "x.py") == "a = 16\n"
    with pytest.raises(ValueError, match=r"x.py has no '17'"):
        edited("a = 16\n", (Edit(old="17", new="1"),), NAMES, "x.py")


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({}, "equal"),
        ({"weights": {"w": torch.tensor([1.0, -2.0 - 1e-6])}}, "differs"),
        ({"weights": {"v": torch.tensor([1.0, -2.0])}}, "differs"),
        ({"figures": [4.5, 0.01 + 1e-8]}, "differs"),
        ({"figures": [4.5]}, "differs"),
        ({"figures": [4.5, float("nan")]}, "differs"),
        ({"error": "PlanError: tp", "passes": 0}, "refused"),
        ({"error": "PlanError: tp", "passes": 1}, "late"),
        ({"error": "RuntimeError: mat1", "passes": 0}, "late"),
    ],
    ids=str,
)
def test_the_verdict_of_two_runs(change: dict[str, Any], kind: str) -> None:
    verdict = compare(dataclasses.replace(EQUAL, **change), EQUAL, 1e-9)
    assert verdict.kind == kind
    assert verdict.holds == (kind in ("equal", "refused"))


def test_what_only_a_plan_logs_is_not_compared(tmp_path: Path) -> None:
    ranks = {rank: RankFigures(seconds=2.0, steps=4, tokens=8, flops=1.0, waited=rank, peak=5.0) for rank in range(2)}
    logs = together(StepFigures(step=4), ranks, row_copies=1, peak_flops=1e12).as_logs()
    assert {"mfu", "slowest_rank"} <= logs.keys()
    (tmp_path / "output").mkdir()
    state = {"log_history": [{"loss": 4.5, "step": 1, "train_runtime": 3.0, **logs}]}
    (tmp_path / "output" / "trainer_state.json").write_text(json.dumps(state))
    assert read_figures(tmp_path) == [4.5, 1.0]


def test_the_page_counts_what_differs() -> None:
    verdicts = {"tp2": Verdict(kind="equal", detail="2e-14"), "dp2": Verdict(kind="differs", detail="3e-02")}
    page = render([Row(script=SCRIPTS[0], verdicts=verdicts)], ("tp2", "dp2"), {"transformers": "4.57.5"})
    assert "Of 2 runs under a plan, 1 are equal" in page and "1 differ" in page
    assert "| transformers `run_clm.py` | 2 | 2e-14 | **differs** (3e-02) |" in page


def test_the_metric_counts_rows() -> None:
    metric = load("glue", "mrpc")
    metric.add_batch(predictions=torch.tensor([1, 0]), references=torch.tensor([1, 1]))
    metric.add_batch(predictions=[0], references=[0])
    assert metric.compute() == {"accuracy": 2 / 3, "f1": 2 / 3, "rows": 3}
