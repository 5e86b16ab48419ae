"""``python -m conformance.gpu``: on a CPU every section passes, and finds a planted fault; no process ends the rest."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from transformers.models.llama import modeling_llama

from conformance.gpu import races, training
from conformance.gpu.catalogue import NAMES, section_named
from conformance.gpu.page import page, table_line
from conformance.gpu.runner import Outcome, read_result, run_command
from conformance.gpu.section import Check, Place, attempt, line_of
from conformance.gpu.sections import step_times
from conformance.gpu.sections.numbers import largest_error_of_orders
from conformance.gpu.sections.waits import real_step
from conformance.gpu.small_step import SMALL
from conformance.gpu.training import new_model, relative_error, trained
from support import liger_parts
from support.tiers import crossing, nightly

ROOT = Path(__file__).parents[2]


def run(python: Path, folder: Path, *options: str) -> tuple[int, list[dict[str, Any]]]:
    """Run the command on the CPU; return its exit code, and how each section ended."""
    command = [str(python), "-m", "conformance.gpu", "--device", "cpu", "--out", str(folder), *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540, check=False)
    assert (folder / "figures.json").exists(), done.stdout + done.stderr
    return done.returncode, json.loads((folder / "figures.json").read_text())["sections"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("minutes", [crossing(0.1), nightly(8)])  # in 0.1 a section stops after its first check
def test_every_section_passes_on_a_cpu(minutes: float, preloaded_python: Path, tmp_path: Path) -> None:
    code, sections = run(preloaded_python, tmp_path, "--minutes", str(minutes))
    assert code == 0 and [one["state"] for one in sections] == ["passed"] * len(NAMES), (
        tmp_path / "log.txt"
    ).read_text()
    if minutes == 8:
        assert not any(one["is_cut"] for one in sections)
        assert sum(one["seconds"] for one in sections) <= 60 * minutes
    assert all(f"| {name} | passed |" in (tmp_path / "page.md").read_text() for name in NAMES)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_every_section_finds_a_planted_fault(preloaded_python: Path, tmp_path: Path) -> None:
    code, sections = run(
        preloaded_python, tmp_path, "--plant", "--minutes", "0.1"
    )  # each stops after its first check with a goal
    assert code == 1
    assert [one["state"] for one in sections] == ["failed"] * len(NAMES), (tmp_path / "log.txt").read_text()


def check(figure: float, **fields: Any) -> Check:
    return Check(what="a figure", figure=figure, **fields)


def test_a_way_to_train_changes_nothing_for_those_after_it() -> None:
    """As Liger's function does, one replaces and adds names in transformers' module; and one that fails is named."""
    before, met = modeling_llama.LlamaRMSNorm, []

    def replacing(contest: Any, device: Any) -> Any:
        modeling_llama.LlamaRMSNorm = torch.nn.LayerNorm
        modeling_llama.liger_rope = modeling_llama.LlamaForCausalLM._liger = None
        raise ValueError("no kernel")

    def stock(contest: Any, device: Any) -> Any:
        met.append(modeling_llama.LlamaRMSNorm)
        assert not hasattr(modeling_llama, "liger_rope") and not hasattr(modeling_llama.LlamaForCausalLM, "_liger")
        return races.stock(contest, device)

    with mock.patch.dict(races.WAYS, {"stock": stock, "compiled": replacing}):
        found = races.race(SMALL, ("compiled", "stock", "liger"), "cpu")
    assert met == [before] and modeling_llama.LlamaRMSNorm is before and found.turns.keys() == {"stock"}
    assert found.missing["compiled"] == "ValueError: no kernel"
    if find_spec("liger_kernel") is None:
        assert found.missing["liger"] == "Liger is not installed"


def test_ligers_parts_are_trained_with_the_own_head() -> None:
    """With plain formulas in place of the kernels, which need a GPU; the loss is float32's, within its rounding."""
    asked: dict[str, Any] = {}

    def apply(*, model: Any, **options: Any) -> None:
        asked.update(options)
        modeling_llama.apply_rotary_pos_emb = liger_parts.rotated
        liger_parts.in_the_instances(model)

    package, kernels = ModuleType("liger_kernel"), ModuleType("liger_kernel.transformers")
    package.__spec__ = ModuleSpec("liger_kernel", None)
    kernels.apply_liger_kernel_to_llama = apply  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {"liger_kernel": package, "liger_kernel.transformers": kernels}):
        found = races.race(SMALL, ("stock", "meshwright liger"), "cpu")
    assert asked == {"cross_entropy": False, "fused_linear_cross_entropy": False} and not found.missing
    assert found.turns["meshwright liger"].loss == pytest.approx(found.turns["stock"].loss, rel=1e-6)


def test_models_that_do_not_fit_into_the_time_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes 3 seconds of a clock that only they move, so that two fit into 8 seconds."""
    now = 0.0

    def raced(*_: object) -> Check:
        nonlocal now
        now += 3
        return check(1.0)

    monkeypatch.setattr(step_times, "_TINY", [dataclasses.replace(SMALL, name=name) for name in "abcd"])
    monkeypatch.setattr(step_times, "_calibrated", lambda *_: check(1.0))
    monkeypatch.setattr(step_times, "_raced", raced)
    monkeypatch.setattr(step_times.time, "monotonic", lambda: now)
    *done, last = step_times.StepTimes().run(Place(device="cpu", seconds=8, folder=tmp_path))
    assert len(done) == 1 + 2 and last.leaves_out and not any(one.leaves_out for one in done)
    assert last.what == "2 models were not timed: c; d" and last.note == "2 s are left, and one takes up to 3 s"


@pytest.mark.parametrize(("given", "holds"), [
    (check(0.1, goal=0.1), True),
    (check(0.2, goal=0.1), False),
    (check(0.2, goal=0.1, at_least=True), True),
    (check(0.05, goal=0.1, at_least=True), False),
    (check(float("nan"), goal=0.1), False),
    (check(float("nan"), goal=0.1, at_least=True), False),
    (check(0.2), True),
])  # fmt: skip
def test_a_figure_reaches_its_goal(given: Check, holds: bool) -> None:
    assert given.holds is holds
    assert Check(**{name: value for name, value in given.as_dict().items() if name != "holds"}).holds is holds


def test_the_line_names_the_figure_that_is_furthest_from_its_goal() -> None:
    checks = [check(1.0, goal=2.0), Check(what="the odd one", figure=3.0, goal=2.0), check(9.0)]
    assert line_of(checks) == "1 of 2 hold; furthest from its goal: the odd one, 3 (goal <= 2)"
    assert "none of which has a goal" in line_of(checks[2:])


def test_an_error_is_a_check_that_does_not_hold() -> None:
    (found,) = attempt("a plan", lambda: [check(1 / 0)])
    assert not found.holds and found.note == "ZeroDivisionError: division by zero"


def outcome(lines: list[dict[str, Any]], code: int | None, folder: Path, said: str = "") -> Outcome:
    result = folder / "result.jsonl"
    result.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return read_result(result).outcome("memory", code, 1.0, said)


def test_how_a_section_ended(tmp_path: Path) -> None:
    good, bad = ({"check": check(figure, goal=1.0).as_dict()} for figure in (1.0, 2.0))
    done = {"is_done": True}
    assert outcome([good, done], 0, tmp_path).state == "passed"
    assert outcome([good, bad, done], 0, tmp_path).state == "failed"
    assert "left out" in outcome([good, {"is_cut": True}, done], 0, tmp_path).line
    assert outcome([{"missing": "no such kernel"}], 0, tmp_path).line == "no such kernel"
    crashed = outcome([good], -11, tmp_path, "some text\nthe last line")
    assert crashed.state == "crashed" and crashed.is_wrong and "after 1 checks: the last line" in crashed.line
    assert outcome([good], None, tmp_path).state == "hung"
    assert outcome([good, done], -6, tmp_path).state == "crashed"  # after its last check
    (tmp_path / "result.jsonl").write_text(f'{json.dumps(good)}\n{{"is_do')
    assert len(read_result(tmp_path / "result.jsonl").checks) == 1
    text = page([crashed, outcome([good, bad, done], 0, tmp_path)], {"gpu": "none"})
    assert "| memory | crashed | 1 |" in text and "**no**" in text and "some text" in text
    assert table_line(crashed).count("\n") == 0


def test_a_section_that_hangs_is_ended_with_its_processes(tmp_path: Path) -> None:
    """Its child would hold the pipe open."""
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    began = time.monotonic()
    with (tmp_path / "output.txt").open("w") as output:
        assert run_command([sys.executable, "-c", child], output.fileno(), 1.0, "cpu") is None
    assert time.monotonic() - began < 20


def test_a_wait_in_a_real_step_is_found(pool2: Any) -> None:
    assert pool2.run(real_step, "dp2 zero1 bf16", "cpu", False) == ["", ""]
    for found in pool2.run(real_step, "dp2 zero1 bf16", "cpu", True):
        assert re.fullmatch(r"waits\.py:\d+ \(1 times\)", found)


@pytest.mark.parametrize("fault", ["each token goes to other experts", "an expert is lost"])
def test_a_fault_of_experts_is_no_order_of_summation(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 an order may send a token to another expert; the goal of 1.3 is between that and these faults."""

    def broken(*args: Any, **kwargs: Any) -> Any:
        def change(gate: object, args: object, output: Any) -> Any:
            logits, scores, chosen = output
            return (logits, scores * (chosen != 0), chosen) if "lost" in fault else (logits, scores, (chosen + 1) % 4)

        model = new_model(*args, **kwargs)
        model.model.layers[0].mlp.gate.register_forward_hook(change)
        return model

    exact = trained(None, torch.float64, "cpu", "mixtral")
    largest = largest_error_of_orders("mixtral", exact, "cpu")
    of_one = relative_error(trained(None, torch.bfloat16, "cpu", "mixtral"), exact)
    monkeypatch.setattr(training, "new_model", broken)
    of_fault = relative_error(trained(None, torch.bfloat16, "cpu", "mixtral"), exact)
    assert of_one <= largest < 1.3 * largest < of_fault / 2


def test_the_sections_are_described() -> None:
    assert all(section_named(name).name == name and section_named(name).question.endswith("?") for name in NAMES)


def test_nothing_but_torch_and_transformers_is_needed(tmp_path: Path) -> None:
    """Each process of the command starts without what only an installation brings; a narrow section runs."""
    hidden = ("xxhash", "peft", "pytest", "datasets", "hypothesis")
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({hidden}))\n")
    program = "from conformance.gpu.catalogue import NAMES, section_named; [section_named(name) for name in NAMES]; "
    program += "from conformance.gpu.__main__ import main; import typer; typer.run(main)"
    options = ["--device", "cpu", "--minutes", "0.1", "--sections", "streams", "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    command = [sys.executable, "-c", program, *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (section,) = json.loads((tmp_path / "figures.json").read_text())["sections"]
    first, second = section["checks"][:2]
    assert "xxhash is not installed" in first["note"] and second["goal"] and second["holds"]
