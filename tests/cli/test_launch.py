"""``meshwright launch``: the processes, their plan, how they end, and what is refused before they start."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from torch.utils.data import DataLoader
from typer.testing import CliRunner

import meshwright as mw
from harness.launchers import run_command
from meshwright.choose.given_plan import PLAN_VARIABLE, REPLAN_VARIABLE, USED_VARIABLE, given_plan, plan_line, read_plan
from meshwright.mesh.process_group import node_count
from meshwright.plan.parts import METHODS
from meshwright.plan.schedule import SCHEDULES
from meshwright_hf.launch import job as network
from meshwright_hf.launch import launcher
from meshwright_hf.launch.job import Launch, find_plan
from meshwright_hf.launch.launcher import accelerate_arguments, watched_plan
from meshwright_tools.cli import app
from meshwright_tools.cli.command import Context, Schedule
from support.models import build, tokens

PLAN = mw.ParallelPlan(dp=2, tp=2, sequence_parallel=True, zero_stage=1)


@pytest.fixture(autouse=True)
def no_plan_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (PLAN_VARIABLE, "GLOO_SOCKET_IFNAME", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Prints what it was started with, in one write, since processes share the output."""
    path = tmp_path / "show.py"
    path.write_text(
        "import os, sys\n"
        "names = ('RANK', 'WORLD_SIZE', 'MESHWRIGHT_PLAN', 'ACCELERATE_USE_CPU', 'GLOO_SOCKET_IFNAME')\n"
        "sys.stdout.write(f'shown { {name: os.environ.get(name) for name in names} } {sys.argv[1:]}\\n')\n"
    )
    return path


def shown(output: str) -> list[str]:
    return sorted(line.partition("shown ")[2] for line in output.splitlines() if "shown " in line)


# Where a plan comes from


def test_the_launchers_plan_is_that_of_to_distributed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(PLAN_VARIABLE, plan_line(dataclasses.asdict(PLAN)))
    for plan in (None, "auto", PLAN):
        assert given_plan(mw.ToDistributedConfig(plan=plan)) == PLAN
    overridden = mw.ToDistributedConfig(sequence_parallel=False)
    assert given_plan(overridden) == dataclasses.replace(PLAN, sequence_parallel=False)
    path = tmp_path / "plan.yaml"
    path.write_text("version: 1\ndp: 2\ntp: 2\nsequence_parallel: true\nzero_stage: 1\n")
    assert given_plan(mw.ToDistributedConfig(plan=path)) == PLAN
    monkeypatch.setenv(PLAN_VARIABLE, str(path))
    assert given_plan(mw.ToDistributedConfig()) == PLAN


def test_another_plan_in_the_config_is_an_error_that_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLAN_VARIABLE, plan_line(dataclasses.asdict(PLAN)))
    with pytest.raises(mw.PlanError, match=r"is ParallelPlan\(dp=4\), but .* with ParallelPlan\(dp=2, tp=2, .*_PLAN"):
        given_plan(mw.ToDistributedConfig(plan=mw.ParallelPlan(dp=4)))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ('{"version": 1, "dp": ', "MESHWRIGHT_PLAN: line 1: .*a plan has one field per line"),
        ('{"version": 2, "dp": 2}', "MESHWRIGHT_PLAN: the plan has version 2"),
        ('{"version": 1, "tpp": 2}', "MESHWRIGHT_PLAN: a plan has no field 'tpp'; write tp"),
        ('{"version": 1, "replicate": 2}', "MESHWRIGHT_PLAN: replicate is not available"),
        ("nowhere.yaml", "nowhere.yaml: no such plan"),
    ],
)
def test_an_environment_without_a_plan_that_can_be_read(
    value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLAN_VARIABLE, value)
    with pytest.raises(mw.PlanError, match=message):
        given_plan(mw.ToDistributedConfig())


def test_a_plan_of_machines_that_are_lost_gives_way_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only if the user allowed it; to_distributed then asks the planner."""
    monkeypatch.setenv(PLAN_VARIABLE, plan_line(dataclasses.asdict(PLAN)))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert given_plan(mw.ToDistributedConfig()) == PLAN
    monkeypatch.setenv(REPLAN_VARIABLE, "1")
    assert given_plan(mw.ToDistributedConfig()) is None
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert given_plan(mw.ToDistributedConfig()) == PLAN


def test_sizes_file_and_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert find_plan(None, {}, 4) is None
    assert find_plan(None, {"tp": 2}, 6) == mw.ParallelPlan(dp=3, tp=2)
    assert find_plan(None, {"tp": 2}, None) == mw.ParallelPlan(tp=2)
    assert find_plan(None, {"pp": 2, "schedule": "zbv"}, 4) == mw.ParallelPlan(pp=2, dp=2, schedule="zbv")
    assert tuple(schedule.value for schedule in Schedule) == SCHEDULES
    hybrid = {"cp": 4, "context": "hybrid", "ulysses": 2}
    assert find_plan(None, hybrid, 8) == mw.ParallelPlan(dp=2, cp=4, context="hybrid", ulysses=2)
    assert tuple(method.value for method in Context) == METHODS
    with pytest.raises(mw.PlanError, match="--num_processes 6 is not divisible by --tp 1 x --cp 4"):
        find_plan(None, {"cp": 4}, 6)
    monkeypatch.setenv(PLAN_VARIABLE, plan_line({"dp": 2}))
    assert find_plan(None, {}, None) == mw.ParallelPlan(dp=2)
    assert find_plan(None, {"tp": 4}, None) == mw.ParallelPlan(tp=4)
    path = tmp_path / "plan.yaml"
    path.write_text("version: 1\ntp: 8\n")
    assert find_plan(path, {}, None) == mw.ParallelPlan(tp=8)


def test_nodes_are_counted_as_they_were_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert node_count() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert node_count() == 2


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--num_processes 3 --tp 2", "--num_processes 3 is not divisible by --tp 2"),
        ("--num_processes 8 --dp 2 --tp 2", "needs 4 processes, but --num_processes is 8"),
        ("--num_processes 4 --num_machines 3 --main_process_ip 10.0.0.1", "4 cannot be spread evenly over .* 3"),
        ("--num_processes 4 --num_machines 2", "--num_machines 2 needs --main_process_ip"),
        ("--num_processes 4 --num_machines 2 --machine_rank 2 --main_process_ip 10.0.0.1", "2 must be from 0 to 1"),
        ("--num_processes 2 --machine_rank -1", "-1 must be from 0 to 0"),
        ("--num_processes 0", "--num_processes 0 must be at least 1"),
        ("--num_processes 2 --main_process_port 70000", "70000 must be from 1 to 65535"),
        ("--plan plan.yaml --tp 2", "--plan plan.yaml and --tp 2 both give the plan"),
        ("--plan nowhere.yaml", "nowhere.yaml: no such plan"),
        ("--tp 0", "ParallelPlan.tp must be a positive integer, not 0"),
        ("--zero-stage 7", "zero_stage=7 must be 0, 1, 2 or 3"),
        ("--cpu", "--num_processes N, or a plan"),
        ("--cpu --dp 100000", r"100000 processes on this machine, which has \d+ CPU cores.*add --oversubscribe"),
        ("--num_processes 2 --max-restarts -1", "--max-restarts -1 must not be negative"),
        ("--num_machines 1:2 --num_processes 2 --main_process_ip 10.0.0.1", "1:2 lets .* add --max-restarts 3"),
        ("--num_machines 3:2 --num_processes 2 --main_process_ip 10.0.0.1", "3:2 must be MIN:MAX"),
        ("--num_machines two --num_processes 2", "--num_machines two must be a number of machines N, or MIN:MAX"),
        ("--plan dp2+sp", "'dp2\\+sp' is not a word of a plan"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_starts(options: str, message: str, script: Path) -> None:
    done = CliRunner().invoke(app, ["launch", *options.split(), str(script)])
    assert done.exit_code == 2
    assert "meshwright launch: " in done.output
    with pytest.raises(ValueError, match=message):
        raise ValueError(done.output)


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(mw.PlanError, match=r"no script .*/nowhere\.py$"):
        Launch(script=str(tmp_path / "nowhere.py"))
    with pytest.raises(mw.PlanError, match=r"no script package\.train; modules are started with -m"):
        Launch(script="package.train")


def test_a_port_in_use(script: Path) -> None:
    with socket.create_server((network.LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(mw.PlanError, match=f"--main_process_port {port} is in use"):
            launcher.run(Launch(script=str(script), num_processes=2, main_process_port=port, cpu=True))


def test_an_address_to_which_no_way_leads() -> None:
    with pytest.raises(mw.PlanError, match=r"--main_process_ip nowhere\.invalid"):
        network.local_address_towards("nowhere.invalid")


def test_accelerate_is_not_installed(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(mw.PlanError, match=r"pip install 'meshwright\[hf\]'"):
        launcher.run(Launch(script=str(script), num_processes=2))


def test_too_few_gpus(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_gpus", lambda: 2)
    with pytest.raises(mw.PlanError, match="4 processes on this machine need as many GPUs, but it has 2"):
        launcher.run(Launch(script=str(script), num_processes=8, num_machines=2, main_process_ip="10.0.0.1"))
    assert launcher.default_processes(3, cpu=False) == 6


def test_machines_that_do_not_come(tmp_path: Path, script: Path) -> None:
    """Each waits for the other, which was never started."""
    options = ["--num_processes", "2", "--num_machines", "2", "--main_process_ip", "127.0.0.1", "--start_timeout", "1"]
    options += ["--main_process_port", str(network.free_port())]
    first = run_command("launch", *options, "--machine_rank", "0", str(script), folder=tmp_path)
    assert first.code == 2
    assert "not all of the 2 machines joined at 127.0.0.1:" in first.output
    second = run_command("launch", *options, "--machine_rank", "1", str(script), folder=tmp_path)
    assert second.code == 2
    assert "machine 0 was not reached at 127.0.0.1:" in second.output


# What is started


def test_a_plan_that_is_not_used(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The script is not to blame if it failed; and a program's own plan is a use, if it is the launcher's."""
    job = Launch(script=str(script), num_processes=4, plan=PLAN)

    def said(change: Callable[[], Any], **fields: Any) -> str:
        with contextlib.suppress(OSError), watched_plan(dataclasses.replace(job, **fields)):
            capsys.readouterr()
            change()
        assert USED_VARIABLE not in os.environ
        return capsys.readouterr().err

    def fail() -> None:
        raise OSError("the disk is full")

    assert "'dp2 tp2+sp zero1' was never used" in said(lambda: None)
    assert said(fail) == said(lambda: None, plan=None) == ""
    for config in (mw.ToDistributedConfig(), mw.ToDistributedConfig(plan=PLAN)):
        assert said(functools.partial(given_plan, config)) == ""
    assert said(lambda: None, num_machines=2, machine_rank=1, main_process_ip="10.0.0.1") == ""


def test_processes_get_the_plan_and_their_arguments(script: Path, tmp_path: Path) -> None:
    """On CPU too, where accelerate launch --cpu starts one process; options after the script are the script's."""
    done = run_command("launch", "--tp", "2", "--", str(script), "--tp", "3", "--cpu", "x y", folder=tmp_path)
    assert done.code == 0, done.output
    assert "Unless a module that it imports does, the plan 'dp1 tp2 zero0' has no effect" in done.output
    assert "the plan 'dp1 tp2 zero0' was never used: no process called to_distributed" in done.output
    assert "from meshwright_hf.accelerate import Accelerator" in done.output
    lines = shown(done.output)
    assert [line[: line.index(",")] for line in lines] == ["{'RANK': '0'", "{'RANK': '1'"]
    plan = plan_line(dataclasses.asdict(mw.ParallelPlan(tp=2)))
    for line in lines:
        assert f"'WORLD_SIZE': '2', 'MESHWRIGHT_PLAN': '{plan}', 'ACCELERATE_USE_CPU': 'true'" in line
        assert "'GLOO_SOCKET_IFNAME': 'lo'" in line
        assert line.endswith("['--tp', '3', '--cpu', 'x y']")


def test_modules_and_a_single_process(script: Path, tmp_path: Path) -> None:
    for count in (1, 2):
        done = run_command("launch", "--cpu", "--num_processes", str(count), "-m", "show", "x", folder=tmp_path)
        assert done.code == 0, done.output
        lines = shown(done.output)[-count:]
        assert all("'MESHWRIGHT_PLAN': None" in line and line.endswith("['x']") for line in lines)
    assert len(shown(done.output)) == 3


def test_settings_of_the_user_are_left_alone(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Launch(script=str(script), num_processes=2, main_process_ip="127.0.0.1", main_process_port=1234)
    assert "--num_cpu_threads_per_process" in accelerate_arguments(job, on_cpu=True)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "--num_cpu_threads_per_process" not in accelerate_arguments(job, on_cpu=True)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert "GLOO_SOCKET_IFNAME" not in launcher._environment(job, on_cpu=True)
    assert "ACCELERATE_USE_CPU" not in launcher._environment(job, on_cpu=False)


def test_accelerates_own_configuration_says_what_is_left_open(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And neither how many processes there are nor what they do, on which both of them have a word."""
    configuration = script.with_name("default_config.yaml")
    configuration.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\n"
        "num_machines: 3\nmachine_rank: 2\nmain_process_ip: 10.9.9.9\nrdzv_backend: c10d\nsame_network: true\n"
    )
    monkeypatch.setattr(launcher, "_configuration", lambda: str(configuration))
    address = {"main_process_ip": "127.0.0.1", "main_process_port": 1234}
    for job, mixed_precision in (
        (Launch(script=str(script), num_processes=2, **address), "bf16"),
        (Launch(script=str(script), num_processes=1, **address), "bf16"),
        (Launch(script=str(script), num_processes=2, mixed_precision="no", **address), "no"),
    ):
        arguments = launch_command_parser().parse_args(accelerate_arguments(job, on_cpu=True))
        read = _validate_launch_command(arguments)[0]
        assert read.mixed_precision == mixed_precision
        assert (read.num_processes, read.num_machines, read.machine_rank) == (job.num_processes, 1, 0)
        assert (read.rdzv_backend, read.main_process_ip) == ("static", "127.0.0.1")
        assert read.multi_gpu == (job.num_processes == 2)


# How it ends

FAILING = """
import os, signal, sys, time
if int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1:
    os.kill(os.getpid(), int(sys.argv[1])) if int(sys.argv[1]) > 1 and sys.argv[2:] else sys.exit(int(sys.argv[1]))
time.sleep(100)
"""


@pytest.mark.parametrize(
    ("options", "arguments", "code", "message"),
    [
        ("--num_processes 2", "7", 7, "rank 1 ended with exit code 7"),
        ("--num_processes 2", "9 signal", 137, "rank 1 was killed by SIGKILL"),
        ("--num_processes 2", "15 signal", 143, "rank 1 was killed by SIGTERM"),
        ("--num_processes 1", "7", 7, ""),
        ("--num_processes 2 --max-restarts 1", "7", 7, "rank 1 ended with exit code 7 after 1 restart(s)"),
        ("--num_processes 1 --max-restarts 1", "7", 7, "rank 0 ended with exit code 7 after 1 restart(s)"),
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed(
    options: str, arguments: str, code: int, message: str, tmp_path: Path
) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    options_and_script = [*options.split(), "--cpu", "failing.py", *arguments.split()]
    done = run_command("launch", *options_and_script, folder=tmp_path)
    assert done.code == code, done.output
    assert message in done.output
    assert done.output.count("start again (restart 1 of 1)") == ("restarts" in options)


WAITING = """
import os, pathlib, signal, sys, time
if sys.argv[1:] == ["stubborn"]:
    signal.signal(signal.SIGINT, lambda *_: pathlib.Path(f"asked{os.getpid()}").touch())
pathlib.Path(f"pid{os.getpid()}").touch()
deadline = time.monotonic() + 100
while time.monotonic() < deadline:
    time.sleep(0.05)
"""


@pytest.mark.parametrize(
    ("arguments", "signals", "code"),
    [
        ([], {"pid": signal.SIGINT}, 130),
        ([], {"pid": signal.SIGTERM}, 143),
        (["stubborn"], {"pid": signal.SIGINT, "asked": signal.SIGINT}, 130),
        ([], {"pid": signal.SIGKILL}, -signal.SIGKILL),
    ],
    ids=["ctrl-c", "terminated", "ctrl-c twice", "killed"],
)
def test_an_interrupt_ends_all_processes(
    arguments: list[str], signals: dict[str, int], code: int, tmp_path: Path
) -> None:
    """At once, and not only when torch's patience of 30 s with a stubborn process is over."""
    (tmp_path / "waiting.py").write_text(WAITING)

    def both(name: str) -> bool:
        return len(list(tmp_path.glob(f"{name}*"))) == 2

    done = run_command(
        "launch", "--cpu", "--num_processes", "2", "waiting.py", *arguments, folder=tmp_path, timeout=25,
        interrupts=[(number, functools.partial(both, name)) for name, number in signals.items()],
    )  # fmt: skip
    assert done.code == code, done.output
    deadline = time.monotonic() + (5 if code < 0 else 0)
    for path in tmp_path.glob("pid*"):
        while (runs := _runs(int(path.name.removeprefix("pid")))) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not runs


def _runs(process: int) -> bool:
    """Whether a process runs; nobody may have waited for one whose launcher was killed."""
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# Beside accelerate

TRAINING = """
import sys, torch, meshwright as mw
from accelerate import Accelerator
from torch.utils.data import DataLoader
from support.models import build, tokens

accelerator = Accelerator()
model = build("llama")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = [{"input_ids": ids, "labels": ids} for ids in tokens(12, 10)]
model, optimizer, loader = mw.to_distributed(model, optimizer, DataLoader(rows, batch_size=4))
for batch in loader:
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    sys.stdout.write(f"shown {accelerator.process_index} {accelerator.num_processes} {loss.item()}\\n")
"""


def test_a_script_of_accelerate_trains_by_the_launchers_plan(
    tmp_path: Path, preloaded_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float32, three steps of SGD: sums in another order are off by 1e-6; a rank that trained alone by 1e-2."""
    model = build("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, alone = [], []
    rows = [{"input_ids": ids, "labels": ids} for ids in tokens(12, 10)]
    for batch in DataLoader(rows, batch_size=4):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        alone.append(model(input_ids=batch["input_ids"][:2], labels=batch["labels"][:2]).loss.item())
    (tmp_path / "train.py").write_text(TRAINING)
    monkeypatch.setenv("PYTHON_EXEC", str(preloaded_python))
    done = run_command("launch", "--dp", "2", "train.py", folder=tmp_path)
    assert done.code == 0, done.output
    assert "never used" not in done.output and "no effect" not in done.output
    printed = [line.split() for line in shown(done.output)]
    assert {(rank, count) for rank, count, _ in printed} == {("0", "2"), ("1", "2")}
    for rank in ("0", "1"):
        found = [float(loss) for r, _, loss in printed if r == rank]
        assert sorted(found) == pytest.approx(sorted(losses), rel=1e-5)
    assert losses != pytest.approx(alone, rel=1e-3)


CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 256,
    "vocab_size": 1000,
}


def emitted(folder: Path, *options: str) -> Any:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    common = ["--model", str(folder / "config.json"), "--seq-len", "64", "--global-batch", "8", "--emit", "accelerate"]
    return CliRunner().invoke(app, ["plan", *common, *options])


def test_a_configuration_for_plain_accelerate(script: Path, tmp_path: Path, preloaded_python: Path) -> None:
    """Run by the very line that its comment gives."""
    plan = tmp_path / "plan.yaml"
    done = emitted(tmp_path, "--gpus", "2", "--gpu", "cpu", "--save", str(plan))
    assert done.exit_code == 0, done.output
    (tmp_path / "accelerate.yaml").write_text(done.output)
    line = next(line for line in done.output.splitlines() if "accelerate launch" in line).lstrip("# ")
    line = line.replace("THIS_FILE", "accelerate.yaml").replace("train.py", script.name)
    path = os.pathsep.join([str(preloaded_python.parent), os.environ["PATH"]])
    run = subprocess.run(line, shell=True, cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True,
                         text=True, timeout=120)  # fmt: skip
    assert run.returncode == 0, run.stderr
    lines = shown(run.stdout)
    assert len(lines) == 2
    for line in lines:
        assert f"'MESHWRIGHT_PLAN': '{plan}', 'ACCELERATE_USE_CPU': 'true'" in line
    assert read_plan(plan)["dp"] * read_plan(plan)["tp"] == 2


def test_a_configuration_for_several_machines(tmp_path: Path) -> None:
    done = emitted(tmp_path, "--gpus", "16", "--gpus-per-node", "8")
    (tmp_path / "accelerate.yaml").write_text(done.output)
    config = load_config_from_file(str(tmp_path / "accelerate.yaml"))
    assert (config.num_processes, config.num_machines, config.use_cpu) == (16, 2, False)
    assert config.mixed_precision == "bf16"  # as planned
    assert "MESHWRIGHT_PLAN='{" in done.output
    assert "--machine_rank RANK --main_process_ip" in done.output


def test_a_configuration_is_printed_alone(tmp_path: Path) -> None:
    done = emitted(tmp_path, "--gpus", "2", "--gpu", "cpu", "--json")
    assert done.exit_code == 2
    assert "--emit accelerate prints a file; leave out --json" in done.output


def test_help_waits_for_nothing() -> None:
    code = "import sys, meshwright_tools.cli; print([m for m in ('torch', 'numpy', 'accelerate') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
    text = CliRunner().invoke(app, ["launch", "--help"]).output
    assert "meshwright launch --tp 2 --dp 2 -- train.py" in text
