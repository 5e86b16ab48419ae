"""Errors of the command line: one line for people, an object for programs; and one spelling of options."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

from meshwright_tools.cli import app, main


def told(words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["meshwright", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


@pytest.mark.parametrize(
    ("words", "written"),
    [
        ("plan --batch-size 8", "No such option: --batch-size; write --global-batch"),
        ("plan weigh --nodes 2", "No such option: --nodes; write --gpus 16 --gpus-per-node 8"),
        ("launch --nproc_per_node 2 train.py", "No such option: --nproc-per-node; write --num-processes"),
        ("launch --gpus 2 train.py", "No such option: --gpus; write --num-processes"),
        ("launch --nnodes=2 train.py", "No such option: --nnodes; write --num-machines"),
        ("report --html page.html runs", "No such option: --html; write --output"),
        ("plan Qwen/Qwen3-8B", "if it is the model, write --model Qwen/Qwen3-8B"),
        ("plan --gpuss 8", "Possible options: --gpu"),  # an error of spelling is still compared with our own options
    ],
)
def test_what_others_call_an_option_is_known(words: str, written: str) -> None:
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code == 2 and written in done.output, done.output


@pytest.mark.parametrize(
    ("words", "command", "kind", "message"),
    [
        ("inspect nowhere --json", "inspect", "CheckpointError", "there is no checkpoint in nowhere"),
        ("export nowhere out --json", "export", "CheckpointError", "there is no checkpoint in nowhere"),
        ("report nowhere --json", "report", "PlanError", "there is no log"),
        ("plan --json", "plan", "PlanError", "--model is missing"),
        ("plan weigh --json --dp 2", "plan weigh", "PlanError", "--model is missing"),
        ("calibrate --json --output no/where.json", "calibrate", "ValueError", "there is no directory no"),
        ("verify --json --model nowhere --plan dp0", "verify", "PlanError", "dp"),
        ("launch --json --cpu --dp 2 nowhere.py", "launch", "PlanError", "there is no script nowhere.py"),
        ("launch --json --chek nowhere.py", "launch", "NoSuchOption", "No such option: --chek"),
        ("inspect --json --chek x", "inspect", "NoSuchOption", "No such option: --chek"),
        ("plan weigh --json --dp two", "plan weigh", "BadParameter", "Invalid value for '--dp'"),
        ("export --json", "export", "MissingParameter", "Missing argument 'CHECKPOINT'"),
    ],
)
def test_an_error_is_an_object_with_json(
    words: str,
    command: str,
    kind: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, printed, said = told(words, monkeypatch, capsys)
    error = json.loads(printed)["error"]
    assert error["command"] == f"meshwright {command}" and error["kind"] == kind and message in error["message"]
    assert code == error["exit_code"] == 2 and said.startswith(f"meshwright {command}: ") and message in said
    if kind in ("CheckpointError", "PlanError"):
        code, printed, said = told(words.replace("--json", ""), monkeypatch, capsys)
        assert code == 2 and printed == "" and message in said


@pytest.mark.parametrize("name", ["--num_processes", "--num-processes"])
def test_an_option_has_dashes_or_underscores(name: str) -> None:
    found = CliRunner().invoke(app, ["launch", name, "2", "--cpu", "nowhere.py"])
    assert found.exit_code == 2 and "there is no script nowhere.py" in found.output


def test_help_spells_options_with_dashes_and_offers_completion() -> None:
    found = CliRunner().invoke(app, ["launch", "--help"]).output
    assert "  --num-processes" in found and "  --num_processes" not in found
    assert "--install-completion" in CliRunner().invoke(app, ["--help"]).output
