"""The log of a run and the page that is made of it."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshwright.errors import PlanError
from meshwright.monitor.records import FILE, RunLog, read_records
from meshwright_tools.cli import app
from meshwright_tools.report.report import report

RUN: dict[str, Any] = {
    "first_step": 0, "model": "Llama<script>", "parameters": 8_000_000, "plan": "dp2 zero1", "why": "given in the call",
    "mesh": {"pp": 1, "dp": 2, "cp": 1, "tp": 1}, "ranks": 2, "device": "h100-sxm", "tokens_per_pass": 4096,
    "max_steps": 100, "memory_is": "allocated", "estimated_seconds": 0.5, "band": 0.4,
    "estimated_memory": [{"weights": 2.0**30, "activations": 2.0**31}],
}  # fmt: skip


def step(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": number, "loss": 5.0 - number / 10, "norm": 1.0, "lr": 1e-3, "tokens": 4096, "seconds_per_step": 0.5,
        "tokens_per_second": 8192.0, "ranks": 2, "mfu": 0.4, "peak": {0: 2.0**31, 1: 2.0**32}, "slowest": 1,
        "behind": 0.01, "parts": {"forward": 0.1, "backward": 0.3, "optimizer": 0.05, "between": 0.05}, "waited": 0.0,
        "left": 10.0, **changes,
    }  # fmt: skip


def written(folder: Path, *records: tuple[str, dict[str, Any]]) -> Path:
    log = RunLog(folder)
    for kind, record in records:
        log.write(kind, record)
    return log.path


def test_a_resumed_run_goes_on_in_the_same_file(tmp_path: Path) -> None:
    written(tmp_path, ("run", RUN), *(("step", step(n)) for n in (1, 10, 20, 30)), ("fault", {"step": 30, "what": "x"}))
    written(tmp_path, ("run", {**RUN, "first_step": 20}), ("step", step(30, loss=9.0)), ("step", step(40)))
    found = read_records(tmp_path)
    assert [(one["step"], one["loss"]) for one in found.steps] == [(1, 4.9), (10, 4.0), (20, 3.0), (30, 9.0), (40, 1.0)]
    assert len(found.runs) == 2 and len(found.faults) == 1


def test_a_line_that_was_cut_off_is_left_out_and_the_next_run_writes_below(tmp_path: Path) -> None:
    path = written(tmp_path, ("run", RUN), ("step", step(1)))
    with path.open("a") as file:
        file.write('{"kind": "step", "st')
    assert read_records(tmp_path).torn == 1
    written(tmp_path, ("run", {**RUN, "first_step": 1}), ("step", step(2)))
    found = read_records(path)
    assert [one["step"] for one in found.steps] == [1, 2] and found.torn == 1


def test_numbers_that_json_does_not_have_are_words(tmp_path: Path) -> None:
    path = written(tmp_path, ("run", RUN), ("step", step(1, loss=float("nan"), norm=float("inf"))))
    last = json.loads(path.read_text().splitlines()[-1])
    assert (last["loss"], last["norm"]) == ("nan", "inf")
    assert "<svg" in report(tmp_path)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match=r"logging_dir=.*choose another folder"):
        RunLog(tmp_path / "file" / "inside")


def test_without_a_log_the_error_says_how_to_write_one(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"there is no log; write one with .*logging_steps=10"):
        report(tmp_path)
    (tmp_path / FILE).write_text("nonsense\n[1]\n{}\n")
    with pytest.raises(PlanError, match="none of its 3 lines is a record"):
        report(tmp_path)


def pictures(page: str) -> dict[str, str]:
    return {name: svg for svg, name in re.findall(r'(<svg [^>]*id="([\w-]+)".*?</svg>)', page, re.DOTALL)}


def test_the_page_shows_every_figure(tmp_path: Path) -> None:
    compared = {"step": 10, "measured_seconds": 0.75, "measured_peak": 2.0**32, "hints": ["calibrate it"], **RUN}
    written(
        tmp_path, ("run", RUN), *(("step", step(n)) for n in (1, 10, 20)), ("estimate", compared),
        ("fault", {"step": 20, "what": "rank 1: <gone>"}),
    )  # fmt: skip
    page = report(tmp_path)
    root = ElementTree.fromstring(page.replace("<!DOCTYPE html>", ""))  # well-formed, so nothing is unescaped
    words = " ".join(root.itertext())
    for shown in (
        "Llama<script>", "dp2 zero1", "dp=2", "20 of 100", "3.0000", "8,192", "40.0%", "4.0 GiB", "rank 1",
        "750 ms (1.50\u00d7)", "500 ms ±40%", "calibrate it", "rank 1: <gone>",
        "slowest in 3 of 3 lines", "+10 ms per step",
    ):  # fmt: skip
        assert shown in words, shown
    for name in ("loss", "norm", "tokens_per_second", "seconds_per_step", "memory", "parts", "behind", "lr"):
        assert f'id="{name}"' in page and f'id="{name}-narrow"' in page
    assert not re.search(r'(?:src|href)="|url\(http|@import', page)  # it loads nothing
    drawn = pictures(page)
    assert drawn["loss"].count("front-dot") == 3 and "estimated 500 ms" in drawn["seconds_per_step"]
    assert drawn["memory"].count('class="series"') == 1  # the other rank is the fullest
    assert "prefers-color-scheme: dark" in page


@pytest.mark.parametrize(
    "steps",
    [[], [step(1)], [step(1, tokens_per_second=-1)], [step(1, peak={}, parts={}, slowest=None, loss=None, mfu=None)]],
)
def test_a_short_run_has_a_page(tmp_path: Path, steps: list[dict[str, Any]]) -> None:
    written(
        tmp_path, ("run", {**RUN, "estimated_seconds": None, "estimated_memory": []}), *(("step", s) for s in steps)
    )
    ElementTree.fromstring(report(tmp_path).replace("<!DOCTYPE html>", ""))


def test_a_long_run_is_drawn_with_few_points(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    with log.path.open("a") as file:
        for kind, record in (("run", RUN), *(("step", step(n, loss=1.0)) for n in range(1, 5001))):
            file.write(json.dumps({"kind": kind, **record}) + "\n")
    page = report(tmp_path)
    assert len(page) < 600_000
    path = re.search(r'class="front"', pictures(page)["loss"])
    assert path and pictures(page)["loss"].count("L") < 500


def test_the_command(tmp_path: Path) -> None:
    written(tmp_path, ("run", RUN), ("step", step(1)))
    found = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert found.exit_code == 0 and (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")
    missing = CliRunner().invoke(app, ["report", str(tmp_path / "none")])
    assert missing.exit_code == 2 and "there is no log" in missing.output
