"""Two hosts train one model; when one of them is gone, the other ends and says which."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from harness.hosts import Host, two_hosts
from support.decoder import LENGTH, VOCAB, make_decoder
from support.tiers import crossing

TIMEOUT = 4.0  # seconds that a rank may be silent, instead of two minutes
END = 60.0  # seconds; without the guard gloo would wait for the group's timeout in every rank, nameless
STEPS = 3  # that are compared

TRAINING = f"""
import os, sys, time, torch, meshwright as mw
from support.decoder import LENGTH, VOCAB, make_decoder

model = make_decoder()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, _ = mw.to_distributed(model, optimizer, config=mw.ToDistributedConfig(timeout_s={TIMEOUT}))
rows = torch.arange(4 * LENGTH).reshape(4, LENGTH).mul(7).remainder(VOCAB).chunk(2)[int(os.environ["RANK"]) // 2]
for step in range(100_000):
    loss, _ = model(rows, labels=rows)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step < {STEPS}:
        sys.stdout.write(f"loss {{os.environ['RANK']}} {{step}} {{loss.item()}}\\n")
    time.sleep(0.02)
"""


def losses_of_one_device() -> list[float]:
    model = make_decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.arange(4 * LENGTH).reshape(4, LENGTH).mul(7).remainder(VOCAB)
    losses = []
    for _ in range(STEPS):
        loss, _ = model(ids, labels=ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("lose", "victim", "cause"),
    [
        # Rank 0's host, where the referee is.
        (Host.kill, 0, r"rank [01] \(host NAME, dp=0 tp=[01]\): its process ended abruptly"),
        crossing(Host.cut_off, 1, r"rank [23] \(host NAME, dp=1 tp=[01]\): (stopped, hung or cut off|no heartbeat)"),
    ],
    ids=["killed", "cut off"],
)
def test_a_lost_host_ends_the_other_with_an_error_that_names_it(
    lose: Callable[[Host], None], victim: int, cause: str, tmp_path: Path, preloaded_python: Path
) -> None:
    """dp over the hosts, tp in them, in float64. A rank prints the loss of its rows; a host alone is off by 1e-2."""
    script = str(tmp_path / "train.py")
    Path(script).write_text(TRAINING)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    environment.pop("GLOO_SOCKET_IFNAME", None)  # the launcher shall find it
    options = ["--cpu", "--dp", "2", "--tp", "2", "--num_machines", "2", "--main_process_ip"]
    command = [str(preloaded_python), "-m", "meshwright_tools.cli", "launch", *options]
    with two_hosts() as hosts:
        logs = [tmp_path / f"{host.name}.log" for host in hosts]
        launchers = [
            host.start([*command, hosts[0].address, "--machine_rank", str(rank), script], logs[rank], environment)
            for rank, host in enumerate(hosts)
        ]
        wait_until_trained(launchers, logs)
        lose(hosts[victim])
        survivor = 1 - victim
        code = launchers[survivor].wait(END)
        output = logs[survivor].read_text()
        assert code == 1, output
        assert re.search(cause.replace("NAME", hosts[victim].name), output), output
        hosts[victim].kill()
        launchers[victim].wait(END)
    printed = [line.split() for log in logs for line in log.read_text().splitlines() if line.startswith("loss ")]
    own = {rank: [float(line[3]) for line in printed if line[1] == rank] for rank in "0123"}
    assert own["0"] == pytest.approx(own["1"], rel=1e-12) and own["2"] == pytest.approx(own["3"], rel=1e-12)
    means = [(first + second) / 2 for first, second in zip(own["0"], own["2"], strict=True)]
    assert means == pytest.approx(losses_of_one_device(), rel=1e-10)


SHRINKING = f"""
import os, sys, time, torch, meshwright as mw
from pathlib import Path
from torch.utils.data import DataLoader
from support.models import build, tokens

model = build("llama")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = [{{"input_ids": ids, "labels": ids}} for ids in tokens(12, 10)]
model, optimizer, loader = mw.to_distributed(
    model, optimizer, DataLoader(rows, batch_size=4), config=mw.ToDistributedConfig(timeout_s={TIMEOUT})
)
done = mw.load_checkpoint("saved", model, optimizer, loader=loader, missing_ok=True)
world = os.environ["WORLD_SIZE"]
for step in range(0 if done is None else done.step, 10 if world == "2" else 100_000):
    batch = next(iter(loader))
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step < {STEPS}:
        mw.save_checkpoint("saved", model, optimizer, loader=loader, step=step + 1)
    sys.stdout.write(f"loss {{os.environ['RANK']}} {{step}} {{loss.item()}} of {{world}}\\n")
    time.sleep(0.02)
"""


@pytest.mark.crossing
def test_a_job_goes_on_with_the_machine_that_is_left(tmp_path: Path, preloaded_python: Path) -> None:
    """With a plan for two processes instead of four, from the checkpoint of the four."""
    (tmp_path / "train.py").write_text(SHRINKING)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    environment.pop("GLOO_SOCKET_IFNAME", None)
    command = (
        f"{preloaded_python} -m meshwright_tools.cli launch --cpu --dp 2 --tp 2 --num_machines 1:2 --max-restarts 3"
    )
    with two_hosts() as hosts, contextlib.chdir(tmp_path):
        options = ["--start_timeout", "10", "--main_process_ip", hosts[0].address]
        logs = [tmp_path / f"{host.name}.log" for host in hosts]
        launchers = [
            host.start([*command.split(), *options, "--machine_rank", str(rank), "train.py"], logs[rank], environment)
            for rank, host in enumerate(hosts)
        ]
        wait_until_trained(launchers, logs)
        hosts[1].kill()
        code = launchers[0].wait(150)
        output = logs[0].read_text()
        launchers[1].wait(END)
    assert code == 0, output
    assert "2 processes on 1 machine(s), instead of 4" in output
    assert "of which 2 are left, so the planner picks another plan" in output
    goes_on = [int(step) for step in re.findall(r"^loss 0 (\d+) .* of 2$", output, re.MULTILINE)]
    assert goes_on == list(range(STEPS, 10)), output


def wait_until_trained(launchers: list[subprocess.Popen[bytes]], logs: list[Path]) -> None:
    deadline = time.monotonic() + 200
    last = re.compile(rf"^loss \d {STEPS - 1} .*\n", re.MULTILINE)
    while not all(len(last.findall(log.read_text())) == 2 for log in logs):
        outputs = "\n\n".join(log.read_text() for log in logs)
        assert all(launcher.poll() is None for launcher in launchers), outputs
        assert time.monotonic() < deadline, outputs
        time.sleep(0.1)
