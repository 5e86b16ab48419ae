"""The report as its reader works it: runs beside each other, the folders that it reads, the server, and a browser."""

from __future__ import annotations

import html
import json
import math
import re
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshwright.errors import PlanError
from meshwright.monitor.records import RunLog
from meshwright_tools.cli import app
from meshwright_tools.report import report as report_server
from meshwright_tools.report.report import ReportServer, page_of, report
from meshwright_tools.report.report_data import alerts, report_data
from meshwright_tools.report.run_folders import find_runs

RUN: dict[str, Any] = {
    "first_step": 0, "model": "Llama", "parameters": 22_176, "plan": "dp2", "why": "given in the call",
    "mesh": {"dp": 2}, "ranks": 2, "device": "h100-sxm", "max_steps": 400, "estimated_seconds": 0.5, "band": 0.4,
    "revision": "0123456789ab", "estimated_memory": [{"weights": 2.0**31}], "settings": {"lr": 1e-3}, "time": 1000.0,
}  # fmt: skip


def step(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": number, "loss": 5.0 - number / 100, "norm": 1.0, "lr": 1e-3, "tokens": 4096, "seconds_per_step": 0.5,
        "tokens_per_second": 8192.0, "ranks": 2, "mfu": 0.4, "peak": {0: 2.0**31, 1: 2.0**32}, "slowest": 1,
        "behind": 0.01, "parts": {"forward": 0.1, "backward": 0.3, "optimizer": 0.05, "between": 0.05}, "waited": 0.0,
        "busy": {0: 0.4, 1: 0.5}, "read": {0: 0.01, 1: 0.02}, "left": 10.0, "time": 1000.0 + number, **changes,
    }  # fmt: skip


def written(folder: Path, **changes: Any) -> RunLog:
    log = RunLog(folder)
    log.write("run", {**RUN, **changes})
    for number in range(10, 210, 10):
        log.write("step", step(number))
    return log


def test_runs_stand_beside_each_other(tmp_path: Path) -> None:
    written(tmp_path / "a").write("values", {"step": 100, "values": {"eval_loss": 4.5, "accuracy": "nan"}})
    changes = {"revision": "ffffffffffff", "settings": {"lr": 2e-3}}
    log = written(tmp_path / "b", **changes)
    log.write("fault", {"step": 200, "what": "rank 1 is gone"})
    log.write("run", {**RUN, "first_step": 200, "plan": "dp1", "estimated_seconds": 0.8, "band": math.nan, **changes})
    log.write("step", step(210, loss=50.0, seconds_per_step=1.0))
    page = report(tmp_path)  # the folder of both
    root = ElementTree.fromstring(page.replace("<!DOCTYPE html>", ""))
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in root.iter("tr") if row.get("class") == "differs"}
    assert rows == {
        "plan": ["dp2", "dp1"], "git revision": ["0123456789ab", "ffffffffffff"], "lr": ["0.001", "0.002"]
    }  # fmt: skip
    words = " ".join(root.itertext())
    for shown in (
        "b, the newest of 2 runs", "22,176 parameters", "b: start", "b: alert", "the loss jumps from",
        "a: time per step of 19 lines", "median 500 ms (1.00\u00d7)", "19 of 19 lines in the band",
        "These pictures are of b, the last of 2 runs",
    ):  # fmt: skip
        assert shown in words, shown
    first, second = report_data(find_runs([tmp_path]))
    assert first["values"] == {"eval_loss": {"step": [100], "value": [4.5]}}  # JSON has no nan
    assert first["axes"]["tokens"][-1] == 20 * 4096 and first["axes"]["hours"][-1] == pytest.approx(
        200 / 3600, rel=1e-5
    )
    assert first["columns"]["busy/1"] == [0.5] * 20 and first["columns"]["read"] == [0.02] * 20
    assert [(mark["kind"], mark["step"]) for mark in second["marks"]] == [
        ("start", 200), ("fault", 200), ("alert", 210)
    ]  # fmt: skip
    assert [(one["from"], one["to"], one["seconds"], one["band"]) for one in second["estimates"]] == [
        (0, 200, 0.5, 0.4), (200, None, 0.8, None)
    ]  # fmt: skip


def test_alerts_are_losses_that_jump_or_are_no_numbers() -> None:
    steady = [{"step": n, "loss": 2.0 + 0.01 * (n % 3)} for n in range(40)]
    assert not list(alerts(steady))
    assert list(alerts([*steady, {"step": 40, "loss": 2.1}])) == []  # within a tenth
    assert [at for at, _ in alerts([*steady, {"step": 40, "loss": 3.0}])] == [40]
    assert list(alerts([{"step": 1, "loss": "nan", "norm": "inf"}])) == [(1, "loss is nan"), (1, "norm is inf")]


def test_a_long_run_stays_below_one_megabyte(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    peaks = {rank: 2.0**31 + rank for rank in range(16)}
    lines = [{"kind": "step", **step(n, loss=math.pi * n, peak=peaks)} for n in range(4_000)]
    with log.path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in [{"kind": "run", **RUN}, *lines])
    assert len(report(tmp_path)) < 1_000_000


STATE = {
    "max_steps": 40, "logging_steps": 10, "log_history": [
        {"step": 10, "loss": 2.0, "grad_norm": 1.5, "learning_rate": 1e-4, "peak_memory_gib": 1.0,
         "peak_memory_rank": 1, "rewards/margins": 0.25},
        {"step": 10, "eval_loss": 2.25, "eval_runtime": 1.0},
        {"step": 20, "loss": "nan"},
    ],
}  # fmt: skip


def test_the_folders_of_a_trainer_are_read(tmp_path: Path) -> None:
    for number in (20, 9, 100):
        (tmp_path / f"checkpoint-{number}").mkdir()
    newest = tmp_path / "checkpoint-100"
    (newest / "trainer_state.json").write_text(json.dumps(STATE))
    (tmp_path / "checkpoint-9" / "trainer_state.json").write_text("{}")
    (tmp_path / "checkpoint-20" / "trainer_state.json").write_text("[" * 200_000)
    (newest / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    (newest / "meshwright_progress.json").write_text('{"plan": {"dp": 1, "tp": 2}}')
    for path in (tmp_path, newest, newest / "trainer_state.json"):
        [run] = find_runs([path])
        assert [one["step"] for one in run.records.steps] == [10, 20]
        assert run.records.steps[0]["norm"] == 1.5 and run.records.steps[0]["peak"] == {"1": 2.0**30}
        assert run.records.values[0]["values"] == {"rewards/margins": 0.25}
        assert run.records.values[1]["values"]["eval_loss"] == 2.25
    page = report(tmp_path)
    assert "dp1 tp2" in page and "Qwen3ForCausalLM" in page and "loss is nan" in page
    (newest / "config.json").write_text('{"architectures": 5}')
    assert "a Trainer's run" in html.unescape(report(newest))
    with pytest.raises(PlanError, match="is not the state of a Trainer"):
        find_runs([tmp_path / "checkpoint-20"])
    with pytest.raises(PlanError, match="is not the state of a Trainer"):
        report(tmp_path / "checkpoint-9")


def test_a_run_that_has_logged_nothing_yet_is_left_out(tmp_path: Path) -> None:
    RunLog(tmp_path / "a")
    with pytest.raises(PlanError, match="none of its 0 lines"):
        find_runs([tmp_path])
    written(tmp_path / "b")
    assert [run.name for run in find_runs([tmp_path])] == ["b"]
    with pytest.raises(PlanError, match="none of its 0 lines"):
        find_runs([tmp_path / "b", tmp_path / "a"])  # named by the user


@pytest.mark.parametrize("text", ["nan", "unknown"])
def test_text_in_a_trainer_s_state_is_no_figure(text: str, tmp_path: Path) -> None:
    names = ("peak_memory_gib", "peak_memory_rank", "slowest_rank", "slowest_rank_behind_ms", "grad_norm")
    history = [{"step": 10, "loss": 2.0, **dict.fromkeys(names, text)}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    [run] = find_runs([tmp_path])
    norm = {"norm": text} if text == "nan" else {}
    assert run.records.steps == [{"step": 10, "time": None, "loss": 2.0, **norm}]
    assert report(tmp_path)


def test_a_folder_without_a_run_is_told(tmp_path: Path) -> None:
    written(tmp_path / "a")
    assert len(find_runs([tmp_path / "a", tmp_path / "a" / ".." / "a"])) == 1
    (tmp_path / "a" / "trainer_state.json").write_text(json.dumps(STATE))
    with pytest.raises(PlanError, match="name each folder once"):
        report(tmp_path / "a" / "trainer_state.json", tmp_path / "a")
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "events.out.tfevents.1.host").write_bytes(b"")
    with pytest.raises(PlanError, match=r"pip install tensorboard|has no figures yet"):
        report(tmp_path / "events")
    found = CliRunner().invoke(app, ["report", str(tmp_path / "a"), "--json"])
    assert found.exit_code == 0 and json.loads(found.stdout)["runs"][0]["name"] == "a"
    for every in ("0", "inf"):
        found = CliRunner().invoke(app, ["report", str(tmp_path / "a"), "--serve", "--every", every])
        assert found.exit_code == 2 and "must be a number of seconds above 0" in found.output
    found = CliRunner().invoke(app, ["report", str(tmp_path / "a"), "--serve", "--output", "b.html"])
    assert found.exit_code == 2 and "give one of them" in found.output


def test_the_server_follows_the_run_for_this_machine_alone(tmp_path: Path) -> None:
    log = written(tmp_path)
    with ReportServer([tmp_path]) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        read = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        assert b"<!DOCTYPE html>" in read(server.address).read()
        log.write("step", step(220))
        news = json.load(read(f"{server.address}data.json"))
        assert news["runs"][0]["axes"]["step"][-1] == 220 and "220 of 400" in news["tiles"]
        request = urllib.request.Request(server.address, headers={"Host": "evil.example"})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            read(request)
        with pytest.raises(PlanError, match=r"--port .* cannot be used"):
            ReportServer([tmp_path], port=server.server_address[1])
        server.shutdown()


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# The script works the page like a reader and reports what it shows. Errors become the title, which fails the test.
SCENARIO = """<script>
const report = {};
onerror = (message) => { document.title = 'error: ' + message; };
const $ = (selector) => document.querySelector(selector), $$ = (selector) => [...document.querySelectorAll(selector)];
const labels = (id) => $$(`#chart-${id} .keys li`).map(row => row.textContent);
const axis = (id) => $$(`#chart-${id} text.axis[text-anchor=end]`).map(text => text.textContent);
const point = (id, kind, share) => { const plot = $(`#chart-${id} .plot`), box = plot.getBoundingClientRect();
  const clientX = box.x + 62 + share * (box.width - 72), clientY = box.y + 50;
  plot.dispatchEvent(new PointerEvent(kind, { bubbles: true, clientX, clientY })); };
report.charts = $$('.chart').map(chart => chart.id.slice(6));
report.scroll = document.documentElement.scrollWidth;
report.fits = $$('.plot svg').every(svg => svg.getBoundingClientRect().width <= svg.parentNode.clientWidth + 1);
report.loss = labels('loss');
point('loss', 'pointermove', 0.5);
report.hovered = [labels('loss'), $('#chart-loss .tip').textContent, labels('lr'), $$('.crosshair').length];
point('loss', 'pointerleave', 0.5);
report.left = $('#chart-loss .tip').hidden;
point('norm', 'pointerdown', 0.25); point('norm', 'pointermove', 0.5); point('norm', 'pointerup', 0.5);
point('norm', 'pointerleave', 0.5);
report.zoomed = [location.hash, !$('#zoom-out').disabled];
$('#zoom-out').click();
report.whole = location.hash;
$('#smooth').value = 0.9; $('#smooth').dispatchEvent(new Event('input'));
report.smooth = [$$('#chart-loss .raw').length, labels('loss'), location.hash];
$('#chart-loss .log').click();
report.log = [$('#chart-loss .log').getAttribute('aria-pressed'), location.hash];
$('#runs input').click();
report.hidden = [labels('loss').length, location.hash];
$('#axis').value = 'tokens'; $('#axis').dispatchEvent(new Event('change'));
report.tokens = [$('#chart-loss svg').textContent, location.hash];
location.hash = '#'; dispatchEvent(new Event('hashchange'));
report.reset = [labels('loss').length, $('#axis').value, $('#smooth').value];
report.marks = ['start', 'fault', 'alert'].map(kind => $$(`#chart-loss .mark-${kind}`).length);
report.levels = $$('#chart-seconds_per_step .level').length;
report.external = performance.getEntriesByType('resource').map(entry => entry.name);
setTimeout(() => {
  report.live = [$('#tiles').textContent.includes('230 of 400'), labels('loss'), $('#live').textContent];
  document.title = 'done';
  const node = document.body.appendChild(document.createElement('pre'));
  node.id = 'report';
  node.textContent = JSON.stringify(report);
}, 1500);
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH: install Debian's package chromium")
def test_a_reader_works_the_page_in_a_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "runs" / "a").write("values", {"step": 100, "values": {"eval_loss": 4.5}})
    log = written(tmp_path / "runs" / "b")
    log.write("fault", {"step": 200, "what": "rank 1 is gone"})
    log.write("run", {**RUN, "first_step": 200})
    log.write("step", step(210, loss="nan"))

    def then_goes_on(runs: Any, *, live: float) -> str:
        page = page_of(runs, live=live).replace("</body>", SCENARIO)
        log.write("step", step(230, loss=1.0, time=1300.0))
        return page

    monkeypatch.setattr(report_server, "page_of", then_goes_on)
    with ReportServer([tmp_path / "runs"], every=0.5) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
                 "--hide-scrollbars", "--disable-background-networking", "--disable-component-update", "--disable-sync",
                 "--no-proxy-server", "--window-size=1280,900", "--virtual-time-budget=4000",
                 f"--user-data-dir={tmp_path / 'profile'}")  # fmt: skip
        command = [str(CHROMIUM), *flags, "--dump-dom", server.address]
        dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
        server.shutdown()
    assert "<title>done</title>" in dom, re.search(r"<title>.*?</title>", dom)
    found = json.loads(html.unescape(re.search(r'<pre id="report">(.*?)</pre>', dom).group(1)))  # type: ignore[union-attr]
    assert found["charts"] == [
        "loss", "norm", "lr", "tokens_per_second", "mfu", "seconds_per_step", "parts", "memory", "busy", "behind",
        "read",
    ]  # fmt: skip
    assert found["scroll"] <= 1280 and found["fits"]
    assert found["loss"] == ["a: training3", "a: eval_loss4.5", "b: training3"]
    at_half, tip, rates, crosshairs = found["hovered"]  # steps 10 to 210, so that half is step 110
    assert at_half == ["a: training3.9", "a: eval_loss4.5", "b: training3.9"] and "step 110" in tip and "3.9" in tip
    assert len(rates) == 2 and crosshairs == len(found["charts"]) and found["left"]
    assert found["zoomed"] == ["#zoom=60%3A110", True] and found["whole"] == ""
    raw, smoothed, address = found["smooth"]
    assert raw == 2 and address == "#smooth=0.9"
    # The debiased exponential mean of twenty losses that fall by 0.1 from 4.9.
    weights = [0.9**n for n in range(20)]
    mean = sum(w * (3.0 + 0.1 * n) for n, w in enumerate(weights)) / sum(weights)
    assert smoothed[0] == f"a: training{mean:.4g}"
    assert found["log"] == ["true", "#smooth=0.9&log=loss"]
    assert found["hidden"] == [1, "#smooth=0.9&log=loss&hide=a"]
    assert "60 k" in found["tokens"][0] and found["tokens"][1].startswith("#x=tokens&")
    assert found["reset"] == [3, "step", "0"]
    assert found["marks"] == [1, 1, 1] and found["levels"] == 3
    assert all(name.endswith("/data.json") for name in found["external"])
    changed, losses, words = found["live"]
    assert changed and losses[-1] == "b: training1" and words.startswith("live, read at")
