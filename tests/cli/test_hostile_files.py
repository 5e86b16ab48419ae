"""What files from outside hold is data: on terminals, in emitted files and in reports, however odd or large it is."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import shlex
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from meshwright.choose.given_plan import read_plan, save_plan
from meshwright.errors import PlanError
from meshwright.monitor.records import FILE, RunRecords, provenance
from meshwright.plan.config import ToDistributedConfig
from meshwright.printable import shell_word
from meshwright_hf.launch.launcher import accelerate_config
from meshwright_plan.job.candidate import Candidate
from meshwright_plan.machine.devices import device
from meshwright_plan.machine.hardware import Cluster, HardwareProfile
from meshwright_tools.cli import app
from meshwright_tools.cluster_files import kubernetes, ray, skypilot, slurm
from meshwright_tools.cluster_files.cluster_job import ClusterJob
from meshwright_tools.report.report import ReportServer, _Handler, figures_of, report, write_report
from meshwright_tools.report.report_data import header
from meshwright_tools.report.run_folders import find_runs

PLAN = Candidate(dp=2, tp=1, micro_batch_size=1, gradient_accumulation_steps=1)
ENDS = [*"\n\r\x0b\x0c\x1c\x85\u2028\u2029\\'\ud800\ufeff", '"""', "\x1b[31m"]


@pytest.mark.quick
@pytest.mark.parametrize("scheduler", [slurm, kubernetes, skypilot, ray])
def test_a_name_in_an_emitted_file_is_a_comment(scheduler: Any) -> None:
    """Names of folders and of measured devices: the file without its comments is the one of a plain name."""

    def code(name: str, of_device: str) -> Any:
        cluster = Cluster(device=dataclasses.replace(device("h100-sxm"), name=of_device), gpus=2)
        text = scheduler.text(ClusterJob(plan=PLAN, cluster=cluster, mixed_precision="no", model=name))
        assert text.replace("\n", "").isprintable() and text.count("MARKER") <= 2
        if scheduler is ray:
            return ast.dump(ast.parse(text))
        if scheduler is slurm:
            assert subprocess.run(["bash", "-n"], input=text.encode()).returncode == 0
            return [line for line in text.splitlines() if not line.startswith("# ")]
        loaded = yaml.safe_load(text)
        if scheduler is skypilot:
            assert loaded["resources"].pop("accelerators").endswith(":2") or of_device != "h100-sxm"
        return loaded

    plain = code("m", "h100-sxm")
    for end in ENDS:
        assert code(f"m{end}MARKER: 1{end}", "h100-sxm") == plain, repr(end)
    assert code("m", "x\nMARKER: 1\n") == plain


@pytest.mark.quick
def test_a_printed_command_is_one_line_and_the_command() -> None:
    words = ["my pl$HOME.yaml", "a'b", "a\nb\\c'd", "tab\t\x1b", "\u2028x", "-v", "plain.yaml"]
    for word in words:
        shown = shell_word(word)
        assert shown.isprintable()
        done = subprocess.run(["bash", "-c", f"printf %s {shown}"], capture_output=True, env={"LC_ALL": "C.UTF-8"})
        assert done.stdout.decode() == word
    config = accelerate_config(PLAN, Cluster(device=device("cpu"), gpus=2), saved=Path(words[0]))
    (line,) = [line for line in config.splitlines() if "accelerate launch" in line]
    assert "MESHWRIGHT_PLAN=" + words[0] in shlex.split(line, comments=False)


@pytest.mark.quick
def test_a_command_prints_no_control_characters(tmp_path: Path) -> None:
    name = str(tmp_path / "a\x1b]52;c;x\x07b")
    for command in ("inspect", "report", "export", "plan weigh --gpus 2 --model"):
        done = CliRunner().invoke(app, [*command.split(), name, *(["out"] if command == "export" else [])])
        assert done.exit_code == 2 and "\x1b" not in done.output and "\x07" not in done.output, done.output


PROFILES = {
    "deep": "[" * 100_000,
    "digits": '{"version": 3, "processes": 1' + "0" * 5000 + "}",
    "a text": '{"version": 3, "name": "x", "coefficients": {"matmul": "y"}}',
    "a device": '{"version": 3, "name": "x", "coefficients": {}, "device": {"name": ["x"]}}',
    "a version": '{"version": [' + "1," * 9999 + "1]}",
}


@pytest.mark.quick
@pytest.mark.parametrize("kind", PROFILES)
def test_an_odd_profile_is_one_sentence(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(PROFILES[kind])
    with pytest.raises(PlanError, match=r"machine.json") as error:
        HardwareProfile.load(path)
    assert len(str(error.value)) < 600 + len(str(path))


GOOD: list[dict[str, Any]] = [{"kind": "run", "first_step": 0}, {"kind": "step", "step": 1, "loss": 1.0}]
ODD_LINES: dict[str, str] = {
    "deep": "[" * 200_000,
    "digits": '{"kind": "step", "step": 2, "loss": 1' + "0" * 400 + "}",
    "twice": '{"kind": "step", "step": 2, "step": 3}',
    "NaN step": '{"kind": "fault", "step": NaN, "what": "x"}',
    "kind": '{"kind": ["step"], "step": 2}',
    **{
        f"{kind} {name} {value!r:.20}": json.dumps({"kind": kind, "step": 2, "first_step": 0, name: value})
        for kind, names in {
            "run": (
                "first_step",
                "max_steps",
                "mesh",
                "parameters",
                "ranks",
                "versions",
                "settings",
                "estimated_memory",
                "plan",
            ),
            "step": ("step", "peak", "parts", "slowest", "expert_load", "loss", "left", "time", "tokens"),
            "estimate": ("hints", "measured_peak", "estimated_memory"),
            "values": ("values", "step"),
            "fault": ("step", "what"),
        }.items()
        for name in names
        for value in ("x", [1], {"x": [1]}, 10**39, -1, True, 1.5)
    },
}


def test_an_odd_line_of_a_log_is_torn_and_the_page_shows_the_others(tmp_path: Path) -> None:
    """Where a value has the right form, the page takes it; none of them ends the command."""
    path, torn = tmp_path / FILE, 0
    kept = []
    for name, line in ODD_LINES.items():
        path.write_text("".join(json.dumps(one) + "\n" for one in GOOD) + line + "\n")
        (run,) = find_runs([path])
        torn += run.records.torn
        kept += [] if run.records.torn else [line]
        assert header([run])["tiles"] and json.loads(figures_of([path]))["runs"], name
    assert torn > 0.6 * len(ODD_LINES)
    path.write_text("".join(json.dumps(one) + "\n" for one in GOOD) + "\n".join([*kept, *ODD_LINES.values()]))
    assert f"{torn} line(s) of the log are no records" in report(path)


def test_the_time_of_a_log_is_linear(tmp_path: Path) -> None:
    line = '{"kind": "step", "step": 2, "loss": [' + "1," * 50_000 + "1]}\n"
    start = time.process_time()
    for _ in range(20):
        RunRecords().add("step", json.loads(line))
    assert time.process_time() - start < 5


def test_the_server_answers_with_a_sentence_and_leaves_who_says_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / FILE).write_text("".join(json.dumps(one) + "\n" for one in GOOD))
    monkeypatch.setattr("meshwright_tools.report.report.page_of", lambda *_, **__: [][0])
    assert _Handler.timeout is not None and _Handler.timeout <= 60  # of a connection that says nothing
    with ReportServer([tmp_path]) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(urllib.error.HTTPError) as answer:
            urllib.request.urlopen(server.address, timeout=10)
        assert answer.value.code == 500 and b"cannot be shown: IndexError" in answer.value.read()
        server.shutdown()


def test_values_of_secrets_reach_no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["train.py", "--hf_token", "hf_MARKER", "--wandb-key=MARKER", "--password", "MARKER", "--max_tokens", "64"]
    monkeypatch.setattr("sys.argv", [*words, "--url=https://user:MARKER@host/x"])
    settings = {"hub_token": "MARKER", "apiKey": "MARKER", "hub": {"client_secret": "MARKER"}, "token_count": 7}
    found = provenance(ToDistributedConfig(), None, settings)
    assert "MARKER" not in json.dumps(found)
    assert "--max_tokens 64" in found["command"] and "user:***@host" in found["command"]
    assert found["settings"]["token_count"] == 7


@pytest.mark.quick
def test_files_are_written_whole_with_the_rights_of_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, plan, page, profile = (tmp_path / name for name in (FILE, "plan.yaml", "report.html", "machine.json"))
    log.write_text("".join(json.dumps(one) + "\n" for one in GOOD))
    writes = {
        plan: lambda: save_plan(PLAN, plan, comment="m\n\x1b\x85x"),
        page: lambda: write_report([tmp_path], page),
        profile: lambda: HardwareProfile(name="x").save(profile),
    }
    before = os.umask(0o027)
    try:
        for path, write in writes.items():
            write()
            assert path.stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)
    assert read_plan(plan)["dp"] == 2
    old = {path: path.read_text() for path in writes}

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    for path, write in writes.items():
        with pytest.raises(PlanError, match=r"No space left.*; the file that was there is whole") as error:
            write()
        assert str(path) in str(error.value) and path.read_text() == old[path]
    assert sorted(tmp_path.iterdir()) == sorted([*writes, log])
