"""What ``meshwright launch`` says of a command in another order, and after a run that has died."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.launchers import run_command
from meshwright.checkpoint.files.local_disk import note_saved
from meshwright_hf.launch.job import RESUME_VARIABLE, Launch, misplaced_options, script_and_arguments
from meshwright_hf.launch.launcher import saves_noted
from meshwright_hf.trainer.folders import checkpoint_to_resume
from meshwright_tools.cli import app


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "show.py"
    path.write_text("print('started')")
    return path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("{script} --tp 2", "--tp 2 stands after .*write it before the script: meshwright launch --tp 2 .*show.py"),
        ("--cpu {script} --num_processes=2", "--num_processes=2 stands after"),
        ("--dp 2 -- torchrun --nproc-per-node 2 {script}", "in place of torchrun; leave torchrun and its options out"),
        ("--dp 2 -- python -m torch.distributed.run {script}", "in place of torch.distributed.run"),
        ("--dp 2 -- python", "no script python"),
        ("--dp 2 --resume out/checkpoint-9 {script}", "--resume out/checkpoint-9: there is no such folder"),
        ("--dp 2 a.ipynb", "a.ipynb is a notebook; start its code from a cell by accelerate's notebook_launcher"),
        ("--dp 2 -- python -u", "names no script; write meshwright launch"),
        ("--dp 2 -- python -c 1", "python -c 1 names no script"),
        ("--cpu --dp 2 -m {script}", "-m takes the name of a module.*show.py leave -m out"),
    ],
)
def test_a_command_of_another_order_is_named(options: str, message: str, script: Path) -> None:
    done = CliRunner().invoke(app, ["launch", *options.format(script=script).split()])
    assert done.exit_code == 2 and re.search(message, done.output), done.output


def test_python_before_the_script_is_left_out() -> None:
    for given in (
        ["t.py", "-x"],
        ["python", "t.py", "-x"],
        ["/usr/bin/python3.11", "-u", "t.py", "-x"],
        ["/usr/bin/env", "python", "-W", "ignore", "-X", "dev", "t.py", "-x"],
    ):
        assert script_and_arguments(given[0], given[1:]) == ("t.py", ["-x"], False)
    assert script_and_arguments("python", ["-m", "a.b", "-m"]) == ("a.b", ["-m"], True)


def test_an_option_that_the_script_has_is_the_scripts(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("parser.add_argument('--tp')")
    assert misplaced_options(str(path), ["--tp", "2"], {"--tp"}) is None
    assert misplaced_options(str(path), ["--dp", "2"], {"--tp"}) is None


DYING = """
import os, sys, torch, meshwright as mw
from pathlib import Path
from support.models import build, tokens

model = build("llama")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, _ = mw.to_distributed(model, optimizer)
for step in range(3):
    ids = tokens(2, 8)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mw.save_checkpoint(f"runs/step-{step}", model, optimizer, step=step)
model.save_pretrained("weights")
torch.distributed.barrier()
if os.environ["RANK"] == "1":
    for part in Path("runs/step-2").glob("part-*.safetensors"):
        part.write_bytes(b"")
    sys.exit(7)
torch.distributed.barrier()
"""


def test_after_a_death_the_newest_whole_checkpoint_and_the_command_are_named(
    tmp_path: Path, preloaded_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(DYING)
    monkeypatch.setenv("PYTHON_EXEC", str(preloaded_python))
    done = run_command("launch", "--json", "--cpu", "--tp", "2", "train.py", "--lr", "1e-4 x", folder=tmp_path)
    assert done.code == 7, done.output
    last = [
        line.removeprefix("meshwright launch: ") for line in done.output.splitlines() if "meshwright launch:" in line
    ]
    assert last[-3] == f"the newest whole checkpoint of this run is {tmp_path / 'runs/step-1'}"
    assert "write after to_distributed: meshwright.load_checkpoint(" in last[-2]
    command = "meshwright launch --json --cpu --tp 2 train.py --lr '1e-4 x'"
    assert last[-1] == f"the command that goes on from it: {command}"
    error = json.loads(done.output[done.output.rindex('{\n  "error"') :])["error"]
    assert (error["kind"], error["exit_code"]) == ("ProcessFailedError", 7)
    assert error["message"].splitlines() == last[-4:] and last[-4].startswith("rank 1 ended with exit code 7")


def test_a_trainers_checkpoint_goes_on_by_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with saves_noted() as last_words:
        for step in (2, 4):
            folder = tmp_path / f"checkpoint-{step}"
            folder.mkdir()
            (folder / "trainer_state.json").write_text("{}")
            note_saved(folder)
        monkeypatch.setattr("meshwright_hf.launch.launcher._is_whole", lambda folder: folder.name == "checkpoint-2")
        script = tmp_path / "t.py"
        script.write_text("")
        monkeypatch.setattr(sys, "argv", ["meshwright", "launch", "--resume", "old", "--dp", "2", str(script)])
        said = last_words(Launch(script=str(script), num_processes=2))
    newest = tmp_path / "checkpoint-2"
    assert said == [
        f"the newest whole checkpoint of this run is {newest}",
        f"the command that goes on from it: meshwright launch --resume {newest} --dp 2 {script}",
    ]
    monkeypatch.setenv(RESUME_VARIABLE, str(newest))
    monkeypatch.setattr("meshwright_hf.trainer.folders._check", lambda path: None)
    assert checkpoint_to_resume(str(tmp_path), None) == str(newest)
    assert checkpoint_to_resume(str(tmp_path), False) is None
